package dispatch

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

func upstreamsOf(dials ...string) (list reverseproxy.UpstreamPool) {
	for _, dial := range dials {
		list = append(list, &reverseproxy.Upstream{Dial: dial, Host: new(reverseproxy.Host)})
	}
	return list
}

// TestTableHoldsUntilWorkersChange looks the same list up again and again, and
// changes what is behind it in between.
func TestTableHoldsUntilWorkersChange(t *testing.T) {
	h := testHandler(t, "a:1", "b:1", "a:1")
	d, list := newTestDispatch(h, &plan.Plan{Wishes: plan.Wishes{Ext: &plan.NoExt}}), h.ReverseProxy.Upstreams
	ranked := func(id uint64, ranks int) pool.WorkerSettings {
		return pool.WorkerSettings{Dial: "a:1", ID: id, Engine: "vllm", DPSize: ranks}
	}
	last := d.table(list)
	for _, v := range []struct {
		what   string
		change func()
		kept   bool
	}{
		{"nothing", func() {}, true},
		{"a drain", func() { h.pool.Worker("a:1").Drain.Or(pool.DrainAsked) }, true},
		{"another worker", func() { h.pool.Worker("c:1") }, false},
		{"an id and ranks", func() { h.pool.Apply(wantedWorkers(ranked(7, 2)).WithDefaults()) }, false},
		{"ranks", func() { h.pool.Apply(wantedWorkers(ranked(7, 4)).WithDefaults()) }, false},
		{"nothing that is seen here", func() { h.pool.Apply(wantedWorkers(ranked(7, 4)).WithDefaults()) }, true},
		{"a worker that goes", func() {
			h.pool.Mu.Lock()
			defer h.pool.Mu.Unlock()
			h.pool.Drop(h.pool.Workers["b:1"])
		}, false},
		{"a list of the same addresses", func() { list = upstreamsOf("a:1", "b:1", "a:1") }, true},
		{"another list", func() { list = upstreamsOf("b:1", "a:1", "a:1") }, false},
	} {
		v.change()
		tab := d.table(list)
		if (tab == last) != v.kept {
			t.Errorf("after %s: kept %v, want %v", v.what, tab == last, v.kept)
		}
		for i, up := range list {
			row := tab.Rows[i]
			if w := h.pool.Worker(up.Dial); row.Worker != w || len(row.Targets) != w.Ranks() {
				t.Fatalf("after %s: %s is worker %d with %d ranks, want %d with %d",
					v.what, up.Dial, row.Worker.ID, len(row.Targets), w.ID, w.Ranks())
			}
			for rank, target := range row.Targets {
				if target.Target != row.Worker.Target(rank) {
					t.Errorf("after %s: rank %d of %s is %s", v.what, rank, up.Dial, target)
				}
			}
			if row.Repeated != (i == 2) {
				t.Errorf("after %s: %s at %d: again is %v", v.what, up.Dial, i, row.Repeated)
			}
		}
		last = d.table(list) // the first may have made workers known, which makes it void
	}
	d.takeScratch()
	if _, found := d.gather(list, time.Now()); !found || len(d.scratch.Workers) != 1+4 && len(d.scratch.Workers) != 1 {
		t.Errorf("%d candidates", len(d.scratch.Workers))
	}
}

// TestTablesHeedNewModels changes the models of workers after the table was made. Requests
// go to the workers that serve their model now, and the table stays.
func TestTablesHeedNewModels(t *testing.T) {
	h := testHandler(t, "a:1", "b:1", "c:1")
	list := h.ReverseProxy.Upstreams
	serve := func(dial string, models ...string) {
		ids := make(map[string]bool)
		for _, m := range models {
			ids[m] = true
		}
		h.pool.Worker(dial).Models.Store(&pool.ModelList{IDs: ids})
	}
	offered := func(model string) (dials string) {
		t.Helper()
		d := newTestDispatch(h, &plan.Plan{Wishes: plan.Wishes{Ext: &plan.NoExt}, Model: model})
		d.takeScratch()
		defer d.returnScratch()
		d.model = pool.ModelAmong(d.table(list).Rows, d.wants().Model)
		d.gather(list, time.Now())
		for _, w := range d.scratch.Workers {
			dials += w.Dial[:1]
		}
		return dials
	}
	want := func(model, dials string) {
		t.Helper()
		for range 2 {
			if got := offered(model); got != dials {
				t.Errorf("%s: offered %s, want %s", model, got, dials)
			}
		}
	}
	want("x", "abc") // nobody tells
	tab := h.dispatcher.lastTable.Load()
	serve("a:1", "x", "y")
	serve("b:1", "x")
	want("x", "ab")
	want("y", "a")
	want("z", "abc")
	serve("b:1", "y", "x")
	want("y", "ab")
	h.pool.Worker("c:1").Configured.Store(&map[string]bool{"y": true})
	serve("a:1", "x")
	want("y", "bc")
	want("x", "ab")
	h.pool.Worker("b:1").Models.Store(nil)
	want("x", "a")
	if h.dispatcher.lastTable.Load() != tab {
		t.Error("other models made another table")
	}
}

