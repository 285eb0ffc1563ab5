package events

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/events/zmtp"
	"github.com/zeebo/xxh3"
)

const (
	replayIdle  = 2 * time.Second        // silence that ends an attempt
	replayLull  = 500 * time.Millisecond // silence within an answer that ends an attempt
	replayTotal = 2 * time.Minute
	replayPause = 250 * time.Millisecond // before the second attempt without progress
	replayTries = 3                      // attempts without progress
	replayAsks  = 3                      // questions of one attempt

	// maxStaged bounds the replay that a stream holds back while older knowledge still serves.
	maxStaged = 32 << 20

	// endMarker is the sequence number behind the last replayed batch.
	endMarker = math.MaxUint64
)

// errHole means that batches are missing. A ROUTER socket at its high-water mark leaves some
// out, and another attempt gets them. Those that the publisher has dropped meanwhile are lost.
var errHole = errors.New("the replay left batches out")

// replayed is what a replay has delivered.
type replayed struct {
	any         bool
	first, next uint64 // next is the batch to ask for, if any is false, too
}

// resume goes on behind the last batch that the sink got before the connection was lost. It
// returns false if a new beginning is due.
//
// It asks for that last batch again. A payload begins with the time of its publication, so an
// equal payload with an equal sequence number proves that the publisher has not restarted.
// Nothing gets to the sink before the proof. Without the proof, or if a replay from the
// beginning can reach further back than the sink does, the beginning is due.
func (s *Stream) resume(ctx context.Context, box *inbox) bool {
	p := &s.p
	if s.cfg.Replay == "" || p.void || !p.whole && !p.deep {
		return false
	}
	select {
	case <-s.resync:
		s.drop(asked)
		return false
	default:
	}
	s.enter(Replaying, false)
	asking, refute := context.WithCancel(ctx)
	defer refute()
	same, last := false, p.next-1
	_, err := s.replay(asking, box, last, func(seq uint64, payload []byte) {
		switch {
		case same:
			s.apply(seq, payload)
		case seq == last && xxh3.Hash(payload) == p.hash:
			same = true
		default: // another life, or the buffer has dropped the batch
			refute()
		}
	})
	p.replayed, p.caughtUp = time.Now(), false
	switch {
	case ctx.Err() != nil || box.gone.Err() != nil: // the next connection resumes
	case same && err == nil:
		s.settle()
	case !same && (err == nil || asking.Err() != nil):
		return false
	default:
		s.fail("the replay failed", err)
	}
	return true
}

// replayAll replays from the publisher's first batch. With old knowledge in the sink, it holds
// the replay back until it is complete. If the replay fails, the old knowledge is void, unless
// the connection that it came from still stands.
func (s *Stream) replayAll(ctx context.Context, box *inbox, stands bool) {
	p := &s.p
	in := intake{s: s, holding: !p.void}
	if p.void {
		s.drop("") // no Reset: the sink holds nothing
	}
	s.enter(Replaying, false)
	r, err := s.replay(ctx, box, 0, in.take)
	if ctx.Err() != nil || box.gone.Err() != nil {
		return // the next connection begins with a replay
	}
	p.replayed, p.caughtUp = time.Now(), false
	switch {
	case err == nil:
		in.handOver()
		s.judge(r)
		s.settle()
	case in.holding && stands:
		p.failed, p.retryAt = true, time.Now().Add(coolDown)
		s.settle()
		s.degraded("the replay failed", err)
	default:
		s.fail("the replay failed", err)
	}
	select { // a wish that came meanwhile is fulfilled
	case <-s.resync:
	default:
	}
}

// judge decides whether a replay from the beginning delivered everything.
func (s *Stream) judge(r replayed) {
	p := &s.p
	p.failed, p.retryAt, p.deep = false, time.Time{}, true
	switch {
	case !r.any:
		s.drop("the publisher has published nothing yet")
		p.anchored, p.next, p.whole = true, 0, !p.emptyLies
	case p.whole:
	case r.first == 1 && p.first.seen && r.next > p.first.next:
		p.whole = true
	default:
		if r.first == 1 {
			p.first, p.retryAt = one{seen: true, next: r.next}, time.Now().Add(coolDown)
		}
		s.partial(r.first)
	}
}

// replayFrom continues what the sink holds. If the publisher has dropped the batches asked
// for, what the sink holds is void, and the rest is a new beginning.
func (s *Stream) replayFrom(ctx context.Context, box *inbox, from uint64) {
	p := &s.p
	s.enter(Replaying, false)
	r, err := s.replay(ctx, box, from, func(seq uint64, payload []byte) {
		if seq != p.next {
			s.drop(fmt.Sprintf("the publisher's buffer begins at batch %d, batch %d is missing", seq, from))
		}
		s.apply(seq, payload)
	})
	switch {
	case ctx.Err() != nil || box.gone.Err() != nil:
	case err != nil:
		s.fail("the replay of missing batches failed", err)
	case r.any && r.first != from && from == 0:
		s.judge(r)
	case r.any && r.first != from:
		p.deep = true
		if !p.whole {
			s.partial(r.first)
		}
	}
}

