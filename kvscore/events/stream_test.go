package events

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
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
				if r.resets != 1 || st.Seq != 14 || st.Replays != 1 || !st.Connected || st.Err != "" || !st.Complete {
					t.Errorf("%d resets, status %+v", r.resets, st)
				}
				if want := []uint64{0, 10}; fmt.Sprint(r.asked) != fmt.Sprint(want) {
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

func TestEmptyPublisherIsComplete(t *testing.T) {
	inRig(t, nil, func(r *rig) {
		r.holds(0, -1, Live, true)
		r.publishN(3)
		r.wait(0)
		r.holds(0, 2, Live, true)
	})
}

// TestPublishedWhileReplaying publishes between the subscription and the replay's answer:
// once in both, once only in the replay because the subscription was late.
func TestPublishedWhileReplaying(t *testing.T) {
	for _, lost := range []bool{false, true} {
		inRig(t, func(p *publisher, _ *Config) {
			p.publishN(5)
			p.onReplay = func() { p.publish(lost); p.publish(lost) }
		}, func(r *rig) {
			r.holds(0, 6, Live, true)
			r.publish(false)
			r.wait(0)
			r.holds(0, 7, Live, true)
			if st := r.s.Status(); st.Gaps != 0 || st.Restarts != 0 {
				t.Errorf("status %+v", st)
			}
		})
	}
}

// TestLateSubscription loses a batch between the replay's first answer and the moment when
// the subscription takes effect. Nothing follows that batch.
func TestLateSubscription(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) {
		p.publishN(5)
		p.onReplay = func() {
			go func() { time.Sleep(time.Millisecond); p.publish(true) }()
		}
	}, func(r *rig) {
		r.wait(time.Second)
		// The fake answers at once, so the batch comes after both answers. The next one shows it.
		r.publish(false)
		r.wait(0)
		r.holds(0, 6, Live, true)
	})
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

func TestMarkComplete(t *testing.T) {
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
			r.on(func(seq uint64) { // the engine clears its cache in batch 12
				if seq == 12 {
					r.s.MarkComplete()
				}
			})
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
		if st := r.s.Status(); st.Gaps != 1 || r.resets != 1 || st.Err != "" {
			t.Errorf("%d resets, status %+v", r.resets, st)
		}
		if last := r.asked[len(r.asked)-2]; last != 3 {
			t.Errorf("asked for %v, want 3 after the gap", r.asked)
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

func TestGapBeyondTheBuffer(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.publishN(3) }, func(r *rig) {
		r.set(func() { r.steps = 4; r.buffer = nil })
		for range 7 {
			r.publish(true)
		}
		r.publish(false) // 10; the buffer has 7 to 10
		r.wait(0)
		r.holds(7, 10, Live, false)
	})
}

func TestGapWithoutHelp(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.publishN(3) }, func(r *rig) {
		r.set(func() { r.refuse = true })
		r.publish(true)
		r.publish(false)
		r.wait(5 * time.Second)
		r.holds(4, 4, Untrusted, false)
		r.publish(false)
		r.wait(0)
		r.holds(4, 5, Untrusted, false) // a lower bound
		r.publish(true)
		r.publish(false)
		r.wait(0)
		r.holds(7, 7, Untrusted, false)
		if st := r.s.Status(); st.Err == "" || st.Gaps != 2 || st.Replays != 2 {
			t.Errorf("status %+v", st)
		}
		r.wait(31 * time.Second) // a retry fails
		r.holds(7, 7, Untrusted, false)
		r.set(func() { r.refuse = false })
		r.wait(31 * time.Second)
		r.holds(0, 7, Live, true)
		r.publish(false)
		r.wait(0)
		r.holds(0, 8, Live, true)
		if d, u := r.logs.FilterMessageSnippet("degraded").Len(), r.logs.FilterMessageSnippet("recovered").Len(); d != 1 || u != 1 {
			t.Errorf("%d lines at the start and %d at the end of one degradation", d, u)
		}
	})
}

// TestReplayThatLacksTheHole answers without the missing batches, though not because they
// are too old.
func TestReplayThatLacksTheHole(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.publishN(3) }, func(r *rig) {
		r.set(func() { r.buffer, r.steps = nil, 0 })
		r.publish(true)
		r.publish(false)
		r.wait(0)
		r.holds(4, 4, Untrusted, false)
	})
}

