package events

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
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
	// Gap: batches are missing, or there is no connection.
	Gap
	// Untrusted: batches are lost for good. The sink holds a lower bound at best.
	Untrusted
)

var stateNames = [...]string{"unknown", "replaying", "live", "gap", "untrusted"}

// String returns the state's name.
func (s State) String() string { return stateNames[s] }

// MarshalText implements encoding.TextMarshaler.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler. It takes what it does not know for Unknown.
func (s *State) UnmarshalText(text []byte) error {
	*s = State(max(0, slices.Index(stateNames[:], string(text)))) //nolint:gosec // it is small
	return nil
}

const (
	// overlapFor is how long after a replay live batches may arrive that the replay covered.
	overlapFor = 2 * time.Second
	// coolDown is the time between a failed replay and the next one. A publisher that begins three
	// lives within it gets no replay until it has begun fewer.
	coolDown = 30 * time.Second
)

// position is where a stream stands: its state, and what it needs to know in it. The sink holds
// consecutive batches of one life of the publisher. A replay continues them: it begins with the last
// one, so that its bytes prove that the publisher is the same. Where the proof fails, the sink gets a
// Reset, and a replay of all rebuilds its knowledge. The stream reports Gap between two states if
// batches are missing.
//
//	in            when                                       to             the sink
//	Unknown       a connection, with a replay endpoint     Replaying, all
//	Gap           a connection, with a replay endpoint     Replaying, on
//	Unknown, Gap  a connection, without                    Untrusted
//	Replaying     the answer is complete                   Live              has got it
//	Replaying     the answer is of another life            Replaying, all    Reset
//	Replaying     that is the third life in coolDown       Untrusted         Reset
//	Replaying     it fails, or lacks what came live        Untrusted         Reset, if it began
//	Live          the next batch                           (stays)           gets it
//	Live          a later batch, with a replay endpoint    Replaying, on     gets it later
//	Live          a later batch, without                   Untrusted         Reset, gets it
//	Untrusted     the next batch                           Untrusted         gets it
//	Untrusted     batch 0, or the engine clears its cache  Live              gets it
//	Untrusted     a later batch                            Untrusted         Reset, gets it
//	Untrusted     coolDown after the failed replay         Replaying, all
//	any           Resync                                   as with a new connection, after a Reset
//	any           the sequence falls: another life         Gap; reconnects   Reset
//	any           the connection is lost                   Gap               Reset, if Untrusted
//
// The methods of Stream in this file make these transitions, and no others do.
type position struct {
	state State
	// begun is false until the first batch after a Reset. next is the batch after the sink's
	// last one, and last the hash of that one's payload.
	begun bool
	next  uint64
	last  uint64
	// complete: the sink holds all that the publisher has told up to next.
	complete bool
	// heard is the batch after the last live one of the connection; 0 if none came.
	heard uint64
	// covered is until when live batches before next may be those that the replay has brought.
	covered time.Time
	// retry fires when the replay endpoint is to be asked again; nil if it is not. Only an
	// Untrusted stream has one.
	retry <-chan time.Time
	// lives are when the publisher's last lives were noticed, the oldest first.
	lives [3]time.Time
}

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

func (s *Stream) reset(why string) {
	s.at.begun, s.at.next, s.at.complete = false, 0, false
	s.sink.Reset(why)
}

func (s *Stream) apply(seq uint64, payload []byte) {
	p := &s.at
	if !p.begun {
		p.begun, p.complete = true, seq == 0
	}
	p.next, p.last = seq+1, xxh3.Hash(payload)
	if s.sink.Payload(seq, payload) {
		p.complete = true
	}
}

// begin brings a sink up to date, over a new connection or after a failure.
func (s *Stream) begin(ctx context.Context, box *inbox) {
	switch p := &s.at; {
	case s.cfg.Replay == "":
		s.enter(Untrusted)
	case time.Since(p.lives[0]) < coolDown:
		s.fail("the publisher restarts again and again", nil)
	case p.state == Untrusted:
		s.catchUp(ctx, box, 0, p.heard)
	default:
		s.catchUp(ctx, box, max(p.next, 1)-1, p.heard)
	}
}

