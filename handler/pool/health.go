package pool

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// A worker's availability is its reach and its mark.
//
//	seen                           | reach        | mark
//	-------------------------------|--------------|------------------------------------
//	connection refused             | refusing     | missing, for 3 s from the last look
//	no connection otherwise        | unreachable  | the same
//	two questions without an answer| unresponsive | the same
//	connection only, after absence | unresponsive | missing, over: window 1 from now on
//	connection only, not known     | reachable    | unchanged
//	answer to a question or request| reachable    | removed if missing, else unchanged
//	failed request                 | unchanged    | 0.5 to 3 s, then window 1; not missing
//	good answer after that time    | reachable    | window doubles; removed at fullWindow
//
// A mark stands while window is not 0. The worker gets no requests before until, then
// window at a time. Only miss sets missing, and an answer ends it: missing implies away.

// reach is whether a worker could be reached at the last try.
type reach int32

const (
	ReachUnknown reach = iota
	reachable
	refusing     // nothing listens at its address
	unreachable  // no connection could be made for another reason
	Unresponsive // it accepts connections, and has not answered since: the engine may still load
)

// Away returns whether the worker is known not to answer.
func (r reach) Away() bool { return r >= refusing }

// Health is how a worker has done lately. A failure marks it down for 0.5 s, further ones
// for up to 3 s. Then it gets one request at a time, and twice as many with each success
// and each second after the first. If all workers are marked down, marks are ignored.
type Health struct {
	marked atomic.Bool // window is not 0; read without the lock

	mu     sync.Mutex
	until  time.Time // marked down before
	fails  int       // in a row
	window int       // requests at a time after a mark; 0 = no limit
	probes int       // that it has of these
	mark   uint64    // counts the marks
	grew   time.Time // when the last success made the window larger

	reached    atomic.Int32 // a reach; written under mu
	missing    bool         // the mark stands only for the worker's absence
	unanswered atomic.Int32 // the router's own questions in a row

	answers, errors float64 // decayed to at
	at              time.Time
	inARow          int // errors of its own since the last good answer
	prompts         [fewPrompts]uint64
	different       int // number of prompts, those of the recent errors
}

const (
	firstDown  = 500 * time.Millisecond
	longest    = 3 * time.Second
	fullWindow = 32
	// growAfter is the time without a failure in which the window doubles.
	growAfter = time.Second
	// errorMemory is after how long an answer counts a third.
	errorMemory = 10 * time.Second
	// FewErrors are no evidence.
	FewErrors = 5
	// unproven is how long a worker without requests is still shown as marked.
	unproven = time.Minute
	// fewUnanswered questions in a row mean that a worker does not answer.
	fewUnanswered = 2
	// allErrors of its own in a row mean that the worker answers with nothing else.
	allErrors = 8
)

// Available returns whether the worker should get one more request.
func (h *Health) Available(now time.Time) bool {
	if !h.marked.Load() {
		return true
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.open(now)
}

// open is available. The lock is held.
func (h *Health) open(now time.Time) bool {
	return h.window == 0 || !now.Before(h.until) && h.probes < h.room(now)
}

// room returns how many requests at a time a marked worker may have. It grows with time
// after the first success: long answers come seldom. The lock is held.
func (h *Health) room(now time.Time) int {
	if h.window < 2 {
		return h.window
	}
	doubled := min(max(now.Sub(h.grew)/growAfter, 0), 32)
	if n := h.window << doubled; n < fullWindow {
		return n
	}
	return math.MaxInt
}

// Reach returns whether the worker can be reached.
func (h *Health) Reach() reach { return reach(h.reached.Load()) }

// miss records that the worker is away, and marks it down until the next probe. It
// returns the reach before, and whether the worker was well.
func (h *Health) miss(now time.Time, r reach) (before reach, was bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	before = reach(h.reached.Swap(int32(r)))
	if was = h.window == 0; was {
		h.missing, h.window, h.probes = true, 1, 0
		h.marked.Store(true)
		h.fails++
		h.mark++
	}
	if until := now.Add(longest); until.After(h.until) {
		h.until = until
	}
	return before, was
}

// connected records that a connection could be made. If the worker was away, it
// gets one request at a time until it answers.
func (h *Health) connected(now time.Time) (before reach) {
	h.mu.Lock()
	defer h.mu.Unlock()
	before = h.Reach()
	if before == ReachUnknown {
		h.reached.Store(int32(reachable))
	}
	if before == refusing || before == unreachable {
		h.reached.Store(int32(Unresponsive))
		if h.missing {
			h.until = now
		}
	}
	return before
}

// meet records that the worker answered, and removes the mark if only miss has set it.
// It returns the reach before, and whether the worker is now well again.
func (h *Health) meet() (before reach, again bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.unanswered.Store(0)
	before = reach(h.reached.Swap(int32(reachable)))
	if again = h.missing; again {
		h.missing, h.window, h.probes, h.fails, h.until = false, 0, 0, 0, time.Time{}
		h.marked.Store(false)
		h.mark++
	}
	return before, again
}

// Admit records that the worker gets a request. Its result is for leave.
func (h *Health) Admit() (mark uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.window != 0 {
		h.probes++
	}
	return h.mark
}

// Leave records that a request has ended.
func (h *Health) Leave(mark uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if mark == h.mark && h.probes > 0 {
		h.probes--
	}
}

// Fail records that an attempt failed, and returns whether the worker was well before.
// wait is the worker's Retry-After, 0 if it has none. busy says that the worker is not
// ill, but has too much to do: the next mark is not longer then.
func (h *Health) Fail(now, begun time.Time, wait time.Duration, busy bool) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.window != 0 && begun.Before(h.until) {
		return false // it began before the mark
	}
	was := h.window == 0
	down := min(firstDown<<min(h.fails, 8), longest)
	if wait > down {
		down = min(wait, longest)
	}
	if !busy {
		h.fails++
	}
	h.until, h.window, h.probes, h.missing = now.Add(down), 1, 0, false
	h.marked.Store(true)
	h.mark++
	return was
}

