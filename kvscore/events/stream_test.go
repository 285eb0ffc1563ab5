package events

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sync/semaphore"
)

func TestReplayThenLive(t *testing.T) {
	for _, old := range []bool{false, true} {
		for _, minor := range []byte{0, 1} {
			inRig(t, func(p *publisher, _ *Config) { p.oldLayout, p.minor = old, minor; p.publishN(10) }, func(r *rig) {
				r.holds(0, 9, Live, true)
				r.publishN(5)
				r.wait(0)
				r.holds(0, 14, Live, true)
				st := r.s.Status()
				if st.Seq != 14 || st.Replays != 1 || !st.Connected || st.Err != "" || !st.Complete {
					t.Errorf("status %+v", st)
				}
				if want := []uint64{0}; fmt.Sprint(r.asked) != fmt.Sprint(want) {
					t.Errorf("asked for %v, want %v", r.asked, want)
				}
				if n := r.logs.Len(); n != 0 {
					t.Errorf("a healthy stream logged %v", r.logs.All())
				}
				r.wait(10 * time.Minute) // heartbeats keep it
				if st := r.s.Status(); st.Reconnects != 0 || st.State != Live {
					t.Errorf("after silence: %+v", st)
				}
			})
		}
	}
}

func TestWrappedBuffer(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.steps = 4; p.publishN(10) }, func(r *rig) {
		r.holds(6, 9, Live, false)
		r.publishN(2)
		r.wait(0)
		r.holds(6, 11, Live, false)
		if n := r.logs.FilterField(zap.Uint64("buffer_begins_at", 6)).Len(); n != 1 {
			t.Errorf("logged %v", r.logs.All())
		}
		r.wait(time.Hour)
		if n := r.s.Status().Replays; n != 1 {
			t.Errorf("%d replays of a buffer that has wrapped", n)
		}
	})
}

func TestClearedCacheCompletes(t *testing.T) {
	for _, replay := range []bool{false, true} {
		inRig(t, func(p *publisher, c *Config) {
			p.steps = 4
			p.publishN(10)
			if !replay {
				c.Replay = ""
			}
		}, func(r *rig) {
			r.publishN(1)
			r.wait(0)
			if r.complete {
				t.Error("complete too early")
			}
			r.set(func() { r.cleared = 12 })
			r.publishN(3)
			r.wait(0)
			if r.state != Live || !r.complete {
				t.Errorf("state %v, complete %v", r.state, r.complete)
			}
		})
	}
}

func TestGapIsFilled(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.publishN(3) }, func(r *rig) {
		for range 4 {
			r.publish(true)
		}
		r.publish(false)
		r.wait(0)
		r.holds(0, 7, Live, true)
		if st := r.s.Status(); st.Gaps != 1 || st.Err != "" {
			t.Errorf("status %+v", st)
		}
		for _, e := range r.all[slices.IndexFunc(r.all, func(e report) bool { return e.state == Live }):] {
			if e.what == "reset" {
				t.Errorf("a Reset although the gap is filled: %s", e.why)
			}
		}
		if last := r.asked[len(r.asked)-1]; last != 2 {
			t.Errorf("asked for %v, want 2 after the gap", r.asked)
		}
		var states []State
		for _, e := range r.all {
			if e.what == "state" {
				states = append(states, e.state)
			}
		}
		if want := []State{Replaying, Live, Gap, Replaying, Live}; fmt.Sprint(states) != fmt.Sprint(want) {
			t.Errorf("states %v, want %v", states, want)
		}
		if r.logs.FilterMessageSnippet("degraded").Len() != 1 || r.logs.FilterMessageSnippet("recovered").Len() != 1 {
			t.Errorf("logged %v", r.logs.All())
		}
	})
}

// TestGapsThatStayOpen loses batches that the publisher does not replay.
func TestGapsThatStayOpen(t *testing.T) {
	for name, c := range map[string]struct {
		set   func(*publisher)
		first int // that the sink holds then
		state State
	}{
		"the buffer has dropped them": {func(p *publisher) { p.steps, p.buffer = 4, nil }, 7, Live},
		"the buffer is off":           {func(p *publisher) { p.steps, p.buffer = 0, nil }, 10, Untrusted},
		"refused":                     {func(p *publisher) { p.refuse = true }, 10, Untrusted},
	} {
		t.Run(name, func(t *testing.T) {
			inRig(t, func(p *publisher, _ *Config) { p.publishN(3) }, func(r *rig) {
				r.set(func() { c.set(r.publisher) })
				for range 7 {
					r.publish(true)
				}
				r.publish(false)
				r.wait(5 * time.Second)
				r.holds(c.first, 10, c.state, false)
			})
		})
	}
}

