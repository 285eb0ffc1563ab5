package pool

import (
	"net"
	"testing"
	"time"
)

// TestListenersFollowEachOther begins streams that listen while earlier ones have not ended.
// Both may listen at the same endpoint.
func TestListenersFollowEachOther(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	_ = l.Close()
	p := testPool(t, wanted(WorkerSettings{Dial: "a:1"}))
	w, earlier := p.Worker("a:1"), make(chan struct{})
	func() {
		w.events.mu.Lock()
		defer w.events.mu.Unlock()
		w.events.ended = earlier
		w.events.from = []publisher{{endpoint: "tcp://" + addr, listen: true}}
		p.subscribe(w, &w.events)
	}()
	time.Sleep(100 * time.Millisecond)
	if l, err = net.Listen("tcp", addr); err != nil {
		t.Fatalf("the router listens before the earlier streams have ended: %v", err)
	}
	_ = l.Close()
	close(earlier)
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		nc, err := net.Dial("tcp", addr)
		if err == nil {
			_ = nc.Close()
			return
		}
		if time.Now().After(end) {
			t.Fatalf("the router does not listen after the earlier streams have ended: %v", err)
		}
	}
}
