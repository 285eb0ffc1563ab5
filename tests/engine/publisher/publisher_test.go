package publisher

import (
	"encoding/binary"
	"net"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine/publisher/peer"
)

func listen(t *testing.T) net.Listener {
	t.Helper()
	ln, err := canned.Listen()
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

// start starts a publisher that is closed with the test.
func start(t *testing.T, cfg Config) *Publisher {
	t.Helper()
	if cfg.Listener == nil {
		cfg.Listener = listen(t)
	}
	if cfg.Replay == nil {
		cfg.Replay = listen(t)
	}
	p := Start(cfg)
	t.Cleanup(p.Close)
	return p
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not so within 5 s: %s", what)
		}
	}
}

// must returns a connection that is closed with the test.
func must(t *testing.T) func(*peer.Conn, error) *peer.Conn {
	return func(c *peer.Conn, err error) *peer.Conn {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.Close)
		return c
	}
}

// subscribe returns a subscriber whose subscription has arrived.
func subscribe(t *testing.T, p *Publisher, prefix string) *peer.Conn {
	t.Helper()
	before := p.Status().Subscribers
	c := must(t)(peer.Subscribe(p.cfg.Listener.Addr().String(), prefix))
	eventually(t, "the subscription arrived", func() bool { return p.Status().Subscribers == before+1 })
	return c
}

// publish publishes batches that remove one block each, named by a running number.
func publish(p *Publisher, from, n int) {
	for i := range n {
		p.Publish(&Batch{Time: time.Now(), Events: []Event{{Kind: Removed, Hashes: []uint64{uint64(from + i)}}}})
	}
}

// number returns the block that a payload removes.
func number(t *testing.T, payload []byte) int {
	t.Helper()
	m := decoded(t, payload).([]any)[1].([]any)[0].(map[string]any)
	return int(integer(m["block_hashes"].([]any)[0]))
}

func expect(t *testing.T, c *peer.Conn, topic string, seq uint64, block int) {
	t.Helper()
	m, err := c.Next()
	if err != nil {
		t.Fatal(err)
	}
	if m.Topic != topic || m.Seq != seq || number(t, m.Payload) != block {
		t.Fatalf("topic %q, number %d, block %d; want %q, %d, %d", m.Topic, m.Seq, number(t, m.Payload), topic, seq, block)
	}
}

func settled(t *testing.T, p *Publisher) {
	t.Helper()
	eventually(t, "all batches are sent", func() bool { s := p.Status(); return s.Pending == 0 && s.Unsent == 0 })
}

func TestSubscribers(t *testing.T) {
	p := start(t, Config{Topic: "kv-events", Form: Form{Encoding: Maps}})
	publish(p, 0, 2)
	settled(t, p)
	all, same, other := subscribe(t, p, ""), subscribe(t, p, "kv-e"), must(t)(peer.Subscribe(p.cfg.Listener.Addr().String(), "kv-x"))
	publish(p, 2, 3)
	for i := range 3 {
		expect(t, all, "kv-events", uint64(2+i), 2+i)
		expect(t, same, "kv-events", uint64(2+i), 2+i)
	}
	if f, err := other.Frames(50 * time.Millisecond); err == nil {
		t.Errorf("another topic's subscriber got %d frames", len(f))
	}
	all.Close()
	same.Close()
	eventually(t, "the subscriber left", func() bool { return p.Status().Subscribers == 0 })
}

// TestReplay asks for batches in both layouts, from inside, before and behind the buffer.
func TestReplay(t *testing.T) {
	for name, old := range map[string]bool{"new layout": false, "old layout": true} {
		t.Run(name, func(t *testing.T) {
			p := start(t, Config{Topic: "t", Buffer: 6, OldReplay: old, Form: Form{Encoding: Maps}})
			publish(p, 0, 5)
			settled(t, p)
			d := must(t)(peer.Dealer(p.cfg.Replay.Addr().String()))
			check := func(from uint64, first, last int) {
				t.Helper()
				got, err := d.Replay(from)
				if err != nil || len(got) != last-first+2 {
					t.Fatalf("from %d: %d messages, %v", from, len(got), err)
				}
				for i, f := range got {
					seq, payload := f[len(f)-2], f[len(f)-1]
					if frames := map[bool]int{false: 3, true: 2}[old]; len(f) != frames {
						t.Fatalf("%d frames, want %d", len(f), frames)
					}
					if i == len(got)-1 {
						if len(payload) != 0 || !old && len(f[0]) != 0 {
							t.Errorf("end %q", f)
						}
						continue
					}
					if n := binary.BigEndian.Uint64(seq); n != uint64(first+i) || number(t, payload) != first+i || !old && string(f[0]) != "t" {
						t.Errorf("from %d: number %d, block %d, frames %q", from, n, number(t, payload), f)
					}
				}
			}
			check(0, 0, 4)
			check(3, 3, 4)
			check(99, 1, 0)
			publish(p, 5, 5) // 0 to 3 are beyond the buffer
			settled(t, p)
			check(0, 4, 9)
			// Engines ignore what is not a request.
			for _, bad := range [][][]byte{{[]byte("12345678")}, {nil, []byte("1")}, {nil, nil, make([]byte, 8)}} {
				if err := d.Send(bad...); err != nil {
					t.Fatal(err)
				}
			}
			check(9, 9, 9)
		})
	}
}
