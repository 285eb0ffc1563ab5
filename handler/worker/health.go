package worker

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/observe"
)

// Reach says whether the router could reach a worker when it last tried.
type Reach int32

const (
	ReachUnknown Reach = iota
	Reachable          // the worker answered
	Refusing           // nothing listens at its address
	Unreachable        // the router cannot connect for another reason
	Unresponsive       // the worker accepts connections, and has not answered since
)

// Away returns whether the worker is known not to answer.
func (r Reach) Away() bool { return r >= Refusing }

// Health says how a worker did lately. It has a reach and a mark.
//
// A mark has two phases. First the worker gets no requests, for 0.5 s after the first
// failure and for up to 3 s after further ones. Then it gets one request at a time. The
// window, this number, doubles with each good answer and with each second after the
// first one. A request that runs for trialTime counts as one. The mark ends when the window
// reaches fullWindow. If all workers are marked down, the router ignores marks.
//
// A mark of absence is set only because the router cannot reach the worker. Any answer
// removes it, and a failed request makes it an ordinary mark.
//
//	event                            | reach becomes | mark
//	---------------------------------|---------------|------------------------------------
//	connection refused               | refusing      | down for 3 s, a mark of absence if new
//	other failure to connect         | unreachable   | the same
//	two own requests unanswered      | unresponsive  | the same
//	connected, was unreachable       | unresponsive  | a mark of absence gets window 1 now
//	connected, was unknown           | reachable     | as before
//	answer                           | reachable     | a mark of absence is removed
//	failed request, or hung          | as before     | down for 0.5 to 3 s, then window 1
//	good answer after the first phase| reachable     | the window doubles
type Health struct {
	marked     atomic.Bool  // window is not 0; requests read it without the lock
	reached    atomic.Int32 // a reach; mu guards writes
	unanswered atomic.Int32 // requests of the router's own in a row
	rests      atomic.Int64 // see Rest: Unix nanoseconds
	hung       atomic.Int64 // when the worker was found hung, in ticks; 0 if it is not

	mu     sync.Mutex
	until  time.Time // end of the mark's first phase
	fails  int       // in a row
	window int       // requests at a time in the second phase; 0 = no mark
	active int       // requests that the window counts now
	tried  time.Time // begin of the first of them
	number uint64    // of the mark
	grew   time.Time // when the last good answer doubled the window
	absent bool      // it is a mark of absence
	recent answers
}

// answers counts the recent answers of a worker, and the errors among them. mu of Health
// guards it.
type answers struct {
	observe.Decaying
	inARow   int      // errors that clients hardly caused, since the last good answer
	culprits []uint64 // up to fewPrompts sessions or prompts of the recent errors
}

const (
	firstDown   = 500 * time.Millisecond
	longestMark = 3 * time.Second
	fullWindow  = 32
	// growAfter is the time without a failure in which the window doubles.
	growAfter = time.Second
	// trialTime is how long a request must run without a failure, while the worker answers the
	// router's own questions, to count as a good answer. Some answers take minutes.
	trialTime = 5 * time.Second
	// errorMemory is how long answers count.
	errorMemory = 10 * time.Second
	// fewPrompts is the least number of prompts or sessions that must show a fault.
	fewPrompts = 3
	// fewErrors is the least number of errors that may mark a worker down.
	fewErrors = 5
	// idleMarkShown is how long the admin API shows a mark of a worker without requests.
	idleMarkShown = time.Minute
	// allErrors is how many server-side errors in a row show that it answers with
	// nothing else.
	allErrors = 8
)

// Rest has the worker, a backup, get no request for a while, as it asks.
func (h *Health) Rest(until time.Time) { h.rests.Store(until.UnixNano()) }

// Rests returns whether that is so.
func (h *Health) Rests(now time.Time) bool { return now.UnixNano() < h.rests.Load() }

