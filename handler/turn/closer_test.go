package turn

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

// closingEngine is an engine that closes sessions one by one, when it may.
type closingEngine struct {
	mu     sync.Mutex
	closed []string
	next   chan int // the status of the next answer
}

func (c *closingEngine) Reaches(*worker.Worker) bool { return true }

func (c *closingEngine) Call(ctx context.Context, _ *worker.Worker, _ string, body []byte) (int, []byte, error) {
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

func (c *closingEngine) said() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return strings.Join(c.closed, " ")
}

// testPool returns a pool with a worker that closes sessions.
func testPool(t *testing.T) (*pool.Pool, *worker.Worker, *closingEngine) {
	t.Helper()
	p, err := pool.New(t.Name(), new(pool.Settings).WithDefaults(), NewCloser)
	if err != nil {
		t.Fatal(err)
	}
	w, e := p.Worker("127.0.0.1:1"), &closingEngine{next: make(chan int)}
	p.SetInfo(w, engine.Info{Type: engine.SGLang})
	p.Members.Join(e)
	return p, w, e
}

func (c *closer) closeOne(w *worker.Worker, id string) {
	c.Close(&affinity.Want{Target: w.Target(0), EngineSession: id})
}

// TestOpensWaitForCloses opens sessions anew that wait to be closed.
func TestOpensWaitForCloses(t *testing.T) {
	p, w, e := testPool(t)
	c := p.Closer.(*closer)
	for i := range 6 {
		c.closeOne(w, fmt.Sprint(i))
	}
	c.closeOne(w, "4") // twice
	soon, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := c.Await(soon, w, "4"); err == nil {
		t.Error("it did not wait")
	}
	if err := c.Await(t.Context(), w, "none"); err != nil {
		t.Error(err)
	}
	opened := make(chan string, 1)
	go func() {
		if err := c.Await(t.Context(), w, "4"); err != nil {
			t.Error(err)
		}
		opened <- e.said()
	}()
	for range 7 {
		e.next <- 200
	}
	if said := <-opened; said != "0 1 2 3 4 5 4" {
		t.Errorf("opened after %s", said)
	}
	if err := p.Destruct(); err != nil {
		t.Error(err)
	}
}

// TestClosesAfterTheEnd ends a pool whose engine hangs. A session that ends later is closed
// all the same, with one try.
func TestClosesAfterTheEnd(t *testing.T) {
	p, w, e := testPool(t)
	c := p.Closer.(*closer)
	if err := p.Destruct(); err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		c.closeOne(w, fmt.Sprint(i))
	}
	e.next <- 200
	e.next <- 500 // then the router gives up
	if err := c.Await(t.Context(), w, "4"); err != nil {
		t.Error(err)
	}
	c.closeOne(w, "late")
	e.next <- 200
	if err := c.Await(t.Context(), w, "late"); err != nil || e.said() != "0 late" {
		t.Errorf("%v after %s", err, e.said())
	}
}
