package pool

import (
	"iter"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"go.uber.org/zap"
)

// MayMove lets the pool move the attempt to another worker that meets want. The pool then calls cancel. The
// ordinary retry, or the stream that goes on, selects the other worker.
func (s *Seat) MayMove(want Wants, o Offers, cancel func(drained bool)) {
	s.Attempt.MayMove(&worker.Move{Cancel: cancel, To: func(t time.Time) iter.Seq[*worker.Worker] {
		return func(yield func(*worker.Worker) bool) {
			for i, v := range s.pool.Judge(&want, o, t) {
				if v.State() == Fits && !yield(o.Table.Rows[i].Worker) {
					return
				}
			}
		}
	}})
}

const (
	// hungChecks is how many checks in a row must find a worker hung. A byte may arrive
	// just after one of them.
	hungChecks = 3
	// hungAfter is the least silence of a hung worker, endedAfter that of one at whose address nothing
	// listens: its process shuts down.
	hungAfter, endedAfter = 15 * time.Second, 5 * time.Second
	// quietTimes lengthens the limit for streams that stall while the worker answers the router's own
	// questions and no other worker has output. It also lengthens it for streams that cannot move.
	quietTimes = 4
	// hungPrefills is how many times the predicted time a first token may take.
	hungPrefills = 4
	// leastRate is the assumed prefill rate of a worker without timings, in tokens a second.
	leastRate = 500.0
)

// hungWatch finds hung workers, and moves attempts away from them. Only the upkeep uses it.
type hungWatch struct {
	*Pool
	suspected map[*worker.Worker]int // checks in a row that found a worker hung
}

// patience returns how long an attempt's target may be silent.
func (h *hungWatch) patience(a *worker.Attempt) time.Duration {
	rate := leastRate
	if load, ok := h.Scheduler.Load(time.Now(), a.Worker.Target(int(a.Rank))); ok {
		if rate = load.PrefillRate; !load.RateLearned {
			rate = min(rate, leastRate)
		}
	}
	least := hungAfter
	if a.Worker.Health.Reach() == worker.Refusing {
		least = endedAfter
	}
	return max(least, time.Duration(hungPrefills*float64(a.Ahead)/rate*float64(time.Second)))
}

// check finds hung workers: none of their active streams has produced output for longer
// than prefills explain, while other workers make progress.
func (h *hungWatch) check(t time.Time) {
	workers, before := h.All(), h.suspected
	h.suspected = make(map[*worker.Worker]int)
	for _, w := range workers {
		if w.MovesStreams() {
			h.move(w, true, func(*worker.Attempt) bool { return true })
		}
		if w.IsHung() {
			if w.OutputSince(w.HungSince()) {
				since := w.EndHung()
				w.Health.Succeed(t, t)
				h.Logger().Info("worker makes progress again", zap.String("upstream", w.Dial), zap.Duration("hung", t.Sub(since)))
				continue
			}
			h.moveAway(w, t)
			for _, a := range w.Attempts() { // which cannot move; with an error, their clients can ask again
				if h.isStuck(w, a, t) {
					a.End()
				}
			}
			continue
		}
		s, waited := w.Silence()
		switch {
		case !waited || !h.isTooLong(t, &s, w, workers):
		case before[w]+1 >= hungChecks:
			h.markHung(w, t, s)
		default:
			h.suspected[w] = before[w] + 1
		}
	}
}

// isTooLong returns whether a worker's silence is longer than its work explains, while
// another worker made progress. If there is no other work, that is another worker's answer to a
// question of the router's own. This worker must then answer none itself, or its streams must
// stall for much longer: a server may answer while its engine's core hangs.
func (h *hungWatch) isTooLong(t time.Time, s *worker.Silence, w *worker.Worker, all []*worker.Worker) bool {
	silent := t.Sub(s.Since)
	if silent < endedAfter {
		return false
	}
	limit := h.patience(s.Longest)
	if silent < limit {
		return false
	}
	since := s.Since.Add(limit / 2)
	quiet := w.Health.Reach().Away() || s.Stalled && silent >= quietTimes*limit
	return slices.ContainsFunc(all, func(o *worker.Worker) bool {
		return o != w && (o.OutputSince(since) || quiet && o.AnsweredSince(since))
	})
}

// markHung records that a worker is hung, and marks it down. The worker then gets one
// request at a time, until one shows progress.
func (h *hungWatch) markHung(w *worker.Worker, t time.Time, s worker.Silence) {
	w.MarkHung(t)
	h.Logger().Warn("worker is hung, and marked down until it makes progress", zap.String("upstream", w.Dial),
		zap.Duration("silent", t.Sub(s.Since)), zap.Int("streams", s.Waiting))
	h.moveAway(w, t)
}

// moveAway cancels as many attempts on a hung worker as other workers have free slots, within
// the retry budget. The ordinary retry then sends them there. An attempt that was sent after
// the worker hung shows whether it still does, so it stays for a while.
func (h *hungWatch) moveAway(w *worker.Worker, t time.Time) {
	h.move(w, false, func(a *worker.Attempt) bool {
		if !a.Begun.Before(w.HungSince()) && t.Sub(a.Begun) < h.patience(a) {
			return false
		}
		// Without a first token so far, the engine may send each answer whole, and is then silent while it works.
		load, ok := h.Scheduler.Load(t, w.Target(int(a.Rank)))
		return ok && load.Predictions > 0 || h.isStuck(w, a, t)
	})
}

// isStuck returns whether an attempt has waited for a hung worker for much longer than its limit. One
// without a token is not stuck while the worker answers the router's own questions, because the engine may
// be loading the model.
func (h *hungWatch) isStuck(w *worker.Worker, a *worker.Attempt, t time.Time) bool {
	limit := quietTimes * h.patience(a)
	return t.Sub(w.HungSince()) >= limit && t.Sub(a.Begun) >= limit && (w.Health.Reach().Away() || w.OutputSince(a.Begun))
}

// move cancels the attempts that move away from a worker. Those for which no slot is free, or the retry
// budget has no room, follow with the next check.
func (h *hungWatch) move(w *worker.Worker, drained bool, may func(*worker.Attempt) bool) {
	t, placed := time.Now(), make(map[*worker.Worker]int64)
	for _, a := range w.Attempts() {
		m := a.Movable()
		if m == nil || !may(a) {
			continue
		}
		for to := range m.To(t) {
			if to.FreeSlots() > placed[to] {
				if h.Budget.MayRetry(t) {
					placed[to]++
					a.Cancel(drained)
				}
				break
			}
		}
	}
}