// disconnected ends a subscription, and what depends on it.
func (s *Stream) disconnected(ctx context.Context, why error) {
	s.count(func(st *Status) { st.Connected = false })
	if ctx.Err() != nil {
		return
	}
	if s.cfg.Replay == "" || s.at.state == Untrusted {
		s.reset("the connection is lost: " + why.Error())
	}
	s.at.heard, s.at.covered = 0, time.Time{}
	s.enter(Gap)
	s.degraded("the connection is lost", why)
}

// restarted notes that the publisher has begun another life.
func (s *Stream) restarted() {
	p := &s.at
	p.lives = [...]time.Time{p.lives[1], p.lives[2], time.Now()}
	s.count(func(st *Status) { st.Restarts++ })
	s.reset("the publisher restarted")
}

// catchUp replays from a batch on, which is 0 or the sink's last one. The answer must reach up to
// need, excluding it.
func (s *Stream) catchUp(ctx context.Context, box *inbox, from, need uint64) {
	p := &s.at
	partial := p.state == Untrusted // the sink keeps its lower bound until the answer begins
	s.enter(Replaying)
	continues := p.next > 0 && from == p.next-1
	began, proven := false, !continues
	r, err := s.replay(ctx, box, from, need, func(seq uint64, payload []byte) {
		first := !began
		began = true
		if first && continues && seq == from {
			proven = xxh3.Hash(payload) == p.last
			return
		}
		if first {
			proven = true // whatever the life: the answer is all that the publisher has buffered
			s.reset(fmt.Sprintf("a replay begins at batch %d", seq))
		}
		if proven {
			s.apply(seq, payload)
		}
	})
	p.covered = time.Now().Add(overlapFor)
	switch {
	case ctx.Err() != nil || box.gone.Err() != nil:
		return // the connection is lost
	case err == nil && !proven:
		s.restarted()
		s.begin(ctx, box)
		return
	case err == nil && r.next < need:
		err = fmt.Errorf("the publisher does not replay batches %d to %d", r.next, need-1)
		fallthrough
	case err != nil:
		if began || !partial {
			s.reset("the replay failed")
		}
		s.fail("the replay failed", err)
		return
	case !began && from == 0:
		s.reset("the publisher has published nothing yet")
		p.begun, p.complete = true, true
	}
	if !p.complete && r.first != from {
		s.partial(r.first)
	}
	s.enter(Live)
}

// fail leaves the sink without a replay until coolDown is over.
func (s *Stream) fail(why string, err error) {
	s.at.retry = time.After(coolDown)
	s.enter(Untrusted)
	s.degraded(why, err)
}

// resync starts over on the same connection.
func (s *Stream) resync(ctx context.Context, box *inbox) {
	s.enter(Gap)
	s.reset("the sink asked for a resync")
	s.begin(ctx, box)
}

// receive handles a message of the live connection. An error ends the connection.
func (s *Stream) receive(ctx context.Context, box *inbox, m zmtp.Message) error {
	if len(m) != 3 || len(m[1]) != 8 { // topic, sequence number, payload
		s.malformed(m)
		return nil
	}
	p, seq := &s.at, binary.BigEndian.Uint64(m[1])
	if seq < p.heard || p.heard == 0 && seq < p.next && time.Now().After(p.covered) {
		last := max(p.heard, p.next) - 1
		s.restarted()
		return fmt.Errorf("the publisher restarted: batch %d follows batch %d", seq, last)
	}
	p.heard = seq + 1
	if p.begun && seq > p.next {
		s.fill(ctx, box, seq)
	}
	if ctx.Err() != nil || box.gone.Err() != nil || seq < p.next {
		return nil // the connection is lost, or a replay has covered the batch
	}
	s.apply(seq, m[2])
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
	if p.state == Live && s.cfg.Replay != "" {
		s.enter(Gap)
		s.degraded(hole, nil)
		s.catchUp(ctx, box, max(p.next, 1)-1, seq)
		return
	}
	s.reset(hole)
	s.enter(Untrusted)
	s.degraded(hole, nil)
}