// TestRetry has the replay endpoint fail for a while. The stream keeps its lower bound until a
// replay brings more.
func TestRetry(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.publishN(3); p.refuse = true }, func(r *rig) {
		r.wait(5 * time.Second)
		r.holds(0, -1, Untrusted, false)
		r.publish(false)
		r.wait(0)
		r.holds(3, 3, Untrusted, false) // a lower bound
		r.publish(true)
		r.publish(false)
		r.wait(0)
		r.holds(5, 5, Untrusted, false)
		if st := r.s.Status(); st.Err == "" || st.Gaps != 1 || st.Replays != 1 {
			t.Errorf("status %+v", st)
		}
		r.set(func() { r.refuse, r.stall = false, true })
		r.wait(27 * time.Second)
		r.holds(5, 5, Replaying, false)
		r.wait(20 * time.Second)
		r.holds(5, 5, Untrusted, false)
		r.set(func() { r.stall = false })
		r.wait(30 * time.Second)
		r.holds(0, 5, Live, true)
		r.publish(false)
		r.wait(0)
		r.holds(0, 6, Live, true)
		if d, u := r.logs.FilterMessageSnippet("degraded").Len(), r.logs.FilterMessageSnippet("recovered").Len(); d != 1 || u != 1 {
			t.Errorf("%d lines at the start and %d at the end of one degradation", d, u)
		}
	})
}

func TestNoReplayEndpoint(t *testing.T) {
	inRig(t, func(p *publisher, c *Config) { c.Replay = ""; p.publishN(5) }, func(r *rig) {
		r.holds(0, -1, Untrusted, false)
		r.publishN(2)
		r.wait(0)
		r.holds(5, 6, Untrusted, false)
		r.publish(true)
		r.publish(false)
		r.wait(0)
		r.holds(8, 8, Untrusted, false)
		r.restart()
		r.disconnect()
		r.wait(time.Second)
		r.publishN(3)
		r.wait(0)
		r.holds(0, 2, Live, true)
		r.disconnect()
		r.wait(time.Second)
		r.holds(0, -1, Untrusted, false)
		r.publish(false)
		r.wait(0)
		r.holds(3, 3, Untrusted, false)
		if st := r.s.Status(); st.Gaps != 1 || st.Replays != 0 || r.logs.FilterMessageSnippet("no replay endpoint").Len() != 1 {
			t.Errorf("status %+v, log %v", st, r.logs.All())
		}
	})
}

// lived checks that all that the sink holds is of one life of the publisher.
func (r *rig) lived(life int) {
	r.t.Helper()
	for _, b := range r.since {
		if want := fmt.Sprintf("life %d batch %d", life, b.seq); !strings.HasPrefix(b.payload, want) {
			r.t.Errorf("the sink holds %.40q, want %q", b.payload, want)
		}
	}
}

// TestRestartOnOneConnection begins new lives behind one connection, as a ZeroMQ proxy does.
func TestRestartOnOneConnection(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.publishN(5) }, func(r *rig) {
		r.wait(time.Minute)
		for life := 1; life < 3; life++ {
			r.restart()
			r.publish(true)
			r.publishN(2)
			r.wait(2 * overlapFor)
			r.holds(0, 2, Live, true)
			r.lived(life)
		}
		if st := r.s.Status(); st.Restarts != 2 || st.Reconnects != 2 || st.Gaps != 0 {
			t.Errorf("status %+v", st)
		}
	})
}

// TestTwoPublishers mixes two sequences on one endpoint. The stream must not ask for replays
// without a pause.
func TestTwoPublishers(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.publishN(50) }, func(r *rig) {
		for range 6000 {
			r.publish(false)
			r.send([]byte("topic"), be(7), []byte("another"))
			r.wait(10 * time.Millisecond)
		}
		if st := r.s.Status(); st.Replays > 3 || r.logs.Len() > 4 {
			t.Errorf("status %+v, %d log lines", st, r.logs.Len())
		}
		r.wait(time.Minute)
		r.holds(0, 6049, Live, true)
	})
}