// TestListChangedInPlaceGetsItsOwnTable has a source return one array each time,
// with other upstreams in it.
func TestListChangedInPlaceGetsItsOwnTable(t *testing.T) {
	h := testHandler(t, "a:1", "b:1")
	list := upstreamsOf("a:1", "b:1")
	for _, up := range append(upstreamsOf("c:1"), list[1]) {
		for range 4 { // the first may make workers known, which makes the table void
			d := newTestDispatch(h, &plan.Plan{Wishes: plan.Wishes{Ext: &plan.NoExt}})
			chosen := d.Select(t.Context(), list)
			if booked := d.attempt.Worker.Dial; chosen.Dial != booked {
				t.Errorf("sent to %s, booked on %s", chosen.Dial, booked)
			}
			d.endAttempt(false)
		}
		list[1] = up
	}
}

// TestTablesOfPlaceholdersAreNotKept: their addresses stand for another worker
// with each request.
func TestTablesOfPlaceholdersAreNotKept(t *testing.T) {
	h := testHandler(t, "a:1", "{up}")
	for i := range 3 {
		repl := caddy.NewEmptyReplacer()
		repl.Set("up", fmt.Sprintf("b:%d", i+1))
		d := newTestDispatch(h, nil)
		d.repl = repl
		if got := d.table(h.ReverseProxy.Upstreams).Rows[1].Worker.Dial; got != fmt.Sprintf("b:%d", i+1) {
			t.Errorf("request %d is offered %s", i, got)
		}
	}
}

// TestExplainingMakesNoWorkerKnown has a table made for an explanation: the next
// request must not be given workers that nobody knows.
func TestExplainingMakesNoWorkerKnown(t *testing.T) {
	h := testHandler(t, "a:1")
	list := upstreamsOf("new:1")
	dry := newTestDispatch(h, nil)
	dry.dry = true
	dry.table(list)
	if h.pool.Known("new:1") != nil {
		t.Error("it is known")
	}
	if w := newTestDispatch(h, nil).table(list).Rows[0].Worker; w != h.pool.Known("new:1") {
		t.Error("a request is offered a worker that is not the pool's")
	}
}

// TestWorkersChangeWhileRequestsChoose changes ids and ranks of workers, drains, adds and
// removes workers while requests choose among them. The lists are static and dynamic.
func TestWorkersChangeWhileRequestsChoose(t *testing.T) {
	const workers = 12
	var dials []string
	for i := range workers {
		dials = append(dials, fmt.Sprintf("127.0.0.1:%d", i+1))
	}
	h := testHandler(t, dials...)
	h.policy = kvscore.NewDynamo()
	r := httptest.NewRequest(http.MethodPost, "/v1/chat/completions", bytes.NewReader([]byte(`{"model":"m","messages":[{"role":"user","content":"hello"}]}`)))
	p, err := h.reader.Read(r)
	if err != nil {
		t.Fatal(err)
	}
	p.Model = ""
	dispatcher := testDispatcher(h)
	var choosing, changing sync.WaitGroup
	stop := make(chan struct{})
	changing.Go(func() {
		for n := uint64(1); ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			var set []pool.WorkerSettings
			for i, dial := range dials {
				if rand.IntN(4) > 0 {
					set = append(set, pool.WorkerSettings{Dial: dial, ID: uint64(i+1) + n/4%3, Engine: "vllm", DPSize: 1 + rand.IntN(3), Drain: new(rand.IntN(4) == 0)})
				}
			}
			h.pool.Apply(wantedWorkers(set...).WithDefaults())
			for _, w := range h.pool.All() {
				if rand.IntN(4) == 0 {
					h.pool.Mu.Lock()
					if h.pool.Workers[w.Dial] == w {
						h.pool.Drop(w)
					}
					h.pool.Mu.Unlock()
				}
			}
		}
	})
	for g := range 4 {
		choosing.Go(func() {
			for range 300 {
				list := h.ReverseProxy.Upstreams
				if g%2 == 1 {
					list = upstreamsOf(dials[rand.IntN(workers/2):]...)
				}
				d := &Dispatch{Dispatcher: dispatcher, plan: p, start: time.Now(), result: result{cached: -1}}
				d.turn, _ = dispatcher.Sessions.Enter(t.Context(), p, false)
				if up := d.Select(t.Context(), list); up == nil || up == noUpstream || d.attempt.Worker.Dial != up.Dial || d.attempt.lease.Target() != d.attempt.Target {
					t.Errorf("chose %v, booked %+v", up, d.attempt)
				}
				d.endAttempt(true)
			}
		})
	}
	choosing.Wait()
	close(stop)
	changing.Wait()
	if s := h.pool.Scheduler.Stats(); s.Leases != 0 || s.PolicyFaults != 0 {
		t.Errorf("at the end: %+v", s)
	}
	d := newTestDispatch(h, p)
	for i, row := range d.table(h.ReverseProxy.Upstreams).Rows {
		if w := h.pool.Worker(dials[i]); row.Worker != w || len(row.Targets) != w.Ranks() {
			t.Errorf("%s: the table has another worker or other ranks", dials[i])
		} else if _, known := h.pool.Scheduler.Load(time.Now(), w.Target(0)); !known {
			t.Errorf("%s: worker %d has no books", dials[i], w.ID)
		}
	}
}

