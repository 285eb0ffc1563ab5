package events

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/events/zmtp"
)

const (
	replayIdle  = 2 * time.Second        // silence that ends an attempt
	replayLull  = 500 * time.Millisecond // silence within an answer that ends an attempt
	replayTotal = 2 * time.Minute
	replayPause = 250 * time.Millisecond // before the second attempt without progress
	replayTries = 3                      // attempts without progress

	// endMarker is the sequence number behind the last replayed batch.
	endMarker = math.MaxUint64
)

type replayed struct {
	any         bool
	first, next uint64 // next is the batch to ask for, if any is false, too
}

// replay asks for the batches from a sequence number on, at least up to need, excluding it. Take gets
// them in order, without holes but with any beginning. After an interruption the replay goes on behind
// the last one.
func (s *Stream) replay(ctx context.Context, box *inbox, from, need uint64, take func(uint64, []byte)) (r replayed, err error) {
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
		if err == nil && (r.next >= need || r.next == before) { // else its end was lost, as above the mark
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
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// attempt asks once over a connection of its own, and takes the answer.
//
// A goroutine of its own reads the answers, however slow the sink is. The ROUTER socket of an
// engine drops what exceeds its high-water mark of 1000 messages, the end marker included.
// Each such loss costs a lull.
func (s *Stream) attempt(ctx context.Context, r *replayed, take func(uint64, []byte)) error {
	select {
	case s.cfg.Slots <- struct{}{}:
		defer func() { <-s.cfg.Slots }()
	case <-ctx.Done():
		return ctx.Err()
	}
	c, err := s.connect(ctx, s.cfg.Replay, zmtp.Dealer)
	if err != nil {
		return err
	}
	box := newInbox(c, maxReplayed)
	defer func() { _ = box.stop() }()
	if err := box.c.Send(nil, binary.BigEndian.AppendUint64(nil, r.next)); err != nil {
		return err
	}
	for patience := replayIdle; ; patience = replayLull {
		m, err := box.next(ctx, patience)
		if err != nil {
			return err
		}
		ended, err := r.accept(m, take)
		box.handled(m)
		if ended || err != nil {
			return err
		}
	}
}

// accept takes one message of an answer, and returns whether it is the last.
func (r *replayed) accept(m zmtp.Message, take func(uint64, []byte)) (ended bool, err error) {
	seq, payload, err := replayedBatch(m)
	switch {
	case err != nil:
		return false, err
	case seq == endMarker || len(payload) == 0:
		return true, nil
	case seq < r.next: // the publisher did not heed where to begin
		return false, nil
	case r.any && seq > r.next: // by a ROUTER socket at its high-water mark; another attempt gets them
		return false, fmt.Errorf("the replay left out batches %d to %d", r.next, seq-1)
	}
	if !r.any {
		r.any, r.first = true, seq
	}
	r.next = seq + 1
	take(seq, payload)
	return false, nil
}

// replayedBatch splits a message of a replay. Behind the empty delimiter there are either
// the sequence number and the payload, or these behind the topic.
func replayedBatch(m zmtp.Message) (seq uint64, payload []byte, err error) {
	if len(m) > 2 && len(m[0]) == 0 {
		m = m[1:]
	}
	n := len(m)
	if n != 2 && n != 3 || len(m[n-2]) != 8 {
		return 0, nil, fmt.Errorf("the replay sent a message of %d frames without a sequence number in its place", n)
	}
	return binary.BigEndian.Uint64(m[n-2]), m[n-1], nil
}