// TestReconnect breaks the connection while the engine lives on, or restarts. The sink keeps what it
// holds if the engine replays the last batch of it. Otherwise it gets what the buffer has, of the
// present life alone.
func TestReconnect(t *testing.T) {
	for _, c := range []struct {
		steps, restarts, published int
		first, last                int
		complete                   bool
	}{
		{100, 0, 0, 0, 4, true},
		{100, 0, 3, 0, 7, true},
		{4, 0, 0, 1, 4, false},
		{4, 0, 3, 1, 7, false},
		{4, 0, 4, 5, 8, false}, // the buffer has dropped the last batch that the sink holds
		{100, 1, 0, 0, -1, true},
		{100, 1, 1, 0, 0, true},
		{100, 1, 5, 0, 4, true}, // up to the old life's sequence number
		{100, 1, 20, 0, 19, true},
		{4, 1, 20, 16, 19, false},
	} {
		inRig(t, func(p *publisher, _ *Config) { p.steps = c.steps; p.publishN(5) }, func(r *rig) {
			if c.restarts > 0 {
				r.restart()
			}
			r.set(func() { r.down = true })
			r.disconnect()
			r.publishN(c.published)
			r.wait(time.Second)
			r.holds(max(0, 5-c.steps), 4, Gap, false)
			r.set(func() { r.down = false })
			r.wait(10 * time.Second)
			r.holds(c.first, c.last, Live, c.complete)
			r.publish(false)
			r.wait(0)
			r.holds(c.first, c.last+1, Live, c.complete)
			r.lived(c.restarts)
			if st := r.s.Status(); st.Gaps != 0 || st.Reconnects != 1 || st.Err != "" || st.Restarts > uint64(c.restarts) {
				t.Errorf("%+v: status %+v", c, st)
			}
		})
	}
}

// TestLateOverlap gets live batches of the replay for longer than usual. They show that the
// publisher has not restarted.
func TestLateOverlap(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.publishN(10) }, func(r *rig) {
		for seq := range uint64(10) {
			r.send([]byte("topic"), be(seq), []byte("replayed"))
			r.wait(overlapFor / 4)
		}
		r.publish(false)
		r.wait(0)
		r.holds(0, 10, Live, true)
		if st := r.s.Status(); st.Restarts != 0 || st.Reconnects != 0 {
			t.Errorf("status %+v", st)
		}
	})
}

func TestReconnectBackOff(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.publishN(5) }, func(r *rig) {
		r.wait(time.Minute)
		r.set(func() { r.down, r.dials = true, nil })
		lost := time.Now()
		r.disconnect()
		r.wait(10 * time.Minute)
		if d := r.dials[0].Sub(lost); d > firstReconnect {
			t.Errorf("the first reconnect came after %v", d)
		}
		longest := time.Duration(0)
		for i := 1; i < len(r.dials); i++ {
			longest = max(longest, r.dials[i].Sub(r.dials[i-1]))
		}
		if n := len(r.dials); n < 110 || n > 300 || longest > maxReconnect || longest < maxReconnect/2 {
			t.Errorf("%d dials in 10 minutes, the longest pause is %v", len(r.dials), longest)
		}
		r.set(func() { r.down = false })
		r.wait(10 * time.Second)
		r.holds(0, 4, Live, true)
		if n := r.logs.Len(); n != 2 {
			t.Errorf("ten minutes of failed connections made %d log lines: %v", n, r.logs.All())
		}
		for _, e := range r.logs.All() {
			if e.ContextMap()["endpoint"] != pubEndpoint {
				t.Errorf("a line does not name the endpoint: %v", e)
			}
		}
	})
}

// TestFlappingConnection comes and goes every second for ten minutes.
func TestFlappingConnection(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.publishN(5) }, func(r *rig) {
		for range 600 {
			r.disconnect()
			r.publish(false)
			r.wait(time.Second)
		}
		r.wait(10 * time.Second)
		r.publish(false)
		r.wait(0)
		r.holds(0, 605, Live, true)
		if n := r.logs.Len(); n > 45 {
			t.Errorf("%d log lines in 10 minutes", n)
		}
		if st := r.s.Status(); st.Reconnects > 300 {
			t.Errorf("%d reconnects: the back-off does not grow", st.Reconnects)
		}
	})
}

func TestResync(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.publishN(5) }, func(r *rig) {
		r.set(func() { r.stall = true })
		r.s.Resync()
		r.wait(time.Second)
		r.holds(0, -1, Replaying, false) // all is void at once
		r.s.Resync()
		r.set(func() { r.stall = false })
		r.wait(3 * time.Second)
		r.holds(0, 4, Live, true)
		r.set(func() { r.down = true })
		r.disconnect()
		r.wait(time.Second)
		r.s.Resync() // without a connection
		r.set(func() { r.down = false })
		r.wait(10 * time.Second)
		r.holds(0, 4, Live, true)
		if st := r.s.Status(); st.Replays != 5 { // the fourth continues, before the request to resync is seen
			t.Errorf("status %+v", st)
		}
	})
	inRig(t, func(p *publisher, c *Config) { p.publishN(5); c.Replay = "" }, func(r *rig) {
		r.publishN(2)
		r.wait(0)
		r.s.Resync()
		r.wait(0)
		r.holds(0, -1, Untrusted, false)
	})
}

