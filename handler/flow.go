package handler

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// work is a kind of attempt, by what the worker is expected to send.
type work uint8

const (
	workNone   work = iota // no inference: an engine's server may answer while its core hangs
	workStream             // tokens come as they are computed
	workSilent             // nothing comes before the end, or it is not known
)

// stream is what the pool knows of an attempt, so that it can find hung workers. The
// attempt embeds it.
type stream struct {
	worker  *worker
	target  kvscore.Target // the worker's rank
	begun   time.Time
	work    work
	ahead   int64       // prefill tokens before the first token, the attempt's own included
	waiting atomic.Bool // for the worker, and not for the client

	// guarded by the flow's lock
	pos   int   // in streams
	way   *move // nil if no other worker can be tried, or the header has come
	moved bool  // it was canceled for that
}

// move is how an attempt moves to another worker. The attempt is canceled, and the
// ordinary retry finds the other worker.
type move struct {
	cancel func()
	want   Wants // of the other worker
	offers offers
}

// flow is what comes from a worker, and which attempts wait for it.
type flow struct {
	last atomic.Int64 // when a byte of an inference came last, in ticks
	hung atomic.Int64 // when the worker was found to hang, in ticks; 0 if it does not

	suspected int // at so many checks in a row; of the pool's upkeep alone

	mu          sync.Mutex
	streams     []*stream     // workStream
	silent      int           // attempts of workSilent
	silentSince time.Time     // there have been some of these
	longest     time.Duration // of their answers
}

// started is the zero of ticks. It has a reading of the monotonic clock: setting the
// clock makes no worker hung.
var started = time.Now()

// ticks returns a time as nanoseconds since started, at least 1.
func ticks(t time.Time) int64 { return max(int64(t.Sub(started)), 1) }

// tickTime is the reverse of ticks.
func tickTime(n int64) time.Time { return started.Add(time.Duration(n)) }

// hangs returns whether the worker was found hung.
func (f *flow) hangs() bool { return f.hung.Load() != 0 }

// begin records that an attempt begins.
func (f *flow) begin(s *stream) {
	if s.work == workNone {
		return
	}
	s.waiting.Store(true)
	f.mu.Lock()
	defer f.mu.Unlock()
	if s.work == workSilent {
		if f.silent == 0 {
			f.silentSince = s.begun
		}
		f.silent++
		return
	}
	s.pos = len(f.streams)
	f.streams = append(f.streams, s)
}

// end records that an attempt has ended.
func (f *flow) end(s *stream) {
	if s.work == workNone {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if s.work == workSilent {
		f.silent--
		if f.last.Load() >= ticks(s.begun) {
			f.longest = max(f.longest, time.Since(s.begun))
		}
		return
	}
	last := len(f.streams) - 1
	f.streams[s.pos] = f.streams[last]
	f.streams[s.pos].pos = s.pos
	f.streams[last] = nil
	f.streams = f.streams[:last]
}

// allow lets an attempt that is about to be sent move to another worker.
func (f *flow) allow(s *stream, m *move) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s.way = m
}

// arrived records that an attempt has its header, or failed before it. It returns
// whether the attempt was canceled to move to another worker.
func (f *flow) arrived(s *stream) (moved bool) {
	s.waiting.Store(false)
	f.mu.Lock()
	defer f.mu.Unlock()
	s.way = nil
	return s.moved
}

// mayMove returns whether an attempt can move to another worker.
func (f *flow) mayMove(s *stream) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return s.way != nil
}

// movable returns the streams that can move to another worker, oldest first. It leaves
// out requests that were sent to see whether the worker is still hung, and answers that
// are not streamed: a worker that computes one looks the same from here.
func (f *flow) movable() []*stream {
	f.mu.Lock()
	defer f.mu.Unlock()
	var list []*stream
	for _, s := range f.streams {
		if s.way != nil && ticks(s.begun) < f.hung.Load() {
			list = append(list, s)
		}
	}
	slices.SortFunc(list, func(a, b *stream) int { return a.begun.Compare(b.begun) })
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
		// attempts that begin later do not excuse the silence before
		if a.ahead >= s.ahead && a.begun.Before(s.since.Add(hungCheck)) {
			s.ahead, s.target = a.ahead, a.target
		}
	}
	return s, s.streams > 0 || s.quiet && s.silent > 0
}
