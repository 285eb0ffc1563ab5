package handler

import (
	"slices"
	"sync"
	"sync/atomic"
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
	// hungPrefills is how many times the predicted time it may take until the
	// first token.
	hungPrefills = 4
	// hungSilent is how many times longer a worker may be silent that has
	// answers to make which are not streamed: these are silent by nature, and
	// may take all that it can do.
	hungSilent = 4
	// leastRate is what is reckoned with of a worker that has not shown how
	// fast it is, in prefill tokens a second.
	leastRate = 500.0
	// quietAfter is how long a worker must be silent at least to be found to hang
	// that has no streams to send, quietAnswers how many times longer than the
	// longest answer of the pool, and quietUnknown how long while there was none.
	quietAfter   = time.Minute
	quietAnswers = 4
	quietUnknown = 5 * time.Minute
)

// started is what the times of a flow are counted from: it has a reading of the
// monotonic clock, so that nobody is found to hang when the clock is set.
var started = time.Now()

// ticks returns a time as the nanoseconds since then, which are never 0.
func ticks(t time.Time) int64 { return max(int64(t.Sub(started)), 1) }

// tickTime is the reverse of ticks.
func tickTime(n int64) time.Time { return started.Add(time.Duration(n)) }

// work is what is to be expected of a worker with an attempt.
type work uint8

const (
	workNone   work = iota // no inference: an engine's server may do it while the engine hangs
	workStream             // tokens come as they are computed
	workSilent             // nothing comes before the end, or it is not known
)

// work tells what is to be expected of whoever gets the request.
func (p *plan) work() work {
	switch {
	case !p.computes:
		return workNone
	case p.request != nil && p.request.Stream:
		return workStream
	}
	return workSilent
}

// flow is what comes from a worker, and who waits for it.
type flow struct {
	last atomic.Int64 // when a byte of an inference came last, in ticks
	hung atomic.Int64 // when the worker was found to hang, in ticks; 0 if it does not

	suspected int // at so many checks in a row; of the pool's upkeep alone

	mu          sync.Mutex
	streams     []*attempt    // workStream
	silent      int           // attempts of workSilent
	silentSince time.Time     // there have been some of these
	longest     time.Duration // of their answers
}

// awaited is what an attempt is to its worker's flow.
type awaited struct {
	work    work
	ahead   int64       // prefill tokens before its first one, its own included
	waiting atomic.Bool // it is the worker's turn, not the client's
	guard   *guard      // what may end it; nil if nothing may. Set before it is sent

	// guarded by the flow's lock
	pos     int  // in streams
	movable bool // no header has come, and another worker can be tried
	moved   bool // it was canceled for that
}

// hangs returns whether the worker was found hung.
func (f *flow) hangs() bool { return f.hung.Load() != 0 }

// begin records that an attempt begins.
func (f *flow) begin(a *attempt) {
	if a.work == workNone {
		return
	}
	a.waiting.Store(true)
	f.mu.Lock()
	defer f.mu.Unlock()
	if a.work == workSilent {
		if f.silent == 0 {
			f.silentSince = a.begun
		}
		f.silent++
		return
	}
	a.pos = len(f.streams)
	f.streams = append(f.streams, a)
}