func TestMalformedMessages(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.publishN(1) }, func(r *rig) {
		r.send([]byte("topic"), []byte("1"), []byte("x"))
		r.send([]byte("topic"), be(1))
		r.send([]byte("topic"), be(1), []byte("x"), []byte("y"))
		r.publish(false)
		r.wait(0)
		r.holds(0, 1, Live, true)
		if st := r.s.Status(); st.Malformed != 3 || r.logs.Len() != 1 {
			t.Errorf("status %+v, log %v", st, r.logs.All())
		}
	})
}

// TestSlowSink takes a second for each batch. Nothing is lost, and little is queued.
func TestSlowSink(t *testing.T) {
	inRig(t, nil, func(r *rig) {
		r.on(func(uint64) { time.Sleep(time.Second) })
		r.publishN(5000)
		r.wait(time.Minute)
		queued := 0
		r.set(func() {
			for _, out := range r.subs {
				queued = len(out)
			}
		})
		if queued < 5000-60-maxQueued-400 { // the rest is in the queue and in one read buffer
			t.Errorf("%d of 5000 batches wait at the publisher", queued)
		}
		r.wait(2 * time.Hour)
		r.holds(0, 4999, Live, true)
	})
}

func TestStop(t *testing.T) {
	for name, set := range map[string]func(*publisher, *Config){
		"live":        nil,
		"unreachable": func(p *publisher, _ *Config) { p.down = true },
		"replaying":   func(p *publisher, _ *Config) { p.stall = true },
		"no slot":     func(_ *publisher, c *Config) { c.Slots = make(chan struct{}) },
		"retrying":    func(p *publisher, _ *Config) { p.refuse = true },
	} {
		t.Run(name, func(t *testing.T) {
			inRig(t, set, func(r *rig) {
				start := time.Now()
				r.stop()
				if d := time.Since(start); d > 0 {
					t.Errorf("Run returned after %v", d)
				}
				if r.s.Status().Connected {
					t.Error("a stopped stream says that it is connected")
				}
			})
		})
	}
}

// TestStreamsShareABudget has other streams of the process hold all bytes for a while.
func TestStreamsShareABudget(t *testing.T) {
	for _, size := range []int{100, 2 << 20} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			others := allBytes
			defer func() { allBytes = others }()
			inRig(t, nil, func(r *rig) {
				all, most := semaphore.NewWeighted(maxBytes()), maxBytes()
				allBytes = func() *semaphore.Weighted { return all }
				all.TryAcquire(most - 1)
				batches := 0
				r.on(func(uint64) { batches++ })
				r.set(func() { r.pad = strings.Repeat("x", size) })
				r.publish(false)
				r.publish(false)
				r.wait(10 * time.Second)
				if batches != 0 {
					t.Errorf("%d batches came through", batches)
				}
				free := int64(size) + 64 // for one batch at a time
				all.Release(free - 1)
				r.wait(time.Second)
				r.holds(0, 1, Live, true)
				all.Release(most - free)
				r.publishN(20) // more than one stream may hold at a time
				r.wait(time.Second)
				r.holds(0, 21, Live, true)
				r.publish(false)
				r.disconnect()
				r.wait(time.Second)
				if !all.TryAcquire(most) {
					t.Error("a handled message, or the queue of a lost connection, holds bytes")
				}
				all.Release(most)
			})
		})
	}
}

// TestLargeMessageGoesOn has an engine publish a large message of small frames. Only the last frame
// may take it above 1 MiB, because the room for all is taken then.
func TestLargeMessageGoesOn(t *testing.T) {
	inRig(t, nil, func(r *rig) {
		r.wait(time.Second)
		frame := make([]byte, 900<<10)
		r.set(func() {
			for _, out := range r.subs {
				out <- encode(frame, frame, frame)
			}
		})
		r.wait(10 * time.Second)
		if n := len(r.dials); n != 2 {
			t.Errorf("%d connections, want a second one", n)
		}
	})
}

// TestLargeMessageThatNeverEnds has an engine announce 10 MiB and send a byte each second.
func TestLargeMessageThatNeverEnds(t *testing.T) {
	inRig(t, nil, func(r *rig) {
		r.wait(time.Second)
		whole := encode([]byte("topic"), be(0), make([]byte, 10<<20))
		r.set(func() {
			for _, out := range r.subs {
				out <- whole[:64]
			}
		})
		for i := range 40 {
			r.wait(time.Second)
			r.set(func() {
				for _, out := range r.subs {
					if len(r.dials) == 1 {
						out <- whole[64+i : 65+i]
					}
				}
			})
		}
		if n := len(r.dials); n != 2 {
			t.Errorf("%d connections, want a second one after 30 s", n)
		}
	})
}
