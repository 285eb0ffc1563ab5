package handler

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
// A mark is there while window is not 0. Until until, the worker gets no requests;
// then it gets window at a time. Only miss sets missing, with a reach that is
// away, and an answer ends both: missing implies away.

// reach is whether a worker can be reached, as was seen last.
type reach int32

const (
	reachUnknown reach = iota
	reachable
	refusing    // nobody listens at its address
	unreachable // no connection could be made for another reason
	// unresponsive is a worker that accepts connections and does not answer, or
	// has not answered since it was away: a proxy before it may accept them while
	// the engine loads.
	unresponsive
)

// away tells whether the worker is known not to answer.
func (r reach) away() bool { return r >= refusing }

// health is how a worker has done lately. A failure rates it down for
// half a second, further ones for up to three; then it is let back: one
// request first, and with each success twice as many at a time, and with each
// second after the first success. Requests that it had before are not counted
// among these.
//
// The mark is passive and only ever a preference: if all workers are marked,
// the marks are ignored.
type health struct {
	marked atomic.Bool // window is not 0; for those who need no more than that

	mu     sync.Mutex
	until  time.Time // rated down before
	fails  int       // in a row
	window int       // requests at a time while it is let back; 0 = no limit
	probes int       // that it has of these
	mark   uint64    // counts the times that it was rated down
	grew   time.Time // when the last success made the window larger

	reached    atomic.Int32 // a reach; written under mu
	missing    bool         // the mark stands only for the worker's absence
	unanswered atomic.Int32 // the router's own questions in a row

	answers, errors float64 // of late, decayed to at
	at              time.Time
	inARow          int // errors of its own since the last good answer
	prompts         [fewPrompts]uint64
	different       int // of prompts: those of the errors of late
}

const (
	firstDown  = 500 * time.Millisecond
	longest    = 3 * time.Second
	fullWindow = 32
	// growAfter is after how long without a failure the window doubles, as it
	// does with each success.
	growAfter = time.Second
	// errorMemory is after how long an answer counts a third.
	errorMemory = 10 * time.Second
	// fewErrors are no evidence.
	fewErrors = 5
	// unproven is how long after its mark a worker without requests is still
	// shown as let back.
	unproven = time.Minute
	// fewUnanswered questions in a row may be lost.
	fewUnanswered = 2
	// allErrors of its own in a row are all that the worker gives now, however
	// well it did before.
	allErrors = 8
)

// available tells whether the worker should get a request beside those that
// it has.
func (h *health) available(now time.Time) bool {
	if !h.marked.Load() {
		return true
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.open(now)
}

// open is available. The lock is held.
func (h *health) open(now time.Time) bool {
	return h.window == 0 || !now.Before(h.until) && h.probes < h.room(now)
}

// room returns how many requests at a time a worker is let back with. Once it has
// shown that it answers, that grows with time, too: long answers come seldom. The
// lock is held.
func (h *health) room(now time.Time) int {
	if h.window < 2 {
		return h.window
	}
	doubled := min(max(now.Sub(h.grew)/growAfter, 0), 32)
	if n := h.window << doubled; n < fullWindow {
		return n
	}
	return math.MaxInt
}

// reach returns whether the worker can be reached.
func (h *health) reach() reach { return reach(h.reached.Load()) }

// miss records that the worker is away, and marks it down for as long as that goes
// on: the workers that are away are looked at each second.
// It returns what was seen before, and whether the worker was well.
func (h *health) miss(now time.Time, r reach) (before reach, was bool) {
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
func (h *health) connected(now time.Time) (before reach) {
	h.mu.Lock()
	defer h.mu.Unlock()
	before = h.reach()
	if before == reachUnknown {
		h.reached.Store(int32(reachable))
	}
	if before == refusing || before == unreachable {
		h.reached.Store(int32(unresponsive))
		if h.missing {
			h.until = now
		}
	}
	return before
}

// meet records that the worker answered, and removes the mark if it stands for
// nothing else than miss. It returns what was seen before, and whether the worker
// is now well again.
func (h *health) meet() (before reach, again bool) {
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

// admit takes in that the worker gets a request. What it returns is for leave.
func (h *health) admit() (mark uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.window != 0 {
		h.probes++
	}
	return h.mark
}

// leave takes in that a request has ended.
func (h *health) leave(mark uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if mark == h.mark && h.probes > 0 {
		h.probes--
	}
}

// fail takes in that an attempt failed that was begun at the given time, and
// tells whether the worker was well before. wait is how long the worker asked
// to be left alone, 0 if it did not. busy says that it is not ill, but has too
// much to do: that does not make the next time longer.
func (h *health) fail(now, begun time.Time, wait time.Duration, busy bool) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.window != 0 && begun.Before(h.until) {
		return false // one of those that were under way when it failed
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

// succeed takes in that an attempt came to an answer, and tells whether the
// worker is now well again.
func (h *health) succeed(now, begun time.Time) bool {
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

// err takes in that the worker gave an error for an answer. It returns how
// many it gave of late, and their share of its answers: 1 once it gives nothing
// else. own says that it is hardly the client's: a client that errs often must
// not mark the worker that it is sent to. Nor may one session or prompt alone:
// both are 0 until there were errors with fewPrompts of them.
func (h *health) err(now time.Time, own bool, prompt uint64) (errors, share float64) {
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

// answered counts an answer, an error or none. The lock is held.
func (h *health) answered(now time.Time, errors float64) {
	keep := h.keep(now)
	h.answers *= keep
	h.errors *= keep
	h.at = now
	h.answers++
	h.errors += errors
}

// keep returns how much the answers so far still count. The lock is held.
func (h *health) keep(now time.Time) float64 {
	return math.Exp(-float64(now.Sub(h.at)) / float64(errorMemory))
}

// lately returns the answers and errors of late.
func (h *health) lately() (answers, errors float64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.answers, h.errors
}

// healthState is a worker's health at one moment.
type healthState struct {
	open            bool // it should get a request beside those that it has
	well            bool // it is neither rated down nor being let back
	reach           reach
	away            bool      // no connection can be made, or it does not answer questions
	until           time.Time // zero if it is not rated down
	fails, window   int
	answers, errors float64
}

// state returns the health as of now.
func (h *health) state(now time.Time) healthState {
	h.mu.Lock()
	defer h.mu.Unlock()
	keep := h.keep(now)
	s := healthState{
		open:  h.open(now),
		well:  h.window == 0 || now.Sub(h.until) > unproven,
		reach: h.reach(),
		fails: h.fails, window: min(h.room(now), fullWindow),
		answers: h.answers * keep, errors: h.errors * keep,
	}
	s.away = s.reach.away() && (s.reach != unresponsive || h.unanswered.Load() > 0)
	if now.Before(h.until) {
		s.until = h.until
	}
	return s
}

// worse tells whether a worker with these figures answers far more errors than
// the others do. An engine whose core has died, or that lacks the model, does
// so at once, and looks like the least busy one; errors that clients provoke
// come from all.
func worse(errors, share, othersShare float64) bool {
	return errors >= fewErrors && share > 0.5 && share > 2*othersShare+0.2
}
