package kvscore

import (
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// Lease is one attempt's booking on one target: prefill tokens until the first token, KV
// blocks and the request itself until the end.
//
// Only the goroutine that reads the answer calls FirstToken, Answered, Prefilled, Output
// and Counted. Any goroutine may call Alive and End. Only the first call of End counts.
//
// It is one struct, so that a booking is one allocation.
type Lease struct {
	scheduler *Scheduler
	load      *load
	booked    time.Time
	seen      atomic.Int64 // last sign of life, in nanoseconds since booked

	ticket    cache.Ticket
	journaled uint64 // its number there
	estimate  int64  // tokens of the prompt, from its text alone
	counts    Counts
	tokens    int64 // of the prompt
	blockSize int64
	total     int64 // blocks of prompt and output so far, rounded up
	streamed  bool
	remote    bool   // of another router
	phase     Phase  // as asked for
	split     bool   // it is a decode phase
	lacks     int64  // tokens of the prompt
	ahead     Target // of the prefill phase, as forecast
	expected  int64  // tokens of the answer; 0 is unknown

	// guarded by the scheduler's lock
	prefill   int64 // still booked
	unshared  float64
	untracked float64 // blocks
	others    int     // requests on the target before it
	output    int64   // blocks
	faded     float64 // of output, blocks that do not count because the answer nears its end
	due       time.Time
	ended     bool

	work       work
	prefilled  time.Time     // when the prefill phase had answered
	isAwaiting bool          // is in the load's awaiting
	decodes    bool          // counts in the load's decoding
	passed     bool          // a prefill that was booked later is over
	began      time.Time     // start of a prefill that endDue has ended; zero is unknown
	shown      showing       // by the answer
	cached     int64         // prompt tokens that the cache model held
	knowledge  Knowledge     // where cached comes from
	inFlight   bool          // another active request uses some of them
	queued     bool          // other prefills were booked before
	crowded    bool          // it may wait for memory
	predicted  float64       // milliseconds to the first token
	added      float64       // of predicted, for its own prefill
	usual      float64       // what that is on the target's peers; 0 is unknown
	culprit    uint64        // identifies its session or prompt
	first      time.Duration // from booked to the first sign of the answer
	lost       int64         // tokens that it has shown to be lost
	own        timing
	context    float64      // of the target at the first token
	timing     *timing      // own, or that of an earlier lease
	answered   atomic.Int64 // tokens of the answer
}

// Target returns the target that the lease is on.
func (l *Lease) Target() Target { return l.load.target }

// Alive records a sign of life of the request. It takes no lock.
func (l *Lease) Alive(now time.Time) { l.seen.Store(int64(now.Sub(l.booked))) }

// Hold keeps the lease from expiring before End. The caller sees the end of the request.
func (l *Lease) Hold() { l.seen.Store(held) }

const held = math.MaxInt64 / 2

// last returns the time of the last sign of life, the zero time for a lease on Hold.
func (l *Lease) last() time.Time {
	if seen := l.seen.Load(); seen != held {
		return l.booked.Add(time.Duration(seen))
	}
	return time.Time{}
}

// quiet returns the time since the last sign of life. It uses the monotonic clock, so a
// step of the wall clock ends no lease.
func (l *Lease) quiet(now time.Time) time.Duration {
	return now.Sub(l.booked) - time.Duration(l.seen.Load())
}

// FirstToken records the first token of a stream, or an answer of unknown length that was
// not streamed. The prefill is over. The scheduler learns from the time of a stream.
func (l *Lease) FirstToken(now time.Time) {
	l.prefillOver(now, showsToken, SignFirstToken, 0, l.streamed)
}

// Answered records an answer that was not streamed, with its length in tokens; -1 is
// unknown. The scheduler learns a prefill time from a short answer.
func (l *Lease) Answered(now time.Time, tokens int64) {
	l.prefillOver(now, showsToken, SignAnswered, tokens, tokens >= 0 && tokens <= shortAnswer)
}

// Prefilled records that the prefill is over, and that nothing shows how long it took.
func (l *Lease) Prefilled(now time.Time) { l.prefillOver(now, showsEnd, SignPrefilled, -1, false) }

// Failed records an answer without a token: an error, or nothing. The target has not computed the
// prompt, or in vain, and is free at once.
func (l *Lease) Failed(now time.Time) { l.prefillOver(now, showsFailure, SignPrefilled, -1, false) }

// Mistaken is Failed for an error that is the client's mistake. It is no sign of a bad worker.
func (l *Lease) Mistaken(now time.Time) { l.prefillOver(now, showsMistake, SignPrefilled, -1, false) }

// prefillOver records the first sign that the prefill is over, and the answer's tokens if it was not
// streamed. learn says that the sign shows how long the prefill took.
func (l *Lease) prefillOver(now time.Time, shown showing, how Sign, answered int64, learn bool) {
	defer l.scheduler.onRoom(l.load.target) // after the unlock
	l.Alive(now)
	s := l.scheduler
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.ended || l.shown != showsNothing {
		return
	}
	if l.journaled != 0 {
		s.journal.Answered(l.journaled, now, how, answered)
	}
	l.shown, l.first = shown, now.Sub(l.booked)
	if shown != showsToken {
		l.computed(now, false) // an error does not wait for the prefills before it
		if unspent := l.added - milliseconds(l.first); unspent > 0 {
			l.load.recent.add(now, -unspent*decay(l.first))
		}
		return
	}
	s.prefilled += int64(l.work.tokens * 1e3)
	l.answered.Store(max(l.answered.Load(), answered))
	if took := milliseconds(l.first); l.usual > max(shortest, fastest*took) {
		l.shown = showsTooSoon
		l.load.answers.paced(featuresOf(1, l.work, 0), took)
	}
	switch {
	case learn && l.split:
		s.observeTransfer(l, now)
	case learn && l.shown == showsToken:
		s.observe(l, now)
	}
	l.ticket.Computed(now)
	l.computed(now, true)
}

// Output records the length of the answer so far, in tokens.
func (l *Lease) Output(now time.Time, tokens int64) {
	l.Alive(now)
	l.answered.Store(tokens)
	total := blocksOf(l.tokens+tokens, l.blockSize)
	more := total - l.total
	if more <= 0 {
		return
	}
	l.total = total
	l.scheduler.mu.Lock()
	defer l.scheduler.mu.Unlock()
	if l.ended {
		return
	}
	l.output += more
	l.load.output += more
	if l.expected > 0 {
		// Dynamo's output decay (lib/kv-router/src/sequences): all blocks of the answer
		// count by the share of the expected answer that is still to come.
		faded := float64(l.output) * min(1, float64(tokens)/float64(l.expected))
		l.load.faded += faded - l.faded
		l.faded = faded
	}
}

// Named says by which session id the engine's KV events will name the request. It returns whether the
// cache models have a use for that.
func (l *Lease) Named(session string) bool {
	l.scheduler.mu.Lock()
	defer l.scheduler.mu.Unlock()
	return !l.ended && l.ticket.Named(session)
}

// Counts are an engine's token counts of a prompt and its answer; 0 is unknown.
type Counts = cache.Counts

// Counted records the engine's counts. The caller calls it before End. A decode phase's cached
// tokens say nothing of its target: engines repeat those of the prefill phase.
func (l *Lease) Counted(c Counts) {
	l.scheduler.mu.Lock()
	defer l.scheduler.mu.Unlock()
	if l.counts = c; l.split {
		l.counts.Cached, l.counts.CachedReported = 0, false
	}
}

// End ends the lease. It returns whether this call was the first to do so. computed says
// that the target has computed the prompt, and so holds its blocks now. answer is the full blocks of prompt
// and answer; nil is unknown.
func (l *Lease) End(computed bool, answer []uint64) bool {
	s := l.scheduler
	s.mu.Lock()
	first, lost := s.end(l, computed, answer), l.lost
	l.lost = 0
	s.mu.Unlock()
	if lost > 0 && s.onLost != nil {
		s.onLost(l.Target(), lost)
	}
	if first {
		s.onRoom(l.load.target)
	}
	return first
}

// end removes the lease from the load of its target. The lock is held.
func (s *Scheduler) end(l *Lease, computed bool, answer []uint64) bool {
	if l.ended {
		return false
	}
	l.ended = true
	l.computed(time.Time{}, false)
	ld := l.load
	s.learn(l, computed)
	ld.requests--
	if l.decodes {
		ld.decoding -= l.tokens
	}
	if l.remote {
		ld.remote--
	}
	ld.output -= l.output
	ld.faded -= l.faded
	ld.unshared -= l.unshared
	ld.untracked -= l.untracked
	if ld.requests == 0 {
		ld.unshared, ld.untracked, ld.faded = 0, 0, 0 // rounding errors
	}
	if l.shown > showsEnd && !l.remote {
		ld.answers.add(l)
	}
	kept := l.ticket.End(l.last(), computed, answer, l.counts)
	if l.journaled != 0 {
		n, tokens := l.counts, l.answered.Load()
		if !kept || cache.Believable(n.Prompt, l.estimate) == 0 {
			n = Counts{}
		} else if n.Answer >= n.Prompt {
			tokens = n.Answer - n.Prompt + 1
		}
		s.journal.Ended(l.journaled, kept, tokens, n, l.ticket.Behind(answer))
	}
	delete(s.leases, l)
	if ld.retired {
		s.forget(ld.target)
	}
	return true
}

// computed removes the prefill from the load. The time of its end was seen or guessed;
// zero is unknown. The lock is held.
func (l *Lease) computed(at time.Time, seen bool) {
	if !l.due.IsZero() {
		i := slices.Index(l.load.due, l)
		l.load.due = slices.Delete(l.load.due, i, i+1)
		l.due = time.Time{}
	}
	if l.isAwaiting {
		l.isAwaiting = false
		l.load.awaiting.remove(l, at, seen)
	}
	l.load.prefill -= l.prefill
	if l.remote {
		l.load.remotePrefill -= l.prefill
	}
	l.prefill = 0
	l.decode()
}

// decode counts the lease among those whose answers are generated. The lock is held.
func (l *Lease) decode() {
	if !l.decodes && !l.ended {
		l.decodes = true
		l.load.decoding += l.tokens
	}
}

func blocksOf(tokens, size int64) int64 { return (tokens + size - 1) / size }
