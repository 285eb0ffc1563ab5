package events

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"
)

// lived checks that all that the sink holds is of one life of the publisher.
func (r *rig) lived(life int) {
	r.t.Helper()
	r.journal.mu.Lock()
	defer r.journal.mu.Unlock()
	for _, b := range r.since {
		if want := fmt.Sprintf("life %d batch %d", life, b.seq); !strings.HasPrefix(b.payload, want) {
			r.t.Errorf("the sink holds %.40q, want %q", b.payload, want)
			return
		}
	}
}

// lose breaks the connection, and publishes n batches before the next one.
func (r *rig) lose(n int) {
	r.disconnect()
	r.set(func() { r.asked = nil })
	r.publishN(n)
}

// after does the same, and waits for the next connection.
func (r *rig) after(n int) {
	r.lose(n)
	r.wait(2 * maxReconnect)
}

// asks returns whether the first questions since lose were these.
func (r *rig) asks(want ...uint64) bool {
	r.publisher.mu.Lock()
	defer r.publisher.mu.Unlock()
	return slices.Equal(r.asked[:min(len(want), len(r.asked))], want)
}

// TestResume loses the connection when the buffer has long dropped the first batch.
func TestResume(t *testing.T) {
	for name, first := range map[string]int{"complete": 0, "partial": 6} {
		t.Run(name, func(t *testing.T) {
			inRig(t, func(p *publisher, _ *Config) {
				p.steps = 4
				if first > 0 {
					p.publishN(first + p.steps)
				}
			}, func(r *rig) {
				r.publishN(10 - int(r.next))
				r.wait(0)
				r.holds(first, 9, Live, first == 0)
				for last := 9; last < 30; last += 3 {
					r.after(last % 2 * 3)
					r.publishN(3 - last%2*3)
					r.wait(0)
					r.holds(first, last+3, Live, first == 0)
					if !r.asks(uint64(last)) {
						t.Errorf("asked for %v, want %d first", r.asked, last)
					}
				}
				if st := r.s.Status(); r.resets != 1 || st.Reconnects != 7 || st.Gaps != 0 || st.Err != "" {
					t.Errorf("%d resets, status %+v", r.resets, st)
				}
			})
		})
	}
}

// TestRestartIsNotResumed has the new life reach the old one's sequence number while the
// connection is lost.
func TestRestartIsNotResumed(t *testing.T) {
	for _, n := range []int{0, 1, 4, 5, 6, 20} {
		inRig(t, func(p *publisher, _ *Config) { p.publishN(5) }, func(r *rig) {
			r.restart()
			r.after(n)
			r.holds(0, n-1, Live, true)
			r.lived(1)
			r.publish(false)
			r.wait(0)
			r.holds(0, n, Live, true)
			r.lived(1)
			if st := r.s.Status(); r.resets != 2 || !r.asks(4, 0) || st.Gaps != 0 {
				t.Errorf("%d resets, asked for %v, status %+v", r.resets, r.asked, st)
			}
		})
	}
}

// TestResumeBeyondTheBuffer has the buffer drop the last batch that the sink got.
func TestResumeBeyondTheBuffer(t *testing.T) {
	for _, n := range []int{4, 5, 50} { // 4 leave no hole, but no proof either
		inRig(t, func(p *publisher, _ *Config) { p.steps = 4 }, func(r *rig) {
			r.publishN(10)
			r.wait(0)
			r.after(n)
			r.holds(6+n, 9+n, Live, false)
			if r.resets != 2 || !r.asks(9, 0) {
				t.Errorf("%d resets, asked for %v", r.resets, r.asked)
			}
			r.after(2)
			r.holds(6+n, 11+n, Live, false)
		})
	}
	// The buffer is empty.
	inRig(t, func(p *publisher, _ *Config) { p.publishN(5) }, func(r *rig) {
		r.set(func() { r.buffer = nil })
		r.after(0)
		r.holds(0, -1, Live, true)
	})
}

// TestResumeWithInterruptions cuts the replay again and again, and then the connection, too.
func TestResumeWithInterruptions(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.steps, p.cut = 60, 7 }, func(r *rig) {
		r.publishN(100)
		r.wait(0)
		r.on(func(uint64) { time.Sleep(100 * time.Millisecond) })
		r.lose(50)
		r.wait(time.Second)
		r.disconnect()
		r.wait(time.Minute)
		r.holds(0, 149, Live, true)
		if st := r.s.Status(); r.resets != 1 || st.Reconnects != 2 {
			t.Errorf("%d resets, status %+v", r.resets, st)
		}
	})
}

