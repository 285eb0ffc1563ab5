package events

import (
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
)

// until polls for a condition.
func until(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !condition(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within 30 s: %s", what)
		}
	}
}

// noLeaks checks at the test's end that goroutines have ended.
func noLeaks(t *testing.T) {
	t.Helper()
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		for end := time.Now().Add(5 * time.Second); runtime.NumGoroutine() > before; time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				stacks := make([]byte, 1<<20)
				t.Fatalf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), before, stacks[:runtime.Stack(stacks, true)])
			}
		}
	})
}

// has returns whether the sink holds batches from first to last, in a state.
func (j *journal) has(first, last int, s State, complete bool) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	n := len(j.since)
	return n == last-first+1 && (n == 0 || j.since[0].seq == uint64(first)) && j.state == s && j.complete == complete
}

// listening returns a stream that listens at a real endpoint, and how its publisher connects.
func listening(t *testing.T, endpoint string) (r *rig, connect func(*publisher)) {
	t.Helper()
	noLeaks(t)
	if endpoint == "" {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		endpoint = "tcp://" + l.Addr().String()
		_ = l.Close()
	}
	p := newPublisher()
	r = newRig(t, p, Config{Endpoint: endpoint, Listen: true, Replay: replayEndpoint, Dial: p.dial})
	t.Cleanup(func() { r.stop(); p.disconnect() })
	network, address, _ := strings.Cut(endpoint, "://")
	if network == "ipc" {
		network = "unix"
	}
	return r, func(p *publisher) {
		t.Helper()
		until(t, "the stream listens", func() bool {
			nc, err := net.Dial(network, address)
			if err != nil {
				return false
			}
			p.set(func() { p.serveSub(nc) })
			return true
		})
	}
}

func TestListen(t *testing.T) {
	for _, endpoint := range []string{"", "ipc://" + filepath.Join(t.TempDir(), "s")} {
		t.Run(endpoint, func(t *testing.T) {
			r, connect := listening(t, endpoint)
			r.publishN(5)
			connect(r.publisher)
			until(t, "the replay is done", func() bool { return r.has(0, 4, Live, true) })
			r.publishN(2)
			until(t, "live batches come", func() bool { return r.has(0, 6, Live, true) })

			r.restart()
			r.disconnect()
			until(t, "the loss is seen", func() bool { return r.has(0, 6, Gap, false) })
			r.publishN(1)
			connect(r.publisher)
			until(t, "the new life is there", func() bool { return r.has(0, 0, Live, true) })
			if st := r.s.Status(); st.Reconnects != 1 || !st.Connected {
				t.Errorf("status %+v", st)
			}
		})
	}
}

// TestNewerConnectionCounts connects again while the older connection still stands.
func TestNewerConnectionCounts(t *testing.T) {
	r, connect := listening(t, "")
	r.publishN(5)
	connect(r.publisher)
	until(t, "the replay is done", func() bool { return r.has(0, 4, Live, true) })
	second := newPublisher()
	connect(second)
	until(t, "the older connection is closed", func() bool {
		r.publisher.mu.Lock()
		defer r.publisher.mu.Unlock()
		return len(r.subs) == 0
	})
	until(t, "it is live again", func() bool { return r.has(0, 4, Live, true) })
	r.publish(true) // to the replay buffer of the first, which answers for both
	second.set(func() { second.next = 6 })
	second.publish(false)
	until(t, "a batch comes over the newer connection", func() bool { return r.has(0, 6, Live, true) || r.has(6, 6, Untrusted, false) })
	second.disconnect()
}

// TestTwoPublishersDial has two publishers that reconnect whenever the other one displaces
// them.
func TestTwoPublishersDial(t *testing.T) {
	r, connect := listening(t, "")
	second := newPublisher()
	for range 10 {
		connect(r.publisher)
		connect(second)
		time.Sleep(20 * time.Millisecond)
	}
	until(t, "the stream gives up on them", func() bool { return r.has(0, -1, Untrusted, false) })
	if st := r.s.Status(); !strings.Contains(st.Err, "two publishers") {
		t.Errorf("status %+v", st)
	}
	second.disconnect()
}

func TestListenStrangers(t *testing.T) {
	r, connect := listening(t, "")
	address := strings.TrimPrefix(r.s.cfg.Endpoint, "tcp://")
	until(t, "the stream listens", func() bool {
		nc, err := net.Dial("tcp", address)
		if err != nil {
			return false
		}
		_, _ = io.WriteString(nc, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"+strings.Repeat(" ", 64))
		_ = nc.Close()
		return true
	})
	var silent []net.Conn
	for range maxHandshakes - 1 { // connections that never speak leave a place free
		nc, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		silent = append(silent, nc)
	}
	until(t, "the log has the stranger", func() bool { return r.logs.FilterMessageSnippet("degraded").Len() == 1 })
	r.publishN(3)
	connect(r.publisher)
	until(t, "the publisher is followed", func() bool { return r.has(0, 2, Live, true) })
	for _, nc := range silent {
		_ = nc.Close()
	}
}

func TestListenAddressInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	r, connect := listening(t, "tcp://"+l.Addr().String())
	until(t, "the error shows", func() bool { return strings.Contains(r.s.Status().Err, "address already in use") })
	_ = l.Close()
	connect(r.publisher)
	until(t, "the stream listens when the address is free", func() bool { return r.has(0, -1, Live, true) })
}

func TestStopListening(t *testing.T) {
	r, _ := listening(t, "")
	until(t, "the stream listens", func() bool {
		nc, err := net.Dial("tcp", strings.TrimPrefix(r.s.cfg.Endpoint, "tcp://"))
		if err == nil {
			t.Cleanup(func() { _ = nc.Close() }) // in the middle of a handshake
		}
		return err == nil
	})
	start := time.Now()
	r.stop()
	if d := time.Since(start); d > 3*time.Second {
		t.Errorf("it took %v", d)
	}
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", strings.TrimPrefix(r.s.cfg.Endpoint, "tcp://"))
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
}

// TestDoor drives the door by hand: publishers that arrive while the stream is busy, and a
// listener that fails.
func TestDoor(t *testing.T) {
	noLeaks(t)
	s, err := New(Config{Endpoint: "tcp://127.0.0.1:0", Listen: true}, &journal{t: t}, zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	d := newDoor(s)
	p := newPublisher()
	if err := d.listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	arrive := func() {
		t.Helper()
		nc, err := net.Dial("tcp", d.l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		p.set(func() { p.serveSub(nc) })
		<-d.arrived
	}
	arrive()
	arrive() // displaces the first
	until(t, "the first connection is closed", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return len(p.subs) == 1
	})
	f, err := d.next(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_ = f.stop()
	_ = d.l.Close()
	if _, err := d.next(t.Context()); !errors.Is(err, net.ErrClosed) {
		t.Errorf("a failed listener gave %v", err)
	}
	if err := d.listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-d.arrived // the failure's
	arrive()
	d.close() // with a connection that nobody has taken
	until(t, "that connection is closed", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return len(p.subs) == 0
	})
}