// intake takes a replay in.
type intake struct {
	s       *Stream
	holding bool // the sink's older knowledge still serves
	first   uint64
	ends    []int
	buf     []byte
}

func (in *intake) take(seq uint64, payload []byte) {
	if !in.holding || len(in.buf)+len(payload) > maxStaged {
		in.handOver()
		in.s.apply(seq, payload)
		return
	}
	if len(in.ends) == 0 {
		in.first = seq
	}
	in.buf = append(in.buf, payload...)
	in.ends = append(in.ends, len(in.buf))
}

// handOver replaces what the sink holds by what was held back. From then on, batches go
// straight to the sink.
func (in *intake) handOver() {
	if !in.holding {
		return
	}
	in.holding = false
	in.s.drop("a replay from the beginning takes over")
	begin := 0
	for i, end := range in.ends {
		in.s.apply(in.first+uint64(i), in.buf[begin:end:end])
		begin = end
	}
	in.buf, in.ends = nil, nil
}

// replay asks for the batches from a sequence number on. Take gets them in order, without
// holes but with any beginning. After an interruption the replay goes on behind the last one.
func (s *Stream) replay(ctx context.Context, box *inbox, from uint64, take func(uint64, []byte)) (r replayed, err error) {
	s.count(func(st *Status) { st.Replays++ })
	ctx, cancel := context.WithTimeout(ctx, replayTotal)
	defer cancel()
	defer context.AfterFunc(box.gone, cancel)()
	r.next = from
	for tries := 0; tries < replayTries && ctx.Err() == nil; tries++ {
		if tries > 0 {
			sleep(ctx, time.Duration(s.cfg.Rand()*float64(replayPause))+replayPause<<(tries-1))
		}
		before := r.next
		err = s.attempt(ctx, &r, take)
		if err == nil {
			return r, err
		}
		if r.next > before {
			tries = -1
		}
	}
	if ctx.Err() != nil {
		err = errors.Join(ctx.Err(), err)
	}
	return r, err
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// attempt asks over one connection until an answer brings nothing new. The second answer
// closes a gap: batches that the publisher published between its first answer and the moment
// when the subscription took effect.
//
// A goroutine of its own reads the answers, however slow the sink is. The ROUTER socket of an
// engine drops what exceeds its high-water mark of 1000 messages, the end marker included.
// Each such loss costs a lull.
func (s *Stream) attempt(ctx context.Context, r *replayed, take func(uint64, []byte)) error {
	if s.cfg.Slots != nil {
		select {
		case s.cfg.Slots <- struct{}{}:
			defer func() { <-s.cfg.Slots }()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	nc, err := s.cfg.Dial(ctx, s.cfg.Replay)
	if err != nil {
		return err
	}
	c, err := zmtp.New(ctx, nc, s.cfg.Replay, zmtp.Options{Socket: zmtp.Dealer})
	if err != nil {
		return err
	}
	box := newInbox(c, maxReplayed)
	defer func() { _ = box.stop() }()
	for i := range replayAsks {
		before := *r
		switch err := ask(ctx, box, r, take); {
		case err != nil && i == 0:
			return err
		case err != nil || *r == before:
			return nil // the first answer was complete
		}
	}
	return nil
}

// ask asks once and takes the answer.
func ask(ctx context.Context, box *inbox, r *replayed, take func(uint64, []byte)) error {
	if err := box.c.Send(nil, binary.BigEndian.AppendUint64(nil, r.next)); err != nil {
		return err
	}
	for patience := replayIdle; ; patience = replayLull {
		m, err := box.next(ctx, patience)
		if err != nil {
			return err
		}
		seq, payload, err := replayedBatch(m)
		switch {
		case err != nil:
			return err
		case seq == endMarker || len(payload) == 0:
			return nil
		case seq < r.next: // the publisher did not heed where to begin
			continue
		case r.any && seq > r.next:
			return fmt.Errorf("%w: %d to %d", errHole, r.next, seq-1)
		}
		if !r.any {
			r.any, r.first = true, seq
		}
		r.next = seq + 1
		take(seq, payload)
		box.q.recycle(m)
	}
}

// replayedBatch splits a message of a replay. Behind the empty delimiter there are either
// the sequence number and the payload, or these behind the topic.
func replayedBatch(m *zmtp.Message) (seq uint64, payload []byte, err error) {
	n := m.Frames()
	if n > 2 && len(m.Frame(0)) == 0 {
		n--
	}
	if n != 2 && n != 3 || len(m.Frame(m.Frames()-2)) != 8 {
		return 0, nil, fmt.Errorf("the replay sent a message of %d frames without a sequence number in its place", m.Frames())
	}
	return binary.BigEndian.Uint64(m.Frame(m.Frames() - 2)), m.Frame(m.Frames() - 1), nil
}
