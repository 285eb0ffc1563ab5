package dispatch

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// setLimits sets the limits of a handler's workers, in their order.
func setLimits(h *harness, limits ...int) []*pool.Worker {
	h.adopt() // else its settings come later
	var workers []*pool.Worker
	for i, up := range h.ReverseProxy.Upstreams {
		w := h.pool.Worker(up.Dial)
		w.Slots.Limit.Store(int64(limits[i]))
		workers = append(workers, w)
	}
	return workers
}

// TestSlotIsReturnedHoweverTheAttemptEnds ends attempts more than once.
func TestSlotIsReturnedHoweverTheAttemptEnds(t *testing.T) {
	h := testHandler(t, "a:1")
	w := setLimits(h, 2)[0]
	one, _ := plannedDispatch(t, h, 10)
	two, _ := plannedDispatch(t, h, 10)
	for i, d := range []*Dispatch{one, two} {
		if up := d.Select(context.Background(), h.ReverseProxy.Upstreams); up != h.ReverseProxy.Upstreams[0] {
			t.Fatalf("got %v", up)
		}
		if n := w.Slots.Running.Load(); n != int64(i+1) {
			t.Errorf("%d slots are taken, want %d", n, i+1)
		}
	}
	one.endAttempt(false)
	one.endAttempt(false)
	one.End()
	if n := w.Slots.Running.Load(); n != 1 {
		t.Errorf("%d slots are taken after one has ended, want 1", n)
	}
	two.End()
	if n := w.Slots.Running.Load(); n != 0 {
		t.Errorf("%d slots are taken after both have ended", n)
	}
}

// TestNewcomersDoNotOvertake frees a slot and sends a new request before the queued request
// gets the slot.
func TestNewcomersDoNotOvertake(t *testing.T) {
	h := testHandler(t, "a:1")
	w := setLimits(h, 1)[0]
	w.Slots.Take()
	first := newTestDispatch(h, &plan.Plan{Wishes: plan.Wishes{Ext: &plan.NoExt}, Handling: plan.Handling{Computes: true}})
	first.offered = h.ReverseProxy.Upstreams
	granted := make(chan *pool.Worker, 1)
	go func() {
		g, _ := h.pool.Wait(t.Context(), first.wants(), first.offers(), time.Minute)
		granted <- g.Worker
	}()
	for h.pool.Queue.Length.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	d, _ := plannedDispatch(t, h, 10)
	w.Slots.Running.Add(-1)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if up := d.Select(ctx, h.ReverseProxy.Upstreams); up != noUpstream {
		t.Errorf("the newcomer got %v", up)
	}
	d.End()
	if got := <-granted; got != w {
		t.Errorf("the request that waited got %v", got)
	}
	h.pool.FreeSlot(w)
	if n := w.Slots.Running.Load(); n != 0 || h.pool.Queue.Length.Load() != 0 {
		t.Errorf("%d running at the end", n)
	}
}

// TestGrantedSlotIsReturned has a slot granted to a request that then cannot
// or need not use it.
func TestGrantedSlotIsReturned(t *testing.T) {
	h := testHandler(t, "a:1", "b:1")
	workers := setLimits(h, 1, 1)
	ups := h.ReverseProxy.Upstreams
	for _, v := range []struct {
		name    string
		prepare func(d *Dispatch)
		want    int // position of the worker, -1 if none
	}{
		{"Used", func(*Dispatch) { workers[1].Slots.Take() }, 0},
		{"MarkedDown", func(*Dispatch) { workers[0].Health.Fail(time.Now(), time.Now(), 0, false) }, 0},
		{"Tried", func(d *Dispatch) { d.tried = append(d.tried, workers[0]) }, 1},
		{"NeverAsked", nil, -1},
	} {
		t.Run(v.name, func(t *testing.T) {
			d, _ := plannedDispatch(t, h, 10)
			workers[0].Slots.Take()
			d.wait.granted = workers[0]
			if v.prepare != nil {
				v.prepare(d)
				if up := d.Select(context.Background(), ups); up != ups[v.want] {
					t.Errorf("got %v, want %v", up, ups[v.want])
				}
			}
			for i, w := range workers {
				if n := w.Slots.Running.Load(); v.want >= 0 && n != 1 && i == v.want {
					t.Errorf("%s has %d slots taken, want 1", w.Dial, n)
				}
			}
			d.End()
			for _, w := range workers {
				w.Health = pool.Health{}
			}
			if v.name == "Used" {
				workers[1].Slots.Running.Add(-1)
			}
			for _, w := range workers {
				if n := w.Slots.Running.Load(); n != 0 {
					t.Errorf("%s has %d slots taken at the end", w.Dial, n)
				}
			}
		})
	}
}

// TestFullQueueRejectsNoHeldAnswer fills the queue. A request with a held answer gets that,
// so it must not count as rejected.
func TestFullQueueRejectsNoHeldAnswer(t *testing.T) {
	h := testHandler(t, "a:1", "b:1")
	ups := h.ReverseProxy.Upstreams
	workers := setLimits(h, 1, 1)
	for _, w := range workers {
		w.Slots.Take()
	}
	full := *h.pool.Settings.Load()
	full.MaxWaiting = 0
	h.pool.Settings.Store(&full)
	for _, held := range []bool{false, true} {
		d, _ := plannedDispatch(t, h, 10)
		want := noUpstream
		if held {
			d.held = heldAnswer{
				&http.Response{StatusCode: http.StatusServiceUnavailable, Header: http.Header{}, Body: http.NoBody},
				&attempt{Attempt: pool.Attempt{Worker: workers[0], Target: workers[0].Target(0)}},
			}
			d.tried, d.last, want = append(d.tried, workers[0]), ups[0], ups[0]
		}
		if up := d.Select(t.Context(), ups); up != want || !d.exhausted {
			t.Errorf("held %v: got %v", held, up)
		}
		if rejected := d.wait.turnedAway != nil; rejected == held {
			t.Errorf("held %v: rejected %v", held, rejected)
		}
		if resp, err := d.giveUp(); (resp != nil) != held || (err == nil) != held {
			t.Errorf("held %v: an answer %v, error %v", held, resp != nil, err)
		}
		if r := d.End(); r.TurnedAway == held {
			t.Errorf("held %v: the report says rejected %v", held, r.TurnedAway)
		}
	}
}

// BenchmarkChoose chooses and books a worker out of four, and ends that.
func BenchmarkChoose(b *testing.B) {
	for _, limit := range []int{0, 256} {
		b.Run(fmt.Sprintf("max_running=%d", limit), func(b *testing.B) {
			h := benchHandler(b)
			var ups reverseproxy.UpstreamPool
			for i := range 4 {
				ups = append(ups, &reverseproxy.Upstream{Dial: fmt.Sprintf("127.0.0.1:%d", i+1)})
			}
			h.ReverseProxy.Upstreams = ups
			setLimits(h, limit, limit, limit, limit)
			h.policy = &passThroughPolicy
			r := httptest.NewRequest(http.MethodPost, "/v1/chat/completions", bytes.NewReader(chatBody(b, 1<<10, true)))
			p, err := h.reader.Read(r)
			if err != nil {
				b.Fatal(err)
			}
			p.Score.Blocks = nil // the cache model is not what is measured
			b.ReportAllocs()
			for b.Loop() {
				d := newTestDispatch(h, p)
				if d.Select(b.Context(), ups) == nil {
					b.Fatal("no worker")
				}
				d.End()
			}
		})
	}
}
