package events

import (
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/events/zmtp"
	"github.com/zeebo/xxh3"
)

// State is how well a stream knows its publisher.
type State uint8

// The states of a stream.
const (
	// Unknown: the stream has not reached the publisher yet.
	Unknown State = iota
	// Replaying: the publisher replays what it has buffered.
	Replaying
	// Live: the sink gets each batch as it is published.
	Live
	// Gap: batches are missing, or the connection is lost. The sink's knowledge is old.
	Gap
	// Untrusted: batches are lost for good. The sink holds a lower bound at best.
	Untrusted
)

var stateNames = [...]string{"unknown", "replaying", "live", "gap", "untrusted"}

// String returns the state's name.
func (s State) String() string {
	if int(s) < len(stateNames) {
		return stateNames[s]
	}
	return "invalid"
}

const (
	// overlapFor is how long after a replay live messages may arrive that the replay covered.
	overlapFor = 2 * time.Second
	// maxFalls in coolDown are more than a publisher that restarts can cause.
	maxFalls = 3
)

// progress is what the sink holds by now, and what is known of the publisher and its replays.
type progress struct {
	void     bool   // the sink has got a Reset and nothing since
	anchored bool   // next is known
	next     uint64 // the sequence number that continues what the sink holds
	hash     uint64 // of the last payload, unless void
	whole    bool   // the sink holds everything, if no gap is open
	deep     bool   // the sink's first batch was the first in the publisher's buffer
	failed   bool   // the last replay failed or could not help

	// empty replays prove nothing: one of them has missed what the publisher published
	emptyLies bool
	retryAt   time.Time // of the next replay from the beginning; zero: none is due
	silentTo  time.Time // until then live messages are ignored, see calm
	falls     int       // signs of two publishers since fallsFrom
	fallsFrom time.Time
	first     one

	connection
}

// connection is what is known of the current connection.
type connection struct {
	spoke    bool // and its last live sequence number was last
	last     uint64
	replayed time.Time // when the last replay ended
	caughtUp bool      // all messages that a replay may have covered have been handled
}

// one decides whether a publisher's first sequence number is 1. That of vLLM, SGLang and
// TensorRT-LLM is 0, that of llm-d's simulator is 1. A replay that begins at 1 can also mean
// that a full buffer has dropped 0. A full buffer drops one more batch for each new one. So if
// a later replay has more batches and still begins at 1, there was no 0.
type one struct {
	seen bool
	next uint64 // behind the replay that was seen
}

// begin finds out what the publisher has published before, without regard to old knowledge.
func (s *Stream) begin(ctx context.Context, box *inbox) {
	switch {
	case time.Now().Before(s.p.silentTo):
		s.p.failed, s.p.retryAt = true, s.p.silentTo
		s.settle()
		return
	case s.cfg.Replay != "":
		s.replayAll(ctx, box, false)
		return
	}
	s.drop("the stream begins anew, and the publisher has no replay")
	s.settle()
}

// drop makes void what the sink holds.
func (s *Stream) drop(why string) {
	p := &s.p
	p.anchored, p.whole, p.deep, p.failed = false, false, false, false
	p.retryAt = time.Time{}
	if !p.void {
		p.void = true
		s.sink.Reset(why)
	}
}

// apply hands a batch to the sink.
func (s *Stream) apply(seq uint64, payload []byte) {
	p := &s.p
	if !p.anchored {
		p.anchored, p.whole = true, seq == 0
	}
	p.void, p.next, p.hash = false, seq+1, xxh3.Hash(payload)
	s.sink.Payload(seq, payload)
	if s.marked.Swap(false) {
		p.whole = true
	}
}

// settle reports the state that follows from what the sink holds.
func (s *Stream) settle() {
	p := &s.p
	switch {
	case p.whole:
		p.failed, p.retryAt = false, time.Time{}
		s.enter(Live, true)
	case p.failed || s.cfg.Replay == "":
		s.enter(Untrusted, false)
	default:
		s.enter(Live, false)
	}
}

// receive handles a message of the live connection.
func (s *Stream) receive(ctx context.Context, box *inbox, m *zmtp.Message) {
	seq, payload, ok := liveBatch(m)
	if !ok {
		s.malformed(m)
		return
	}
	p := &s.p
	if time.Now().Before(p.silentTo) {
		return
	}
	if s.hasFallen(seq) {
		if !s.fall(fmt.Sprintf("the publisher restarted: batch %d follows batch %d", seq, p.last)) {
			return
		}
		s.begin(ctx, box)
	}
	p.spoke, p.last = true, seq
	s.live(ctx, box, seq, payload)
	s.settle()
}

