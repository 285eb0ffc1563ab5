package pool

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// closer is an engine that closes sessions one by one, when it may.
type closer struct {
	mu     sync.Mutex
	closed []string
	next   chan int // the status of the next answer
}

func (c *closer) Reaches(*Worker) bool { return true }

func (c *closer) Call(ctx context.Context, _ *Worker, _ string, body []byte) (int, []byte, error) {
	select {
	case status := <-c.next:
		c.mu.Lock()
		defer c.mu.Unlock()
		if status == 200 {
			c.closed = append(c.closed, strings.Trim(string(body[len(`{"session_id":`):len(body)-1]), `"`))
		}
		return status, nil, nil
	case <-ctx.Done():
		return 0, nil, ctx.Err()
	}
}

func (c *closer) said() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return strings.Join(c.closed, " ")
}

// closingPool returns a pool with a worker that closes sessions.
func closingPool(t *testing.T) (*Pool, *Worker, *closer) {
	t.Helper()
	p, err := New(t.Name(), new(Settings).WithDefaults(), nil)
	if err != nil {
		t.Fatal(err)
	}
	w, c := p.Worker("127.0.0.1:1"), &closer{next: make(chan int)}
	p.SetInfo(w, engine.Info{Type: engine.SGLang})
	p.Join(c)
	return p, w, c
}

func (p *Pool) closeOne(w *Worker, id string) {
	p.CloseSession(affinity.Want{Target: kvscore.Target{Worker: w.ID}, EngineSession: id})
}

// TestOpensWaitForCloses opens sessions anew that wait to be closed. They come next.
func TestOpensWaitForCloses(t *testing.T) {
	p, w, c := closingPool(t)
	for i := range 6 {
		p.closeOne(w, fmt.Sprint(i))
	}
	p.closeOne(w, "4") // twice
	soon, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := p.AwaitClosed(soon, w, "4"); err == nil {
		t.Error("it did not wait")
	}
	if err := p.AwaitClosed(t.Context(), w, "none"); err != nil {
		t.Error(err)
	}
	opened := make(chan string, 1)
	go func() {
		if err := p.AwaitClosed(t.Context(), w, "4"); err != nil {
			t.Error(err)
		}
		opened <- c.said()
	}()
	for range 7 {
		c.next <- 200
	}
	if said := <-opened; strings.Count(said, "4") != 2 {
		t.Errorf("opened after %s", said)
	}
	if err := p.Destruct(); err != nil || !strings.HasPrefix(c.said(), "0 4 ") || len(c.closed) != 7 {
		t.Errorf("%v after %s", err, c.said())
	}
}

// TestClosesAfterTheEnd ends a pool whose engine hangs. A session that ends later is closed
// all the same, with one try.
func TestClosesAfterTheEnd(t *testing.T) {
	p, w, c := closingPool(t)
	close(p.stop) // as Destruct does when it has waited
	for i := range 5 {
		p.closeOne(w, fmt.Sprint(i))
	}
	c.next <- 200
	c.next <- 500 // then the router gives up
	if err := p.AwaitClosed(t.Context(), w, "4"); err != nil {
		t.Error(err)
	}
	p.closeOne(w, "late")
	c.next <- 200
	if err := p.AwaitClosed(t.Context(), w, "late"); err != nil || c.said() != "0 late" {
		t.Errorf("%v after %s", err, c.said())
	}
	if err := p.Sessions.Close(); err != nil {
		t.Error(err)
	}
}

// TestPoolRemembersLostSessions loses more sessions than the pool remembers.
func TestPoolRemembersLostSessions(t *testing.T) {
	p, _, _ := closingPool(t)
	defer p.Destruct()
	key := func(i int) affinity.Key { return affinity.Key{byte(i), byte(i >> 8), byte(i >> 16), 1} }
	for i := range 3 * maxLost {
		p.lose(key(i))
	}
	known := []bool{}
	for _, i := range []int{0, maxLost - 1, 2 * maxLost, 3*maxLost - 1} {
		known = append(known, p.Lost(t.Context(), key(i)))
	}
	if !slices.Equal(known, []bool{false, false, true, true}) {
		t.Errorf("remembers %v", known)
	}
	if p.ForgetLost(key(3*maxLost - 1)); p.Lost(t.Context(), key(3*maxLost-1)) {
		t.Error("a session is lost although it was opened again")
	}
}
