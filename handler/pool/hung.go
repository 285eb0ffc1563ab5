package pool

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

// AttemptKind is a kind of attempt, by what its worker sends.
type AttemptKind uint8

const (
	KindOther  AttemptKind = iota // no inference: an engine's server may answer while its core hangs
	KindStream                    // tokens as the engine computes them
	KindPlain                     // nothing before the end, or it is not known
)

// Move is how an attempt moves to another worker. The pool cancels the attempt. The ordinary
// retry, or the stream that goes on, selects the other worker.
type Move struct {
	Cancel func(drained bool) // the worker drains, and does not hang
	Want   Wants              // of the other worker
	Offers Offers
}

// progress is the output of a worker, and the attempts that wait for it.
type progress struct {
	lastOutput atomic.Int64 // when the last byte of an inference came, in ticks
	lastAnswer atomic.Int64 // when it last answered a question of the router's own, in ticks
	hungSince  atomic.Int64 // when the pool found the worker hung, in ticks; 0 if it is not

	suspected int // checks in a row that found the worker hung; only the upkeep uses it

	mu       sync.Mutex
	attempts map[*Seat]struct{} // but none of KindOther
}

// started is the zero of ticks. It has a monotonic reading, so a change of the system's
// clock makes no worker hung.
var started = time.Now()

// ticks returns a time as nanoseconds since started, at least 1.
func ticks(t time.Time) int64 { return max(int64(t.Sub(started)), 1) }

// tickTime is the reverse of ticks.
func tickTime(n int64) time.Time { return started.Add(time.Duration(n)) }

// IsHung returns whether the worker is hung.
func (w *Worker) IsHung() bool { return w.progress.hungSince.Load() != 0 }

// begin records that an attempt begins.
func (f *progress) begin(a *Seat) {
	if a.Kind == KindOther {
		return
	}
	a.waiting.Store(true)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.attempts == nil {
		f.attempts = make(map[*Seat]struct{})
	}
	f.attempts[a] = struct{}{}
}

// end records that an attempt has ended.
func (f *progress) end(a *Seat) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.attempts, a)
}

// movable returns the attempts that can move to another worker, oldest first.
func (f *progress) movable() []*Seat {
	f.mu.Lock()
	defer f.mu.Unlock()
	var list []*Seat
	for a := range f.attempts {
		if a.move != nil {
			list = append(list, a)
		}
	}
	slices.SortFunc(list, func(a, b *Seat) int { return a.Begun.Compare(b.Begun) })
	return list
}

// silence is how long a worker has been silent, and what waits for it.
type silence struct {
	since   time.Time
	longest *Seat // the stream with the most prefill ahead
	waiting int   // number of streams that wait for output
}

// silence returns the worker's silence. waited is false if no stream waits for output.
func (f *progress) silence() (s silence, waited bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for a := range f.attempts {
		if a.Kind == KindStream && a.waiting.Load() {
			if s.waiting == 0 || a.Begun.Before(s.since) {
				s.since = a.Begun
			}
			s.waiting++
		}
	}
	if last := tickTime(f.lastOutput.Load()); s.since.Before(last) {
		s.since = last
	}
	for a := range f.attempts {
		// an attempt that begins later does not explain the silence
		if a.Kind == KindStream && (s.longest == nil || a.ahead >= s.longest.ahead) && a.Begun.Before(s.since.Add(hungCheck)) {
			s.longest = a
		}
	}
	return s, s.waiting > 0
}

const (
	// hungCheck is the time between two checks for hung workers.
	hungCheck = time.Second
	// hungChecks is how many checks in a row must find a worker hung. A byte may arrive
	// just after one of them.
	hungChecks = 3
	// hungAfter is the least silence of a hung worker.
	hungAfter = 15 * time.Second
	// hungPrefills is how many times the predicted time a first token may take.
	hungPrefills = 4
	// leastRate is the assumed prefill rate of a worker without timings, in tokens a second.
	leastRate = 500.0
)

// hungWatch finds hung workers, and moves attempts away from them. Only the upkeep uses it.
type hungWatch struct{ *Pool }

// patience returns how long an attempt's target may be silent.
func (h hungWatch) patience(a *Seat) time.Duration {
	rate := leastRate
	if load, ok := h.Scheduler.Load(time.Now(), a.Target); ok {
		if rate = load.PrefillRate; !load.RateLearned {
			rate = min(rate, leastRate)
		}
	}
	return max(hungAfter, time.Duration(hungPrefills*float64(a.ahead)/rate*float64(time.Second)))
}

