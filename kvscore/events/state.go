package events

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/events/zmtp"
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
	// Gap: batches are missing, or there is no connection.
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

// MarshalText implements encoding.TextMarshaler.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

const (
	// overlapFor is how long after a replay live batches may arrive that the replay covered.
	overlapFor = 2 * time.Second
	// coolDown is the time between a failed replay and the next one.
	coolDown = 30 * time.Second
)

// position is where a stream stands: its state, and what it needs to know in it. What the sink
// holds came over the present connection. Wherever the stream cannot prove that a batch continues
// that, the sink gets a Reset, and a replay rebuilds its knowledge. A replay of all begins at
// batch 0. The stream reports Gap between two states if batches are missing.
//
//	in            when                                       to             the sink
//	Unknown, Gap  a connection, with a replay endpoint     Replaying, all
//	Unknown, Gap  a connection, without                    Untrusted
//	Replaying     the answer is complete                   Live              has got it
//	Replaying     it fails, or lacks what came live        Untrusted         Reset, if it began
//	Live          the next batch                           (stays)           gets it
//	Live          a later batch, with a replay endpoint    Replaying, next   gets it later
//	Live          a later batch, without                   Untrusted         Reset, gets it
//	Untrusted     the next batch                           Untrusted         gets it
//	Untrusted     batch 0, or the engine clears its cache  Live              gets it
//	Untrusted     a later batch                            Untrusted         Reset, gets it
//	Untrusted     coolDown after the failed replay         Replaying, all
//	any           Resync                                   as with a new connection, after a Reset
//	any           the sequence falls: another life         Gap; reconnects   Reset
//	any           the connection is lost                   Gap               Reset
//
// The methods of Stream in this file make these transitions, and no others do.
type position struct {
	state State
	// begun is false until the first batch after a Reset. next is the batch after the sink's
	// last one.
	begun bool
	next  uint64
	// complete: the sink holds all that the publisher has told up to next.
	complete bool
	// heard is the batch after the last live one; 0 if none came.
	heard uint64
	// covered is until when live batches before next may be those that the replay has brought.
	covered time.Time
	// retry fires when the replay endpoint is to be asked again; nil if it is not. Only an
	// Untrusted stream has one.
	retry <-chan time.Time
}

// errRestarted ends a connection behind which the publisher has begun another life, as a ZeroMQ
// proxy hides it.
var errRestarted = errors.New("the publisher restarted")

// enter changes the state, and reports it to the sink and to Status.
func (s *Stream) enter(to State) {
	p := &s.at
	p.state = to
	if to != Untrusted {
		p.retry = nil
	}
	if s.report(to, to == Live && p.complete) {
		s.sink.State(to, to == Live && p.complete)
	}
	if to == Live {
		s.recovered()
	}
}

// reset makes void what the sink holds.
func (s *Stream) reset(why string) {
	s.at.begun, s.at.next, s.at.complete = false, 0, false
	s.sink.Reset(why)
}

// apply hands a batch to the sink.
func (s *Stream) apply(seq uint64, payload []byte) {
	p := &s.at
	if !p.begun {
		p.begun, p.complete = true, seq == 0
	}
	p.next = seq + 1
	s.sink.Payload(seq, payload)
	if s.marked.Swap(false) {
		p.complete = true
	}
}

// begin brings a sink up to date that holds nothing.
func (s *Stream) begin(ctx context.Context, box *inbox) {
	if s.cfg.Replay == "" {
		s.enter(Untrusted)
		return
	}
	s.catchUp(ctx, box, 0, s.at.heard)
}

// lost forgets the connection, and all that came over it.
func (s *Stream) lost(why error) {
	s.at = position{state: s.at.state}
	s.reset("the connection is lost: " + why.Error())
	s.enter(Gap)
}

// catchUp replays from a batch on. The answer must reach up to need, excluding it.
func (s *Stream) catchUp(ctx context.Context, box *inbox, from, need uint64) {
	p := &s.at
	s.enter(Replaying)
	began, continues := false, p.begun && from == p.next
	r, err := s.replay(ctx, box, from, func(seq uint64, payload []byte) {
		if !began && (!continues || seq != from) {
			s.reset(fmt.Sprintf("a replay begins at batch %d", seq))
		}
		began = true
		s.apply(seq, payload)
	})
	p.covered = time.Now().Add(overlapFor)
	switch {
	case ctx.Err() != nil || box.gone.Err() != nil:
		return // the connection is lost
	case err != nil || r.next < need:
		s.fail(began || continues, r.next, need, err)
		return
	case !began && from == 0:
		s.reset("the publisher has published nothing yet")
		p.begun, p.complete = true, true
	}
	if !p.complete && r.first != from {
		s.partial(r.first)
	}
	if from == 0 {
		select { // a wish that came meanwhile is fulfilled
		case <-s.wish:
		default:
		}
	}
	s.enter(Live)
}

// fail leaves the sink without what a replay should have brought.
func (s *Stream) fail(void bool, next, need uint64, err error) {
	why := "the replay failed"
	if err == nil {
		why = fmt.Sprintf("the publisher does not replay batches %d to %d", next, need-1)
	}
	if void {
		s.reset(why)
	}
	s.at.retry = time.After(coolDown)
	s.enter(Untrusted)
	s.degraded(why, err)
}

// resync begins anew on the same connection.
func (s *Stream) resync(ctx context.Context, box *inbox) {
	s.enter(Gap)
	s.reset("the sink asked for a resync")
	s.begin(ctx, box)
}

// receive handles a message of the live connection. An error ends the connection.
func (s *Stream) receive(ctx context.Context, box *inbox, m *zmtp.Message) error {
	if m.Frames() != 3 || len(m.Frame(1)) != 8 { // topic, sequence number, payload
		s.malformed(m)
		return nil
	}
	p, seq := &s.at, binary.BigEndian.Uint64(m.Frame(1))
	if seq < p.heard || seq < p.next && time.Now().After(p.covered) {
		s.count(func(st *Status) { st.Restarts++ })
		return fmt.Errorf("%w: batch %d follows batch %d", errRestarted, seq, max(p.heard, p.next)-1)
	}
	p.heard = seq + 1
	if p.begun && seq > p.next {
		s.fill(ctx, box, seq)
	}
	if ctx.Err() != nil || box.gone.Err() != nil || seq < p.next {
		return nil // the connection is lost, or a replay has covered the batch
	}
	s.apply(seq, m.Frame(2))
	to := p.state
	if p.complete {
		to = Live
	}
	s.enter(to)
	return nil
}

// fill closes the gap in front of a live batch, or makes void what the sink holds.
func (s *Stream) fill(ctx context.Context, box *inbox, seq uint64) {
	p := &s.at
	s.count(func(st *Status) { st.Gaps++ })
	hole := fmt.Sprintf("batches %d to %d are missing", p.next, seq-1)
	before, retry := p.state, p.retry
	s.enter(Gap)
	s.degraded(hole, nil)
	if before == Live && s.cfg.Replay != "" {
		s.catchUp(ctx, box, p.next, seq)
		return
	}
	s.reset(hole)
	p.retry = retry
	s.enter(Untrusted)
}