// end records that an attempt has ended.
func (f *flow) end(a *attempt) {
	if a.work == workNone {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if a.work == workSilent {
		f.silent--
		if f.last.Load() >= ticks(a.begun) {
			f.longest = max(f.longest, now().Sub(a.begun))
		}
		return
	}
	last := len(f.streams) - 1
	f.streams[a.pos] = f.streams[last]
	f.streams[a.pos].pos = a.pos
	f.streams[last] = nil
	f.streams = f.streams[:last]
}

// guard records what may end an attempt that is about to be sent.
func (f *flow) guard(a *attempt, g *guard, movable bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	a.guard, a.movable = g, movable
}

// arrived records that an attempt has its header, or failed before it. It returns
// whether the attempt was canceled to be made on another worker.
func (f *flow) arrived(a *attempt) (moved bool) {
	a.waiting.Store(false)
	f.mu.Lock()
	defer f.mu.Unlock()
	a.movable = false
	return a.moved
}

// silence is what a worker was found to be silent on.
type silence struct {
	since   time.Time
	target  kvscore.Target // of the attempt with the most prefill ahead
	ahead   int64          // tokens of that
	streams int            // that wait
	silent  int            // attempts that would not be heard of either way
	quiet   bool           // there are no others
}

// silence returns for how long nothing has come, though streamed answers are
// waited for, or only answers that are not streamed; false if none are.
func (f *flow) silence() (s silence, waited bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, a := range f.streams {
		if a.waiting.Load() {
			if s.streams == 0 || a.begun.Before(s.since) {
				s.since = a.begun
			}
			s.streams++
		}
	}
	s.silent, s.quiet = f.silent, len(f.streams) == 0
	if s.quiet {
		s.since = f.silentSince
	}
	if last := tickTime(f.last.Load()); s.since.Before(last) {
		s.since = last
	}
	for _, a := range f.streams {
		// what came later does not excuse that nothing comes
		if a.ahead >= s.ahead && a.begun.Before(s.since.Add(hungCheck)) {
			s.ahead, s.target = a.ahead, a.lease.Target()
		}
	}
	return s, s.streams > 0 || s.quiet && s.silent > 0
}

// quietFor returns how long a worker may be silent that has only answers to make
// that are not streamed.
func (p *pool) quietFor(workers []*worker) time.Duration {
	var longest time.Duration
	for _, w := range workers {
		w.flow.mu.Lock()
		longest = max(longest, w.flow.longest)
		w.flow.mu.Unlock()
	}
	if longest == 0 {
		return quietUnknown
	}
	return max(quietAfter, quietAnswers*longest)
}

// patience returns how long a target may be silent that has so many tokens to
// prefill, and so many requests that are silent by nature.
func (p *pool) patience(t kvscore.Target, ahead int64, silent int) time.Duration {
	rate := leastRate
	if load, ok := p.scheduler.Load(now(), t); ok {
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
func (p *pool) findHung(t time.Time) {
	workers := p.all()
	var first, second int64 // the latest that something came of any worker, and of another one
	for _, w := range workers {
		switch last := w.flow.last.Load(); {
		case last > first:
			first, second = last, first
		case last > second:
			second = last
		}
	}
	for _, w := range workers {
		f, others := &w.flow, first
		if f.last.Load() == first {
			others = second
		}
		if since := f.hung.Load(); since != 0 {
			if f.last.Load() > since {
				p.flows(w, t)
			} else {
				p.moveAway(w.flow.movable()...)
			}
			continue
		}
		s, waited := f.silence()
		if waited && t.Sub(s.since) >= hungAfter {
			var limit time.Duration
			if s.quiet {
				limit = p.quietFor(workers)
			} else {
				limit = p.patience(s.target, s.ahead, s.silent)
			}
			waited = t.Sub(s.since) >= limit && tickTime(others).After(s.since.Add(limit/2))
		} else {
			waited = false
		}
		if !waited {
			f.suspected = 0
			continue
		}
		if f.suspected++; f.suspected >= hungChecks {
			f.suspected = 0
			p.hangs(w, t, s)
		}
	}
}

// hangs records that a worker is hung. The worker is marked down until something
// comes, and gets one request at a time that shows it.
func (p *pool) hangs(w *worker, t time.Time, s silence) {
	w.flow.hung.Store(ticks(t))
	w.health.fail(t, t, 0, false)
	p.logger().Warn("worker hangs, and is rated down until something comes from it", zap.String("upstream", w.dial),
		zap.Duration("silent", t.Sub(s.since)), zap.Int("streams", s.streams))
	p.moveAway(w.flow.movable()...)
}

// mayMove returns whether an attempt could be made on another worker.
func (f *flow) mayMove(a *attempt) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return a.movable
}

// movable returns the streams whose header has not come and which another worker
// could serve, oldest first. Requests that were sent to see whether the worker is
// still hung are not among them, and neither are answers that are not streamed: a
// worker that computes one looks the same from here.
func (f *flow) movable() []*attempt {
	f.mu.Lock()
	defer f.mu.Unlock()
	var list []*attempt
	for _, a := range f.streams {
		if a.movable && ticks(a.begun) < f.hung.Load() {
			list = append(list, a)
		}
	}
	slices.SortFunc(list, func(a, b *attempt) int { return a.begun.Compare(b.begun) })
	return list
}

// moveAway cancels as many attempts on a hung worker as other workers have free slots
// for, within the retry budget. The ordinary retry then places them.
func (p *pool) moveAway(attempts ...*attempt) {
	placed := make(map[*worker]int64)
	for _, a := range attempts {
		if p.claim(a, placed) {
			a.guard.cancel(errHangs)
		}
	}
}

// claim decides whether an attempt is made on another worker, and counts there that
// it is placed. If its worker has given no first token so far, what looks like a hang
// may be how that worker answers.
func (p *pool) claim(a *attempt, placed map[*worker]int64) bool {
	if load, ok := p.scheduler.Load(now(), a.lease.Target()); !ok || load.Predictions == 0 {
		return false
	}
	f := &a.worker.flow
	f.mu.Lock()
	defer f.mu.Unlock()
	if !a.movable {
		return false
	}
	t := now()
	others := p.eligible(nil, &a.guard.want, a.guard.offers)
	i := slices.IndexFunc(others, func(o offer) bool {
		return o.allowed(resort{}, t) && o.worker.slots.room() > placed[o.worker]
	})
	if i < 0 || !p.mayRetry(t) {
		return false
	}
	placed[others[i].worker]++
	a.movable, a.moved = false, true
	return true
}

// flows records that a hung worker makes progress again.
func (p *pool) flows(w *worker, t time.Time) {
	since := tickTime(w.flow.hung.Swap(0))
	w.health.succeed(t, t)
	p.logger().Info("worker makes progress again", zap.String("upstream", w.dial), zap.Duration("hung", t.Sub(since)))
}