// TestUselessReplay has a replay endpoint that always says that nothing was published.
func TestUselessReplay(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.steps = 0; p.publishN(9) }, func(r *rig) {
		r.publishN(2)
		r.wait(0)
		r.holds(9, 10, Untrusted, false)
		r.disconnect()
		r.wait(time.Second)
		if r.complete { // it is known for a liar
			t.Error("an empty replay made the stream complete again")
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
		r.publishN(3)
		r.wait(0)
		r.holds(0, 2, Live, true)
		if st := r.s.Status(); st.Restarts != 1 || st.Gaps != 1 || st.Replays != 0 {
			t.Errorf("status %+v", st)
		}
		r.disconnect()
		r.wait(time.Second)
		r.holds(0, -1, Untrusted, false)
		r.publish(false)
		r.wait(0)
		r.holds(3, 3, Untrusted, false)
		if n := r.logs.FilterMessageSnippet("no replay endpoint").Len(); n != 1 {
			t.Errorf("logged %v", r.logs.All())
		}
	})
}

func TestRestartOnOneConnection(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.publishN(5) }, func(r *rig) {
		r.wait(time.Minute)
		r.restart()
		r.publish(true)
		r.publishN(2)
		r.wait(0)
		r.holds(0, 2, Live, true)
		if !strings.HasPrefix(r.since[0].payload, "life 1 ") {
			t.Errorf("the sink holds %q", r.since[0].payload)
		}
		r.restart()
		r.publishN(9)
		r.wait(0)
		r.holds(0, 8, Live, true)
		if st := r.s.Status(); st.Restarts != 2 || st.Gaps != 0 {
			t.Errorf("status %+v", st)
		}
	})
}

func TestRestartWithLostConnection(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.publishN(5) }, func(r *rig) {
		r.restart()
		r.publish(true)
		r.disconnect()
		r.wait(time.Second)
		r.holds(0, 0, Live, true)
		r.restart() // and an engine that has published nothing yet
		r.disconnect()
		r.wait(time.Second)
		r.holds(0, -1, Live, true)
	})
}

// TestHandOver keeps what the sink holds until the new life's replay is done.
func TestHandOver(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.publishN(5) }, func(r *rig) {
		r.set(func() { r.stall = true })
		r.restart()
		r.disconnect()
		r.publishN(5)
		r.wait(time.Second)
		r.holds(0, 4, Replaying, false)
		r.publish(false)
		r.set(func() { r.stall = false })
		r.wait(3 * time.Second)
		r.holds(0, 5, Live, true)
		resets := 0
		for _, e := range r.all {
			switch {
			case e.what == "reset":
				resets++
			case resets == 2 && e.what == "state" && e.state == Replaying:
				t.Error("the sink was reset before the replay")
			}
		}
		if resets != 2 || r.s.Status().Reconnects != 1 {
			t.Errorf("%d resets, status %+v", resets, r.s.Status())
		}
	})
}

// TestHandOverOfMuch replays more than the stream holds back.
func TestHandOverOfMuch(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.pad = strings.Repeat("x", 1<<20); p.publishN(40) }, func(r *rig) {
		r.holds(0, 39, Live, true)
		r.restart()
		r.disconnect()
		r.publishN(40)
		r.wait(time.Second)
		r.holds(0, 39, Live, true)
		r.lived(1)
	})
}

func TestFailedReplayAfterReconnect(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.publishN(5) }, func(r *rig) {
		r.set(func() { r.refuse = true })
		r.disconnect()
		r.wait(5 * time.Second)
		r.holds(0, -1, Untrusted, false)
		r.publish(false)
		r.wait(0)
		r.holds(5, 5, Untrusted, false)
		r.set(func() { r.refuse, r.stall = false, true })
		r.wait(30 * time.Second)
		r.holds(5, 5, Replaying, false) // a retry does not take the lower bound away
		r.wait(20 * time.Second)
		r.holds(5, 5, Untrusted, false)
		r.set(func() { r.stall = false })
		r.wait(40 * time.Second)
		r.holds(0, 5, Live, true)
	})
}

