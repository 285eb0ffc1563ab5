package pool

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"
)

// Work is a kind of attempt, by what the worker is expected to send.
type Work uint8

const (
	WorkNone   Work = iota // no inference: an engine's server may answer while its core hangs
	WorkStream             // tokens come as they are computed
	WorkSilent             // nothing comes before the end, or it is not known
)

// Stream is what the pool knows of an attempt, so that it can find hung workers. The
// attempt embeds it.
type Stream struct {
	Worker  *Worker
	Target  kvscore.Target // the worker's rank
	Begun   time.Time
	Work    Work
	Ahead   int64       // prefill tokens before the first token, the attempt's own included
	Waiting atomic.Bool // for the worker, and not for the client

	// guarded by the lock of progress
	pos   int   // in streams
	way   *Move // nil if no other worker can be tried, or the header has come
	Moved bool  // it was canceled for that
}

// Move is how an attempt moves to another worker. The attempt is canceled, and the
// ordinary retry finds the other worker.
type Move struct {
	Cancel func()
	Want   Wants // of the other worker
	Offers Offers
}

// progress is what comes from a worker, and which attempts wait for it.
type progress struct {
	LastOutput atomic.Int64 // when a byte of an inference came last, in ticks
	HungSince  atomic.Int64 // when the worker was found to hang, in ticks; 0 if it does not

	suspected int // at so many checks in a row; of the pool's upkeep alone

	mu          sync.Mutex
	streams     []*Stream     // workStream
	silent      int           // attempts of workSilent
	silentSince time.Time     // there have been some of these
	longest     time.Duration // of their answers
}

// started is the zero of ticks. It has a reading of the monotonic clock: setting the
// clock makes no worker hung.
var started = time.Now()

// Ticks returns a time as nanoseconds since started, at least 1.
func Ticks(t time.Time) int64 { return max(int64(t.Sub(started)), 1) }

// tickTime is the reverse of ticks.
func tickTime(n int64) time.Time { return started.Add(time.Duration(n)) }

// IsHung returns whether the worker was found hung.
func (f *progress) IsHung() bool { return f.HungSince.Load() != 0 }

// Begin records that an attempt begins.
func (f *progress) Begin(s *Stream) {
	if s.Work == WorkNone {
		return
	}
	s.Waiting.Store(true)
	f.mu.Lock()
	defer f.mu.Unlock()
	if s.Work == WorkSilent {
		if f.silent == 0 {
			f.silentSince = s.Begun
		}
		f.silent++
		return
	}
	s.pos = len(f.streams)
	f.streams = append(f.streams, s)
}

// End records that an attempt has ended.
func (f *progress) End(s *Stream) {
	if s.Work == WorkNone {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if s.Work == WorkSilent {
		f.silent--
		if f.LastOutput.Load() >= Ticks(s.Begun) {
			f.longest = max(f.longest, time.Since(s.Begun))
		}
		return
	}
	last := len(f.streams) - 1
	f.streams[s.pos] = f.streams[last]
	f.streams[s.pos].pos = s.pos
	f.streams[last] = nil
	f.streams = f.streams[:last]
}

// Allow lets an attempt that is about to be sent move to another worker.
func (f *progress) Allow(s *Stream, m *Move) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s.way = m
}

// Arrived records that an attempt has its header, or failed before it. It returns
// whether the attempt was canceled to move to another worker.
func (f *progress) Arrived(s *Stream) (moved bool) {
	s.Waiting.Store(false)
	f.mu.Lock()
	defer f.mu.Unlock()
	s.way = nil
	return s.Moved
}

// movable returns the streams that can move to another worker, oldest first. It leaves
// out those that were sent after the worker hung, to see whether it still does.
func (f *progress) movable() []*Stream {
	f.mu.Lock()
	defer f.mu.Unlock()
	var list []*Stream
	for _, s := range f.streams {
		if s.way != nil && Ticks(s.Begun) < f.HungSince.Load() {
			list = append(list, s)
		}
	}
	slices.SortFunc(list, func(a, b *Stream) int { return a.Begun.Compare(b.Begun) })
	return list
}