// liveBatch splits a live message: topic, sequence number, payload.
func liveBatch(m *zmtp.Message) (seq uint64, payload []byte, ok bool) {
	if m.Frames() != 3 || len(m.Frame(1)) != 8 {
		return 0, nil, false
	}
	return binary.BigEndian.Uint64(m.Frame(1)), m.Frame(2), true
}

// hasFallen returns whether a live sequence number shows a restart. On one connection they
// only grow. They may be below next right after a replay, which covered them already.
//
// A ZeroMQ proxy keeps the connection when the publisher behind it restarts. Such a restart
// within overlapFor of a replay goes unseen if the new life's first batches look covered.
func (s *Stream) hasFallen(seq uint64) bool {
	p := &s.p
	if p.spoke {
		return seq <= p.last
	}
	return p.anchored && p.caughtUp && seq < p.next
}

// fall makes everything void because the sequence fell. It returns false if the stream has to
// ignore the publisher for a while.
func (s *Stream) fall(why string) bool {
	s.count(func(st *Status) { st.Restarts++ })
	s.drop(why)
	s.p.connection, s.p.first = connection{}, one{}
	return s.calm()
}

// calm counts a sign that two publishers share the endpoint. It returns false if there were so
// many that one publisher's restarts cannot explain them. Then the stream ignores live
// messages for a while.
func (s *Stream) calm() bool {
	p := &s.p
	now := time.Now()
	if now.Sub(p.fallsFrom) > coolDown {
		p.falls, p.fallsFrom = 0, now
	}
	if p.falls++; p.falls <= maxFalls {
		return true
	}
	s.drop("two publishers may share the endpoint")
	p.silentTo, p.retryAt, p.failed = now.Add(coolDown), now.Add(coolDown), true
	s.settle()
	s.degraded("two publishers may share the endpoint: restarts or new connections come too often", nil)
	return false
}

// live applies a live batch, and fills a gap in front of it if there is one.
func (s *Stream) live(ctx context.Context, box *inbox, seq uint64, payload []byte) {
	p := &s.p
	if p.anchored && seq > p.next {
		s.count(func(st *Status) { st.Gaps++ })
		s.fill(ctx, box, seq)
	}
	switch {
	case ctx.Err() != nil || box.gone.Err() != nil:
		return // the next connection begins with a replay
	case p.anchored && seq < p.next:
		return // a replay has covered it
	}
	s.apply(seq, payload)
}

// fill closes the gap in front of a live batch, or makes void what the sink holds.
func (s *Stream) fill(ctx context.Context, box *inbox, seq uint64) {
	p := &s.p
	hole := fmt.Sprintf("batches %d to %d are missing", p.next, seq-1)
	if s.cfg.Replay == "" || p.failed {
		retry := p.retryAt
		s.drop(hole)
		p.failed, p.retryAt = s.cfg.Replay != "", retry
		s.degraded(hole, nil)
		return
	}
	s.enter(Gap, false)
	s.degraded(hole, nil)
	s.replayFrom(ctx, box, p.next)
	if ctx.Err() == nil && box.gone.Err() == nil && p.anchored && p.next < seq {
		p.emptyLies = p.emptyLies || p.void
		s.fail(hole+", and the publisher does not replay them", nil)
	}
}

// fail makes void what the sink holds, after a replay that did not help.
func (s *Stream) fail(why string, err error) {
	s.drop(why)
	s.p.failed, s.p.retryAt = true, time.Now().Add(coolDown)
	s.settle()
	s.degraded(why, err)
}

// untilRetry is the time until a replay from the beginning is due, or long if none is.
func (s *Stream) untilRetry() time.Duration {
	if s.p.retryAt.IsZero() {
		return time.Hour
	}
	return time.Until(s.p.retryAt)
}

// retry replays from the beginning, if that can bring anything new.
func (s *Stream) retry(ctx context.Context, box *inbox) {
	p := &s.p
	switch {
	case p.retryAt.IsZero() || time.Now().Before(p.retryAt):
	case s.cfg.Replay == "":
		p.retryAt = time.Time{}
	case p.first.seen && !p.failed && p.next <= p.first.next:
		p.retryAt = time.Now().Add(coolDown)
	default:
		s.replayAll(ctx, box, true)
	}
}