// Succeed records a good answer, and returns whether the worker is now well again.
func (h *Health) Succeed(now, begun time.Time) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.answered(now, 0)
	h.inARow = 0
	if h.window == 0 || begun.Before(h.until) {
		return false
	}
	h.fails = 0
	if h.window = 2 * min(h.room(now), fullWindow); h.window < fullWindow {
		h.grew = now
		return false
	}
	h.window, h.probes = 0, 0
	h.marked.Store(false)
	return true
}

// RecordError records that the worker answered with an error. It returns the recent errors and
// their share of the answers, 1 if there were only errors. own says that the error is
// hardly the client's. No session or prompt alone marks a worker: both results are 0
// until fewPrompts of them had errors.
func (h *Health) RecordError(now time.Time, own bool, prompt uint64) (errors, share float64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.errors*h.keep(now) < 0.5 {
		h.different = 0
	}
	h.answered(now, 1)
	if h.different < fewPrompts && !slices.Contains(h.prompts[:h.different], prompt) {
		h.prompts[h.different] = prompt
		h.different++
	}
	if own {
		h.inARow++
	}
	if h.different < fewPrompts {
		return 0, 0
	}
	if h.inARow >= allErrors {
		return h.errors, 1
	}
	return h.errors, h.errors / h.answers
}

// answered counts an answer. The lock is held.
func (h *Health) answered(now time.Time, errors float64) {
	keep := h.keep(now)
	h.answers, h.errors, h.at = h.answers*keep+1, h.errors*keep+errors, now
}

// keep returns how much the answers so far still count. The lock is held.
func (h *Health) keep(now time.Time) float64 {
	return math.Exp(-float64(now.Sub(h.at)) / float64(errorMemory))
}

// Lately returns the recent answers and errors.
func (h *Health) Lately() (answers, errors float64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.answers, h.errors
}

// HealthState is a worker's health at one moment.
type HealthState struct {
	open            bool // it should get one more request
	Well            bool // it is not marked
	Reach           reach
	Away            bool      // no connection can be made, or it does not answer questions
	Until           time.Time // zero if it is not marked down
	Fails, Window   int
	Answers, Errors float64
}

// State returns the health as of now.
func (h *Health) State(now time.Time) HealthState {
	h.mu.Lock()
	defer h.mu.Unlock()
	keep := h.keep(now)
	s := HealthState{
		open:  h.open(now),
		Well:  h.window == 0 || now.Sub(h.until) > unproven,
		Reach: h.Reach(),
		Fails: h.fails, Window: min(h.room(now), fullWindow),
		Answers: h.answers * keep, Errors: h.errors * keep,
	}
	s.Away = s.Reach.Away() && (s.Reach != Unresponsive || h.unanswered.Load() > 0)
	if now.Before(h.until) {
		s.Until = h.until
	}
	return s
}

// Worse returns whether a worker answers with far more errors than the others do. An
// engine whose core has died, or that lacks the model, answers so at once, and looks
// like the least busy one. Errors that clients provoke come from all workers.
func Worse(errors, share, othersShare float64) bool {
	return errors >= FewErrors && share > 0.5 && share > 2*othersShare+0.2
}