// silence is how long a worker has been silent, and what waits for it.
type silence struct {
	since   time.Time
	target  kvscore.Target // of the attempt with the most prefill ahead
	ahead   int64          // tokens of that
	streams int            // that wait
	silent  int            // attempts whose answers are not streamed
	quiet   bool           // there are no others
}

// silence returns the worker's silence. waited is false if no attempt waits for it.
func (f *progress) silence() (s silence, waited bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, a := range f.streams {
		if a.Waiting.Load() {
			if s.streams == 0 || a.Begun.Before(s.since) {
				s.since = a.Begun
			}
			s.streams++
		}
	}
	s.silent, s.quiet = f.silent, len(f.streams) == 0
	if s.quiet {
		s.since = f.silentSince
	}
	if last := tickTime(f.LastOutput.Load()); s.since.Before(last) {
		s.since = last
	}
	for _, a := range f.streams {
		// attempts that begin later do not excuse the silence before
		if a.Ahead >= s.ahead && a.Begun.Before(s.since.Add(hungCheck)) {
			s.ahead, s.target = a.Ahead, a.Target
		}
	}
	return s, s.streams > 0 || s.quiet && s.silent > 0
}

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
		w.Progress.mu.Lock()
		longest = max(longest, w.Progress.longest)
		w.Progress.mu.Unlock()
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
		switch last := w.Progress.LastOutput.Load(); {
		case last > first:
			first, second = last, first
		case last > second:
			second = last
		}
	}
	for _, w := range workers {
		f, others := &w.Progress, first
		if f.LastOutput.Load() == first {
			others = second
		}
		if since := f.HungSince.Load(); since != 0 {
			if f.LastOutput.Load() > since {
				p.markProgress(w, t)
			} else {
				p.moveAway(f.movable()...)
			}
			continue
		}
		s, waited := f.silence()
		if !waited || !p.isTooLong(t, &s, workers, tickTime(others)) {
			f.suspected = 0
		} else if f.suspected++; f.suspected >= hungChecks {
			f.suspected = 0
			p.markHung(w, t, s)
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
	limit := p.Patience(s.target, s.ahead, s.silent)
	if s.quiet {
		limit = p.quietFor(workers)
	}
	return silent >= limit && others.After(s.since.Add(limit/2))
}

// markHung records that a worker is hung. The worker is marked down until it makes
// progress, and gets one request at a time that shows it.
func (p *Pool) markHung(w *Worker, t time.Time, s silence) {
	w.Progress.HungSince.Store(Ticks(t))
	w.Health.Fail(t, t, 0, false)
	p.Logger().Warn("worker hangs, and is marked down until something comes from it", zap.String("upstream", w.Dial),
		zap.Duration("silent", t.Sub(s.since)), zap.Int("streams", s.streams))
	p.moveAway(w.Progress.movable()...)
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
	f := &s.Worker.Progress
	f.mu.Lock()
	defer f.mu.Unlock()
	if s.way != nil {
		time.AfterFunc(hungCheck, func() { p.MoveSoon(s) })
	}
}

// claim decides whether an attempt moves to another worker, and counts it there. It
// returns how to cancel the attempt, nil if it stays. It stays on a target without a first
// token so far: that may just answer so.
func (p *Pool) claim(s *Stream, placed map[*Worker]int64) (cancel func()) {
	t := time.Now()
	if load, ok := p.Scheduler.Load(t, s.Target); !ok || load.Predictions == 0 {
		return nil
	}
	s.Worker.Progress.mu.Lock()
	defer s.Worker.Progress.mu.Unlock()
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

// markProgress records that a hung worker makes progress again.
func (p *Pool) markProgress(w *Worker, t time.Time) {
	since := tickTime(w.Progress.HungSince.Swap(0))
	w.Health.Succeed(t, t)
	p.Logger().Info("worker makes progress again", zap.String("upstream", w.Dial), zap.Duration("hung", t.Sub(since)))
}