// Available returns whether the worker should get one more request.
func (h *Health) Available(now time.Time) bool {
	if !h.marked.Load() {
		return true
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.open(now)
}

// open is Available. The caller holds the lock.
func (h *Health) open(now time.Time) bool {
	return h.window == 0 || !now.Before(h.until) && h.active < h.room(now)
}

// room returns how many requests at a time a marked worker may have. Long answers are
// rare, so the window also grows with time. The caller holds the lock.
func (h *Health) room(now time.Time) int {
	grew := h.grew
	if h.window < 2 {
		if h.active == 0 || h.hung.Load() != 0 || h.unanswered.Load() > 0 {
			return h.window
		}
		grew = h.tried.Add(trialTime - growAfter)
	}
	doubled := min(max(now.Sub(grew)/growAfter, 0), 32)
	if n := h.window << doubled; n < fullWindow {
		return n
	}
	return math.MaxInt
}

// Reach returns whether the worker can be reached.
func (h *Health) Reach() Reach { return Reach(h.reached.Load()) }

// RecordAway records that the worker is away, and marks it down. It returns the reach
// before, and whether the worker was well.
func (h *Health) RecordAway(now time.Time, r Reach) (previous Reach, wasWell bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	previous = Reach(h.reached.Swap(int32(r)))
	if wasWell = h.window == 0; wasWell {
		h.absent = true
		h.fails++
		h.mark()
	}
	if until := now.Add(longestMark); until.After(h.until) {
		h.until = until
	}
	return previous, wasWell
}

// mark begins a new mark. The caller holds the lock.
func (h *Health) mark() {
	h.window, h.active = 1, 0
	h.number++
	h.marked.Store(true)
}

// unmark ends the mark. The caller holds the lock.
func (h *Health) unmark() {
	h.window, h.active, h.fails, h.absent = 0, 0, 0, false
	h.marked.Store(false)
}

// Connected records that the router could connect. It returns the reach before.
func (h *Health) Connected(now time.Time) (previous Reach) {
	h.mu.Lock()
	defer h.mu.Unlock()
	previous = h.Reach()
	if previous == ReachUnknown {
		h.reached.Store(int32(Reachable))
	}
	if previous == Refusing || previous == Unreachable {
		h.reached.Store(int32(Unresponsive))
		if h.absent {
			h.until = now
		}
	}
	return previous
}

// Answered records that the worker answered, and removes a mark of absence. It returns
// the reach before, and whether there was such a mark.
func (h *Health) Answered() (previous Reach, wasAbsent bool) {
	if h.Reach() == Reachable && h.unanswered.Load() == 0 {
		return Reachable, false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.unanswered.Store(0)
	previous = Reach(h.reached.Swap(int32(Reachable)))
	if wasAbsent = h.absent; wasAbsent {
		h.unmark()
		h.until = time.Time{}
		h.number++
	}
	return previous, wasAbsent
}

// Unanswered records that the worker left a request of the router's own unanswered. It returns whether
// that shows the worker to be away.
func (h *Health) Unanswered() (away bool) {
	return h.unanswered.Add(1) >= fewUnanswered || h.Reach().Away()
}

// Admit records that the worker gets a request. The caller passes the result to Leave.
func (h *Health) Admit(now time.Time) (mark uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.window != 0 {
		if h.active++; h.active == 1 {
			h.tried = now
		}
	}
	return h.number
}

// Leave records that a request has ended.
func (h *Health) Leave(mark uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if mark == h.number && h.active > 0 {
		h.active--
	}
}

// Fail records that an attempt failed, and returns whether the worker was well before.
// wait is the worker's Retry-After, 0 if it sent none. A busy worker is not ill, so its
// next mark is not longer.
func (h *Health) Fail(now, begun time.Time, wait time.Duration, busy bool) (wasWell bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.window != 0 && begun.Before(h.until) {
		return false // the attempt began before the mark
	}
	return h.fail(now, wait, busy)
}

// MarkHung marks the worker down, whatever mark it has. Answers do not remove this mark: a server
// may answer while its engine's core hangs.
func (h *Health) MarkHung(now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.fail(now, 0, false)
	h.hung.Store(ticks(now))
}

// IsHung returns whether the worker is hung.
func (w *Worker) IsHung() bool { return w.Health.hung.Load() != 0 }

func (w *Worker) hungSince() time.Time { return tickTime(w.Health.hung.Load()) }

// EndHung records that the worker is not hung.
func (w *Worker) EndHung() { w.Health.hung.Store(0) }

// fail begins an ordinary mark. The caller holds the lock.
func (h *Health) fail(now time.Time, wait time.Duration, busy bool) (wasWell bool) {
	wasWell = h.window == 0
	down := min(max(firstDown<<min(h.fails, 8), wait), longestMark)
	if !busy {
		h.fails++
	}
	h.until, h.absent = now.Add(down), false
	h.mark()
	return wasWell
}

// Succeed records a good answer, and returns whether it ended the worker's mark.
func (h *Health) Succeed(now, begun time.Time) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.recent.To(now, errorMemory).Count++
	h.recent.inARow = 0
	if h.window == 0 || begun.Before(h.until) {
		return false
	}
	h.fails = 0
	if h.window = 2 * min(h.room(now), fullWindow); h.window < fullWindow {
		h.grew = now
		return false
	}
	h.unmark()
	return true
}

// RecordError records an answer with an error. It returns the recent errors, and their share of
// the answers. A worker of a quiet pool has few recent answers. So allErrors server-side errors
// in a row do not decay, and their share is 1. Both results are 0 until fewPrompts sessions or
// prompts had errors, because one client alone must not mark a worker down.
func (h *Health) RecordError(now time.Time, serverSide bool, culprit uint64) (errors, share float64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := &h.recent
	if r.To(now, errorMemory); r.inARow == 0 && r.Sum < 0.5 {
		r.culprits = nil
	}
	r.Count, r.Sum = r.Count+1, r.Sum+1
	if len(r.culprits) < fewPrompts && !slices.Contains(r.culprits, culprit) {
		r.culprits = append(r.culprits, culprit)
	}
	if serverSide {
		r.inARow++
	}
	switch {
	case len(r.culprits) < fewPrompts:
		return 0, 0
	case r.inARow >= allErrors:
		return float64(r.inARow), 1
	}
	return r.Sum, r.Sum / r.Count
}

// Lately returns the recent answers and errors.
func (h *Health) Lately(now time.Time) (answers, errors float64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := h.recent.To(now, errorMemory)
	return r.Count, r.Sum
}

// HealthState is a worker's health at one moment.
type HealthState struct {
	Well    bool      `json:"-"` // the worker has no mark
	Reach   Reach     `json:"-"`
	Away    bool      `json:"-"`                          // the router cannot connect, or its own requests stay unanswered
	Until   time.Time `json:"marked_down_until,omitzero"` // end of the mark's first phase; zero outside it
	Fails   int       `json:"failures_in_a_row"`
	Window  int       `json:"-"`
	Answers float64   `json:"recent_answers"`
	Errors  float64   `json:"recent_errors"`
}

// State returns the health as of now.
func (h *Health) State(now time.Time) HealthState {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := h.recent.To(now, errorMemory)
	s := HealthState{
		Well:  h.window == 0 || now.Sub(h.until) > idleMarkShown,
		Reach: h.Reach(),
		Fails: h.fails, Window: min(h.room(now), fullWindow),
		Answers: r.Count, Errors: r.Sum,
	}
	s.Away = s.Reach.Away() && (s.Reach != Unresponsive || h.unanswered.Load() > 0)
	if now.Before(h.until) {
		s.Until = h.until.UTC()
	}
	if h.Rests(now) {
		s.Well, s.Until = false, time.Unix(0, h.rests.Load()).UTC()
	}
	return s
}