// TestNothingToResume has the sink hold too little: a replay from the beginning brings more.
func TestNothingToResume(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.publishN(3); p.refuse = true }, func(r *rig) {
		r.wait(5 * time.Second)
		r.publish(false)
		r.wait(0)
		r.holds(3, 3, Untrusted, false)
		r.set(func() { r.refuse = false })
		r.after(1)
		r.holds(0, 4, Live, true)
		if !r.asks(0) {
			t.Errorf("asked for %v", r.asked)
		}
	})
	// The engine clears its cache, and what it held before does not matter.
	inRig(t, func(p *publisher, _ *Config) { p.steps = 4; p.publishN(9); p.refuse = true }, func(r *rig) {
		r.wait(5 * time.Second)
		r.on(func(uint64) { r.s.MarkComplete() })
		r.publish(false)
		r.wait(0)
		r.on(nil)
		r.set(func() { r.refuse = false })
		r.after(2)
		r.holds(9, 11, Live, true)
	})
	// A replay from the beginning was interrupted, and has not said where the buffer begins.
	inRig(t, func(p *publisher, _ *Config) { p.first, p.next, p.stall = 1, 1, true; p.publishN(50) }, func(r *rig) {
		r.on(func(uint64) { time.Sleep(100 * time.Millisecond) })
		r.set(func() { r.stall = false })
		r.wait(4 * time.Second)
		r.disconnect()
		r.wait(30 * time.Second)
		r.publish(false)
		r.wait(time.Minute)
		r.holds(1, 51, Live, true)
	})
}

// TestResyncIsNotResumed wants a new beginning before, during and after the lost connection.
func TestResyncIsNotResumed(t *testing.T) {
	for _, pause := range []time.Duration{0, time.Millisecond, time.Second} {
		inRig(t, func(p *publisher, c *Config) { p.publishN(5); c.Rand = func() float64 { return 0 } }, func(r *rig) {
			r.set(func() { r.onReplay = func() { time.Sleep(10 * time.Millisecond) } })
			r.disconnect()
			time.Sleep(pause)
			r.s.Resync()
			r.wait(time.Minute)
			r.holds(0, 4, Live, true)
			if r.resets != 2 {
				t.Errorf("%d resets, asked for %v", r.resets, r.asked)
			}
		})
	}
}

// TestResyncBeforeResume asks for a new beginning while the next connection is being made.
func TestResyncBeforeResume(t *testing.T) {
	inRig(t, func(p *publisher, c *Config) {
		p.publishN(5)
		c.Rand = func() float64 { return 0 }
		c.Dial = func(ctx context.Context, endpoint string) (net.Conn, error) {
			time.Sleep(100 * time.Millisecond)
			return p.dial(ctx, endpoint)
		}
	}, func(r *rig) {
		r.wait(time.Second)
		r.lose(0)
		time.Sleep(50 * time.Millisecond)
		r.s.Resync()
		r.wait(time.Second)
		r.holds(0, 4, Live, true)
		if !r.asks(0, 5) || r.resets != 2 {
			t.Errorf("%d resets, asked for %v", r.resets, r.asked)
		}
	})
}

// TestResumeKeepsFirstSequence does not forget what it learned of the first sequence number.
func TestResumeKeepsFirstSequence(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.first, p.next = 1, 1; p.publishN(5) }, func(r *rig) {
		r.after(1)
		r.holds(1, 6, Live, false)
		r.wait(time.Minute)
		r.holds(1, 6, Live, true)
	})
}

// TestResumeFails loses the connection and the replay endpoint at once.
func TestResumeFails(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.publishN(5) }, func(r *rig) {
		r.set(func() { r.stall = true })
		r.lose(1)
		r.wait(time.Second)
		r.holds(0, 4, Replaying, false)
		r.wait(3*replayIdle + 4*replayPause)
		r.publish(false)
		r.wait(0)
		r.holds(6, 6, Untrusted, false)
		if len(r.asked) != replayTries {
			t.Errorf("asked for %v", r.asked)
		}
		r.set(func() { r.stall = false })
		r.wait(coolDown)
		r.holds(0, 6, Live, true)
	})
}
