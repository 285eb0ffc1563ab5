package events

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

// trouble makes something random happen to the publisher or to its connections.
func (r *rig) trouble(rnd *rand.Rand) {
	switch rnd.IntN(16) {
	case 0, 1, 2, 3:
		r.publishN(1 + rnd.IntN(8))
	case 4, 5:
		for range 1 + rnd.IntN(4) {
			r.publish(true)
		}
	case 6:
		r.disconnect()
	case 7:
		n := r.next
		r.restart()
		r.disconnect()
		if rnd.IntN(2) == 0 { // with the old life's sequence numbers
			r.publishN(int(n) + rnd.IntN(3))
		}
	case 8: // behind a proxy; a stream that is live for a while must see the new life begin
		before := r.s.Status()
		r.wait(2 * overlapFor)
		if after := r.s.Status(); before.State == Live && after.State == Live && before.Replays == after.Replays {
			r.restart()
			r.publish(false)
		}
	case 9:
		r.set(func() { r.down = !r.down })
	case 10:
		r.set(func() { r.refuse = rnd.IntN(2) == 0; r.stall = rnd.IntN(3) == 0 })
	case 11:
		r.set(func() {
			r.cut, r.quiet = rnd.IntN(6), rnd.IntN(2)*rnd.IntN(6)
			r.hole = rnd.Uint64N(r.next + 1)
		})
	case 12: // a batch twice
		r.set(func() {
			if n := len(r.buffer); n > 0 {
				b := r.buffer[n-1-rnd.IntN(min(n, 3))]
				r.sendLocked([]byte("topic"), be(b.seq), []byte(b.payload))
			}
		})
	case 13:
		r.s.Resync()
	case 14:
		lost := rnd.IntN(2) == 0
		r.set(func() { r.onReplay = func() { r.publish(lost) } })
	case 15:
		delay := time.Duration(rnd.IntN(200)) * time.Millisecond
		r.on(func(uint64) { time.Sleep(delay) })
	}
	r.wait(time.Duration(rnd.IntN(4)*rnd.IntN(1500)) * time.Millisecond)
}

// heal ends all trouble and lets the stream recover.
func (r *rig) heal() {
	r.on(nil)
	r.set(func() {
		r.down, r.refuse, r.stall = false, false, false
		r.cut, r.quiet, r.hole, r.onReplay = 0, 0, 0, nil
	})
	r.wait(5 * time.Minute)
	r.publish(false) // shows batches that were lost last
	r.wait(2 * time.Minute)
}

// agree compares what the sink holds with the publisher.
func (r *rig) agree(replays bool) error {
	r.journal.mu.Lock()
	defer r.journal.mu.Unlock()
	n := len(r.since)
	if n == 0 || r.since[n-1].seq != r.next-1 {
		return fmt.Errorf("the sink holds %s, the publisher's last batch is %d", r.span(), r.next-1)
	}
	for i, b := range r.since { // journal checks that they are contiguous
		if want := fmt.Sprintf("life %d batch %d", r.life, b.seq); b.payload != want {
			return fmt.Errorf("batch %d of %d since the Reset is %q, not of life %d", i, n, b.payload, r.life)
		}
	}
	oldest := r.buffer[0].seq
	switch {
	case r.complete && r.since[0].seq != 0:
		return fmt.Errorf("complete without the batches before %d", r.since[0].seq)
	case replays && r.state != Live:
		return fmt.Errorf("the state is %v", r.state)
	case replays && r.since[0].seq > oldest:
		return fmt.Errorf("the sink holds %s, the buffer begins at %d", r.span(), oldest)
	case !r.complete && r.since[0].seq == 0:
		return fmt.Errorf("not complete with all batches from %s", r.span())
	}
	return nil
}

// TestModel runs random trouble against a stream. After quiet, the sink must hold a contiguous
// suffix of what the publisher's present life has published. Complete must be true exactly if
// that is everything.
func TestModel(t *testing.T) {
	rounds := uint64(60)
	if testing.Short() {
		rounds = 20
	}
	for seed := range rounds {
		replays := seed%4 != 3
		inRig(t, func(p *publisher, c *Config) {
			rnd := rand.New(rand.NewPCG(seed, 0))
			p.steps, p.oldLayout, p.minor = 2+rnd.IntN(60), seed%2 == 0, byte(seed/2%2)
			if seed%5 == 0 {
				p.steps = 1 << 20
			}
			if !replays {
				c.Replay = ""
			}
			c.Rand = rnd.Float64
			p.publishN(rnd.IntN(30))
		}, func(r *rig) {
			rnd := rand.New(rand.NewPCG(seed, 1))
			for range 3 {
				for range 5 + rnd.IntN(25) {
					r.trouble(rnd)
				}
				r.heal()
				if err := r.agree(replays); err != nil {
					t.Errorf("seed %d: %v\n%+v\n%+v", seed, err, r.s.Status(), r.all[max(0, len(r.all)-20):])
				}
			}
		})
		if t.Failed() {
			return
		}
	}
}
