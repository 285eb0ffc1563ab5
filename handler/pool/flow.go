package pool

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
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

	// guarded by the flow's lock
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

// flow is what comes from a worker, and which attempts wait for it.
type flow struct {
	Last atomic.Int64 // when a byte of an inference came last, in ticks
	Hung atomic.Int64 // when the worker was found to hang, in ticks; 0 if it does not

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

// Hangs returns whether the worker was found hung.
func (f *flow) Hangs() bool { return f.Hung.Load() != 0 }

// Begin records that an attempt begins.
func (f *flow) Begin(s *Stream) {
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
func (f *flow) End(s *Stream) {
	if s.Work == WorkNone {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if s.Work == WorkSilent {
		f.silent--
		if f.Last.Load() >= Ticks(s.Begun) {
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
func (f *flow) Allow(s *Stream, m *Move) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s.way = m
}

// Arrived records that an attempt has its header, or failed before it. It returns
// whether the attempt was canceled to move to another worker.
func (f *flow) Arrived(s *Stream) (moved bool) {
	s.Waiting.Store(false)
	f.mu.Lock()
	defer f.mu.Unlock()
	s.way = nil
	return s.Moved
}

// mayMove returns whether an attempt can move to another worker.
func (f *flow) mayMove(s *Stream) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return s.way != nil
}

// movable returns the streams that can move to another worker, oldest first. It leaves
// out requests that were sent to see whether the worker is still hung, and answers that
// are not streamed: a worker that computes one looks the same from here.
func (f *flow) movable() []*Stream {
	f.mu.Lock()
	defer f.mu.Unlock()
	var list []*Stream
	for _, s := range f.streams {
		if s.way != nil && Ticks(s.Begun) < f.Hung.Load() {
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
func (f *flow) silence() (s silence, waited bool) {
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
	if last := tickTime(f.Last.Load()); s.since.Before(last) {
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
