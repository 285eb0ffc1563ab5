package pool

import (
	"iter"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
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

// checkSilence finds hung workers, and moves attempts away from them and from those that drain.
func (p *Pool) checkSilence(t time.Time) {
	loads := func(at kvscore.Target) kvscore.Load {
		load, _ := p.Scheduler.Load(t, at)
		return load
	}
	workers := p.All()
	for _, w := range workers {
		if w.MovesStreams() {
			p.move(w, true, func(*worker.Attempt) bool { return true })
		}
		p.apply(t, w, w.CheckSilence(t, workers, loads))
		if !w.IsHung() {
			continue
		}
		p.move(w, false, func(a *worker.Attempt) bool { return a.MustMove(t, loads) })
		for _, a := range w.Attempts() { // which cannot move; with an error, their clients can ask again
			if a.IsStuck(t, loads) {
				a.End()
			}
		}
	}
}

// move cancels as many attempts on a worker as other workers have free slots, within the retry budget. The
// ordinary retry then sends them there. The rest follows with the next check.
func (p *Pool) move(w *worker.Worker, drained bool, may func(*worker.Attempt) bool) {
	t, placed := time.Now(), make(map[*worker.Worker]int64)
	for _, a := range w.Attempts() {
		m := a.Movable()
		if m == nil || !may(a) {
			continue
		}
		for to := range m.To(t) {
			if to.FreeSlots() > placed[to] {
				if p.Budget.Charge(t) {
					placed[to]++
					a.Cancel(drained)
				}
				break
			}
		}
	}
}
