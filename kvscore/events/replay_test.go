package events

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// TestReplayResumes has replays of 100 batches that break or fall silent behind some batches, or leave one
// out. A ROUTER does the latter two when it reaches its high-water mark. Each replay begins where the one
// before ended.
func TestReplayResumes(t *testing.T) {
	for name, c := range map[string]struct {
		set    func(*publisher)
		asked  []uint64 // at first
		within time.Duration
	}{
		"breaks":         {func(p *publisher) { p.cut = 7 }, []uint64{0, 7, 14, 21}, time.Minute},
		"leaves one out": {func(p *publisher) { p.hole = 40 }, []uint64{0, 40}, time.Minute},
		"falls silent":   {func(p *publisher) { p.quiet = 20 }, []uint64{0, 20, 40, 60, 80}, 4*replayLull + 100*time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			inRig(t, func(p *publisher, _ *Config) { p.publishN(100); c.set(p) }, func(r *rig) {
				r.wait(c.within)
				r.holds(0, 99, Live, true)
				if n := len(c.asked); !slices.Equal(r.asked[:n], c.asked) || name != "breaks" && len(r.asked) > n {
					t.Errorf("asked for %v", r.asked)
				}
			})
		})
	}
}

// TestStopInReplay stops while much of a replay waits for a slow sink.
func TestStopInReplay(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.publishN(1000); p.refuse = true }, func(r *rig) {
		r.on(func(uint64) { time.Sleep(100 * time.Millisecond) })
		r.set(func() { r.refuse = false })
		r.wait(time.Minute)
		start := time.Now()
		r.stop()
		if d := time.Since(start); d > 100*time.Millisecond || len(r.since) > 700 {
			t.Errorf("Run returned after %v with %d batches", d, len(r.since))
		}
	})
}

// TestReplayHasAnEnd publishes faster than a cut replay advances.
func TestReplayHasAnEnd(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) {
		p.publishN(1)
		p.cut = 1
		var again func()
		again = func() {
			time.Sleep(time.Second)
			p.publish(true)
			p.publish(true)
			p.set(func() { p.onReplay = again })
		}
		p.onReplay = again
	}, func(r *rig) {
		r.wait(replayTotal + time.Second)
		if st := r.s.Status(); st.State != Untrusted {
			t.Errorf("status %+v", st)
		}
		r.set(func() { r.onReplay = nil })
	})
}

func TestReplayFromAHeedlessPublisher(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.heedless = true; p.publishN(5) }, func(r *rig) {
		r.publish(true)
		r.publish(false)
		r.wait(0)
		r.holds(0, 6, Live, true)
	})
}

// TestReplaysAtOnce starts many streams that share their slots.
func TestReplaysAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPublisher()
		p.publishN(20)
		slots := make(chan struct{}, 3)
		var rigs []*rig
		slow := func(uint64) { time.Sleep(10 * time.Millisecond) }
		for i := range 20 {
			r := newRig(t, p, Config{Endpoint: pubEndpoint, Replay: replayEndpoint, Dial: p.dial, Slots: slots})
			r.on(slow)
			if i%2 == 0 {
				r.s.Resync()
			}
			rigs = append(rigs, r)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		for _, r := range rigs {
			r.holds(0, 19, Live, true)
			r.stop()
		}
		if p.mostAtOnce > 3 || p.mostAtOnce < 2 {
			t.Errorf("%d replays at once", p.mostAtOnce)
		}
		p.disconnect()
	})
}

// TestLostConnectionEndsReplay does not wait for a replay of a connection that is gone.
func TestLostConnectionEndsReplay(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.publishN(5); p.stall = true }, func(r *rig) {
		r.wait(time.Second)
		r.set(func() {
			r.stall = false
			for nc := range r.subs {
				r.hangUpLocked(nc)
			}
		})
		r.wait(firstReconnect)
		r.holds(0, 4, Live, true)
		if st := r.s.Status(); st.Replays != 2 || fmt.Sprint(st.Err) != "" {
			t.Errorf("status %+v", st)
		}
	})
}