// doneProbe is a context that ends when somebody waits for its end.
type doneProbe struct {
	context.Context
	asked func()
}

func (p doneProbe) Done() <-chan struct{} {
	p.asked()
	ended := make(chan struct{})
	close(ended)
	return ended
}

// TestRequestsThatWaitHoldNoScratch: its buffers are as large as the pool.
func TestRequestsThatWaitHoldNoScratch(t *testing.T) {
	for name, prepare := range map[string]func(h *harness, d *Dispatch){
		"in the queue": func(h *harness, _ *Dispatch) {
			h.pool.Worker("a:1").Slots.Limit.Store(1)
			h.pool.Worker("a:1").Slots.Take()
		},
		"for lb_try_interval": func(h *harness, d *Dispatch) {
			testDispatcher(h).Limits.Retries, h.dispatcher.Limits.Interval = 3, time.Hour
			d.tried = []*pool.Worker{h.pool.Worker("a:1")}
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := testHandler(t, "a:1")
			d := newTestDispatch(h, &plan.Plan{Wishes: plan.Wishes{Ext: &plan.NoExt}, Handling: plan.Handling{Computes: true}})
			prepare(h, d)
			waits := false
			d.Select(doneProbe{t.Context(), func() {
				waits = true
				if d.scratch != nil {
					t.Error("it holds its scratch")
				}
			}}, h.ReverseProxy.Upstreams)
			if !waits {
				t.Error("it did not wait")
			}
		})
	}
}

// TestChoosingAllocatesAsMuchAmongMany chooses among few workers and many.
func TestChoosingAllocatesAsMuchAmongMany(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector empties pools at random")
	}
	count := func(n int) float64 {
		var dials []string
		for i := range n {
			dials = append(dials, fmt.Sprintf("127.0.0.1:%d", i+1))
		}
		h := testHandler(t, dials...)
		h.policy = kvscore.NewDynamo()
		p := &plan.Plan{Wishes: plan.Wishes{Ext: &plan.NoExt}, Prompt: plan.Prompt{Score: kvscore.Request{Tokens: 100, Streamed: true}}}
		return testing.AllocsPerRun(200, func() {
			d := newTestDispatch(h, p)
			if d.Select(t.Context(), h.ReverseProxy.Upstreams) == nil {
				t.Fatal("no worker")
			}
			d.endAttempt(true)
		})
	}
	if few, many := count(2), count(512); many > few+1 {
		t.Errorf("%v allocations among 512 workers, %v among 2", many, few)
	}
}

// TestLateBookingLeavesNothingOfAForgottenWorker drops a worker between a request's
// list of candidates and its booking.
func TestLateBookingLeavesNothingOfAForgottenWorker(t *testing.T) {
	h := testHandler(t, "a:1")
	d := newTestDispatch(h, &plan.Plan{Wishes: plan.Wishes{Ext: &plan.NoExt}})
	d.takeScratch()
	defer d.returnScratch()
	d.gather(h.ReverseProxy.Upstreams, time.Now())
	w := h.pool.Worker("a:1")
	h.pool.Mu.Lock()
	h.pool.Drop(w)
	h.pool.Mu.Unlock()
	d.book(time.Now())
	d.endAttempt(true)
	if _, known := h.pool.Scheduler.Load(time.Now(), w.Target(0)); known {
		t.Error("it still has books")
	}
}