func TestStaleKnowledgeExpires(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.publishN(5) }, func(r *rig) {
		r.set(func() { r.down = true })
		r.disconnect()
		r.wait(20 * time.Second)
		r.holds(0, 4, Gap, false)
		r.wait(20 * time.Second)
		r.holds(0, -1, Untrusted, false)
		r.set(func() { r.down = false })
		r.wait(6 * time.Second)
		r.holds(0, 4, Live, true)
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
		r.holds(0, -1, Replaying, false) // all is dropped at once
		r.set(func() { r.stall = false })
		r.wait(3 * time.Second)
		r.holds(0, 4, Live, true)
		r.set(func() { r.down = true })
		r.disconnect()
		r.wait(time.Second)
		r.s.Resync() // without a connection
		r.wait(0)
		r.holds(0, -1, Gap, false)
		r.set(func() { r.down = false })
		r.wait(10 * time.Second)
		r.holds(0, 4, Live, true)
	})
}

// TestFirstSequenceIsOne has llm-d's simulator in mind, whose first batch is 1.
func TestFirstSequenceIsOne(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.first, p.next = 1, 1; p.publishN(5) }, func(r *rig) {
		r.holds(1, 5, Live, false)
		r.wait(2 * time.Minute) // without a new batch there is no proof, and no need to ask
		r.holds(1, 5, Live, false)
		if n := r.s.Status().Replays; n != 1 {
			t.Errorf("%d replays", n)
		}
		r.s.Resync() // without a new batch
		r.wait(time.Second)
		r.holds(1, 5, Live, false)
		r.publish(false)
		r.wait(time.Minute)
		r.holds(1, 6, Live, true)
		for life := range 2 { // another life proves nothing for this one
			r.restart()
			if life == 1 {
				r.disconnect()
				r.publishN(10)
			}
			r.publishN(10)
			r.wait(time.Second)
			r.holds(1, 10+10*life, Live, false)
		}
	})
	// A buffer that has dropped batch 0, and nothing else, looks the same at first.
	inRig(t, func(p *publisher, _ *Config) { p.steps = 5; p.publishN(6) }, func(r *rig) {
		r.holds(1, 5, Live, false)
		r.publish(false)
		r.wait(time.Minute)
		r.holds(2, 6, Live, false)
		r.wait(time.Hour)
		if n := r.s.Status().Replays; n != 2 {
			t.Errorf("%d replays", n)
		}
	})
	// It connects before the first batch.
	inRig(t, func(p *publisher, _ *Config) { p.first, p.next = 1, 1 }, func(r *rig) {
		r.publishN(2)
		r.wait(time.Second)
		r.holds(1, 2, Live, false)
		r.publish(false)
		r.wait(time.Minute)
		r.holds(1, 3, Live, true)
	})
}

// TestTwoPublishers mixes two sequences on one endpoint.
func TestTwoPublishers(t *testing.T) {
	inRig(t, func(p *publisher, _ *Config) { p.publishN(50) }, func(r *rig) {
		for range 100 {
			r.publish(false)
			r.send([]byte("topic"), be(7), []byte("another"))
			r.wait(10 * time.Millisecond)
		}
		r.holds(0, -1, Untrusted, false)
		if st := r.s.Status(); st.Replays > 10 || r.resets > 10 || !strings.Contains(st.Err, "two publishers") {
			t.Errorf("status %+v", st)
		}
		if n := r.logs.Len(); n > 4 {
			t.Errorf("%d log lines: %v", n, r.logs.All())
		}
		r.wait(time.Minute)
		r.publish(false)
		r.wait(0)
		r.holds(0, 150, Live, true)
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
		"no slot":     func(_ *publisher, c *Config) { c.Slots = NewSlots(0) },
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

func TestConfigErrors(t *testing.T) {
	for _, c := range []Config{
		{Endpoint: "tcp://*:5557"},
		{Endpoint: "nonsense"},
		{Endpoint: "tcp://host:1", Replay: "tcp://*:2"},
	} {
		if _, err := New(c, &journal{}, zap.NewNop()); err == nil {
			t.Errorf("%+v has no error", c)
		}
	}
}

func TestStateNames(t *testing.T) {
	if got := fmt.Sprint(Unknown, Replaying, Live, Gap, Untrusted, State(9)); got != "unknown replaying live gap untrusted invalid" {
		t.Error(got)
	}
}
