package pool

import (
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"
)

const (
	// hungCheck is how often the pool looks for hung workers.
	hungCheck = time.Second
	// hungChecks is how many checks in a row must find a worker hung: a byte may be
	// on its way at the last one.
	hungChecks = 3
	// hungAfter is the least silence of a hung worker.
	hungAfter = 15 * time.Second
	// hungPrefills is how many times the predicted time the first token may take.
	hungPrefills = 4
	// hungSilent is how many times longer a worker may be silent that also computes
	// answers that are not streamed. They may keep it busy, and show nothing.
	hungSilent = 4
	// leastRate is the assumed speed of a worker that has not shown its own, in prefill
	// tokens a second.
	leastRate = 500.0
	// quietAfter is the least silence of a hung worker that has no streams to send.
	// The silence must also be quietAnswers times the longest answer of the pool, or
	// quietUnknown while there was no answer.
	quietAfter   = time.Minute
	quietAnswers = 4
	quietUnknown = 5 * time.Minute
)

// quietFor returns how long a worker may be silent that only computes answers that are
// not streamed.
func (p *Pool) quietFor(workers []*Worker) time.Duration {
	var longest time.Duration
	for _, w := range workers {
		w.Flow.mu.Lock()
		longest = max(longest, w.Flow.longest)
		w.Flow.mu.Unlock()
	}
	if longest == 0 {
		return quietUnknown
	}
	return max(quietAfter, quietAnswers*longest)
}

// Patience returns how long a target may be silent that has so many tokens to
// prefill, and computes so many answers that are not streamed.
func (p *Pool) Patience(t kvscore.Target, ahead int64, silent int) time.Duration {
	rate := leastRate
	if load, ok := p.Scheduler.Load(time.Now(), t); ok {
		if rate = load.PrefillRate; load.Timings == 0 {
			rate = min(rate, leastRate)
		}
	}
	d := max(hungAfter, time.Duration(hungPrefills*float64(ahead)/rate*float64(time.Second)))
	if silent > 0 {
		d *= hungSilent
	}
	return d
}

// findHung looks for hung workers: none of their active streams has produced output for
// longer than prefills explain, while other workers make progress. Only the upkeep calls it.
func (p *Pool) findHung(t time.Time) {
	workers := p.All()
	var first, second int64 // the last output of all workers, and of the others than that one
	for _, w := range workers {
		switch last := w.Flow.Last.Load(); {
		case last > first:
			first, second = last, first
		case last > second:
			second = last
		}
	}
	for _, w := range workers {
		f, others := &w.Flow, first
		if f.Last.Load() == first {
			others = second
		}
		if since := f.Hung.Load(); since != 0 {
			if f.Last.Load() > since {
				p.flows(w, t)
			} else {
				p.moveAway(f.movable()...)
			}
			continue
		}
		s, waited := f.silence()
		if !waited || !p.isTooLong(t, &s, workers, tickTime(others)) {
			f.suspected = 0
			continue
		}
		if f.suspected++; f.suspected >= hungChecks {
			f.suspected = 0
			p.hangs(w, t, s)
		}
	}
}

// isTooLong returns whether a worker's silence is longer than its work explains, while
// other workers made progress.
func (p *Pool) isTooLong(t time.Time, s *silence, workers []*Worker, others time.Time) bool {
	silent := t.Sub(s.since)
	if silent < hungAfter {
		return false
	}
	var limit time.Duration
	if s.quiet {
		limit = p.quietFor(workers)
	} else {
		limit = p.Patience(s.target, s.ahead, s.silent)
	}
	return silent >= limit && others.After(s.since.Add(limit/2))
}

// hangs records that a worker is hung. The worker is marked down until it makes
// progress, and gets one request at a time that shows it.
func (p *Pool) hangs(w *Worker, t time.Time, s silence) {
	w.Flow.Hung.Store(Ticks(t))
	w.Health.Fail(t, t, 0, false)
	p.Logger().Warn("worker hangs, and is marked down until something comes from it", zap.String("upstream", w.Dial),
		zap.Duration("silent", t.Sub(s.since)), zap.Int("streams", s.streams))
	p.moveAway(w.Flow.movable()...)
}

// moveAway cancels as many attempts on a hung worker as other workers have free slots
// for, within the retry budget. The ordinary retry then places them.
func (p *Pool) moveAway(attempts ...*Stream) {
	placed := make(map[*Worker]int64)
	for _, s := range attempts {
		if cancel := p.claim(s, placed); cancel != nil {
			cancel()
		}
	}
}

// MoveSoon moves an attempt away once another worker has a free slot.
func (p *Pool) MoveSoon(s *Stream) {
	p.moveAway(s)
	if s.Worker.Flow.mayMove(s) {
		time.AfterFunc(hungCheck, func() { p.MoveSoon(s) })
	}
}

// claim decides whether an attempt moves to another worker, and counts there that it
// is placed. It returns how to cancel the attempt, nil if it stays. A worker that has
// given no first token so far may just answer like that.
func (p *Pool) claim(s *Stream, placed map[*Worker]int64) (cancel func()) {
	t := time.Now()
	if load, ok := p.Scheduler.Load(t, s.Target); !ok || load.Predictions == 0 {
		return nil
	}
	s.Worker.Flow.mu.Lock()
	defer s.Worker.Flow.mu.Unlock()
	m := s.way
	if m == nil {
		return nil
	}
	others := p.eligible(nil, &m.Want, m.Offers)
	i := slices.IndexFunc(others, func(o offer) bool {
		return o.allowed(Resort{}, t) && o.worker.Slots.room() > placed[o.worker]
	})
	if i < 0 || !p.MayRetry(t) {
		return nil
	}
	placed[others[i].worker]++
	s.way, s.Moved = nil, true
	return m.Cancel
}

// flows records that a hung worker makes progress again.
func (p *Pool) flows(w *Worker, t time.Time) {
	since := tickTime(w.Flow.Hung.Swap(0))
	w.Health.Succeed(t, t)
	p.Logger().Info("worker makes progress again", zap.String("upstream", w.Dial), zap.Duration("hung", t.Sub(since)))
}