// check finds hung workers: none of their active streams has produced output for longer
// than prefills explain, while other workers make progress.
func (h hungWatch) check(t time.Time) {
	workers := h.All()
	for _, w := range workers {
		if w.drain.Load()&drainMoves != 0 {
			h.move(w, true, func(*Seat) bool { return true })
		}
		f := &w.progress
		if since := f.hungSince.Load(); since != 0 {
			if f.lastOutput.Load() > since {
				h.markProgress(w, t)
			} else {
				h.moveAway(w, t)
			}
			continue
		}
		s, waited := f.silence()
		if !waited || !h.isTooLong(t, &s, w, workers) {
			f.suspected = 0
		} else if f.suspected++; f.suspected >= hungChecks {
			f.suspected = 0
			h.markHung(w, t, s)
		}
	}
}

// isTooLong returns whether a worker's silence is longer than its work explains, while
// another worker made progress. If the worker does not answer the router's own questions
// either, an answer of another worker to these is progress. There may be no other work.
func (h hungWatch) isTooLong(t time.Time, s *silence, w *Worker, all []*Worker) bool {
	silent := t.Sub(s.since)
	if silent < hungAfter {
		return false
	}
	limit := h.patience(s.longest)
	if silent < limit {
		return false
	}
	since := ticks(s.since.Add(limit / 2))
	return slices.ContainsFunc(all, func(o *Worker) bool {
		return o != w && (o.progress.lastOutput.Load() > since || w.Health.Reach().Away() && o.progress.lastAnswer.Load() > since)
	})
}

// markHung records that a worker is hung, and marks it down. The worker then gets one
// request at a time, until one shows progress.
func (h hungWatch) markHung(w *Worker, t time.Time, s silence) {
	w.progress.hungSince.Store(ticks(t))
	w.Health.markHung(t)
	h.Logger().Warn("worker is hung, and marked down until it makes progress", zap.String("upstream", w.Dial),
		zap.Duration("silent", t.Sub(s.since)), zap.Int("streams", s.waiting))
	h.moveAway(w, t)
}

// moveAway cancels as many attempts on a hung worker as other workers have free slots, within
// the retry budget. The ordinary retry then sends them there. An attempt that was sent after
// the worker hung shows whether it still does, so it stays for a while.
func (h hungWatch) moveAway(w *Worker, t time.Time) {
	h.move(w, false, func(a *Seat) bool {
		if ticks(a.Begun) >= w.progress.hungSince.Load() && t.Sub(a.Begun) < h.patience(a) {
			return false
		}
		load, ok := h.Scheduler.Load(t, a.Target)
		return ok && load.Predictions > 0 // else the engine may send each answer whole, and is then silent while it works
	})
}

// move cancels the attempts that move away from a worker. Those for which no slot is free, or the retry
// budget has no room, follow with the next check.
func (h hungWatch) move(w *Worker, drained bool, may func(*Seat) bool) {
	placed := make(map[*Worker]int64)
	for _, a := range w.progress.movable() {
		if !may(a) {
			continue
		}
		if cancel := h.claim(a, placed); cancel != nil {
			cancel(drained)
		}
	}
}

// claim decides whether an attempt moves to another worker, and counts it in placed. It
// returns how to cancel the attempt; nil if it stays.
func (h hungWatch) claim(a *Seat, placed map[*Worker]int64) (cancel func(drained bool)) {
	t := time.Now()
	a.Worker.progress.mu.Lock()
	defer a.Worker.progress.mu.Unlock()
	m := a.move
	if m == nil {
		return nil
	}
	to := h.freeFor(m, t, placed)
	if to == nil || !h.MayRetry(t) {
		return nil
	}
	placed[to]++
	a.move, a.moved = nil, true
	return m.Cancel
}

// freeFor returns a worker with a free slot for an attempt, beside those that are placed there
// already; nil if there is none.
func (h hungWatch) freeFor(m *Move, t time.Time, placed map[*Worker]int64) *Worker {
	for i, v := range h.Judge(&m.Want, m.Offers, t) {
		if w := m.Offers.Table.Rows[i].Worker; v.State() == Fits && w.slots.room() > placed[w] {
			return w
		}
	}
	return nil
}

// markProgress records that a hung worker makes progress again.
func (h hungWatch) markProgress(w *Worker, t time.Time) {
	since := tickTime(w.progress.hungSince.Swap(0))
	w.Health.Succeed(t, t)
	h.Logger().Info("worker makes progress again", zap.String("upstream", w.Dial), zap.Duration("hung", t.Sub(since)))
}
