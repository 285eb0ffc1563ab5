package dispatch

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/discovery"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// newTestDispatch returns a dispatch of the plan as Begin makes it, without a
// request behind it. All tests that need such a dispatch use this constructor.
func newTestDispatch(h *harness, p *plan.Plan) *Dispatch {
	if p.HTTP == nil {
		p.HTTP = httptest.NewRequest(http.MethodPost, "/", http.NoBody)
	}
	d := &Dispatch{route: testDispatcher(h).routeOf(p), start: time.Now(), cached: -1}
	d.tried, d.split.Of = d.triedBuf[:0], d
	d.Call = attempt.Call{Runner: &d.route.Runner, Owner: d, Plan: p, Ready: d.ready}
	_ = d.Sessions.Enter(context.Background(), &d.turn, p, false)
	return d
}

// newTestAttempt returns a dispatch that owns the plan's body, with an attempt on the
// worker's first rank.
func newTestAttempt(h *harness, p *plan.Plan, w *worker.Worker) *Dispatch {
	d := newTestDispatch(h, p)
	d.Body = p.Body
	d.attempt = newTestTry(d, w)
	return d
}

// plannedDispatch plans a chat of about size bytes, and returns the memory that its
// body takes.
func plannedDispatch(t *testing.T, h *harness, size int) (*Dispatch, int64) {
	t.Helper()
	body := []byte(`{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("x", size) + `"}]}`)
	r := httptest.NewRequest(http.MethodPost, "/v1/chat/completions", bytes.NewReader(body))
	r = r.WithContext(context.WithValue(r.Context(), caddy.ReplacerCtxKey, caddy.NewReplacer()))
	h.adopt()
	p, err := h.reader.Read(r)
	if err != nil {
		t.Fatal(err)
	}
	d, err := testDispatcher(h).Begin(p, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if d.Body == nil {
		return d, 0
	}
	return d, int64(cap(d.Body.Buffer.Data))
}

// newTestTry returns an attempt on the worker's first rank, which has no lease.
func newTestTry(d *Dispatch, w *worker.Worker) *attempt.Attempt {
	a := &attempt.Attempt{Seat: pool.Seat{Attempt: worker.Attempt{Worker: w}, Target: w.Target(0)}}
	a.Call = &d.Call
	return a
}

// harness is a configuration as requests know it: a dispatcher, what reads its requests,
// and its pool.
type harness struct {
	ReverseProxy *reverseproxy.Handler
	pool         *pool.Pool
	settings     *pool.Settings
	policy       kvscore.Policy // may be changed until the first request
	reader       *plan.Reader
	dispatcher   *Dispatcher
	adopted      bool
}

// testHandler returns a harness with workers at these addresses.
func testHandler(t testing.TB, dials ...string) *harness {
	t.Helper()
	h := &harness{ReverseProxy: new(reverseproxy.Handler), settings: wantedWorkers(), policy: &passThroughPolicy}
	for _, d := range dials {
		h.ReverseProxy.Upstreams = append(h.ReverseProxy.Upstreams, &reverseproxy.Upstream{Dial: d, Host: new(reverseproxy.Host)})
		h.settings.Upstreams[d] = true
	}
	h.pool = testPool(t, h.settings)
	h.dispatcher = &Dispatcher{
		Runner: attempt.Runner{Pool: h.pool, Logger: zap.NewNop()}, Proxy: h.ReverseProxy, Policy: h.policy, FollowUps: noFollowUps,
		Prober: discovery.New(t.Context(), h.pool, h.ReverseProxy, nil, zap.NewNop()),
		Series: NewSeries("d"), Sessions: &turn.Sessions{Pool: h.pool, Failed: func() {}},
	}
	h.reader = &plan.Reader{
		MaxBody: 64 << 20, Grants: func(*http.Request) nvext.Grants { return 0 },
		Memory: &h.pool.Memory, Ratios: &h.pool.Ratios, Hashing: h.pool.Hashing, Adapter: h.pool.Adapter,
		Lists: h.pool.Lists, Keeps: h.pool.Responses.Keeps,
		TakesTokens: func(string) bool { return true }, Canonical: func(model string) string { return model }, OnlyModel: func() string { return "" }, TTL: func() time.Duration { return time.Minute },
		Waiting: func() uint64 { return 0 }, Transfers: h.pool.Transfers,
	}
	return h
}

// adopt has the pool take over the harness's settings, once.
func (h *harness) adopt() {
	if !h.adopted {
		h.adopted = true
		h.pool.Apply(h.settings.WithDefaults())
	}
}

// testDispatcher returns the harness's dispatcher.
func testDispatcher(h *harness) *Dispatcher {
	if h.dispatcher.Policy != h.policy { // written only if it was changed: dispatches read it
		h.dispatcher.Policy = h.policy
	}
	return h.dispatcher
}

// noFollowUps makes no requests of the router's own.
func noFollowUps(*attempt.Attempt, bool, *http.Response) FollowUp { return nil }

// testPool opens a pool of its own.
func testPool(t testing.TB, s *pool.Settings) *pool.Pool {
	t.Helper()
	p, err := pool.New("test", s.WithDefaults(), turn.NewCloser)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Destruct() })
	return p
}

// wantedWorkers returns the settings of a pool with these workers.
func wantedWorkers(workers ...worker.Settings) *pool.Settings {
	s := &pool.Settings{Workers: make(map[string]worker.Settings), Upstreams: make(map[string]bool)}
	for _, w := range workers {
		s.Workers[w.Dial] = w
		s.Upstreams[w.Dial] = true
	}
	return s
}

// TestDryChoiceOfAnUnknownUpstream has an upstream that the pool does not know: each
// look-up would make another worker of it.
func TestDryChoiceOfAnUnknownUpstream(t *testing.T) {
	for name, p := range map[string]*plan.Plan{
		"free":   {Hints: plan.Hints{Ext: &plan.NoExt}},
		"pinned": {Hints: plan.Hints{Ext: &plan.NoExt}, Pin: plan.Pin{Named: true, Worker: worker.DerivedID("new:1"), Field: "x"}},
	} {
		t.Run(name, func(t *testing.T) {
			p.HTTP = httptest.NewRequest(http.MethodGet, "/", nil)
			h := testHandler(t, "a:1")
			h.ReverseProxy.Upstreams = upstreamsOf("a:1", "new:1")
			c := testDispatcher(h).Explain(p)
			if c.Refused != nil {
				t.Fatalf("refused: %+v", c.Refused)
			}
			seen := make(map[string]int)
			for _, w := range c.Workers {
				seen[w.Dial]++
			}
			for _, l := range c.LeftOut {
				seen[l.Dial]++
			}
			if seen["a:1"] != 1 || seen["new:1"] != 1 {
				t.Errorf("candidates and left out: %v, want each worker once", seen)
			}
			if h.pool.Known("new:1") != nil {
				t.Error("the pool knows it now")
			}
		})
	}
}

// TestPreference follows Dynamo's rule and its range.
func TestPreference(t *testing.T) {
	for sum, want := range map[float64]string{0: "1.000", 1: "0.467", -1: "2.142", 1e9: "0.368", -1e9: "2.718"} {
		if got := fmt.Sprintf("%.3f", preference(sum)); got != want {
			t.Errorf("taints that weigh %v: %s, want %s", sum, got, want)
		}
	}
}

// tracedDispatch is a dispatch whose worker is chosen, and its request.
func tracedDispatch(tb testing.TB, ctx context.Context) (*Dispatch, *http.Request) {
	tb.Helper()
	h := testHandler(tb, "127.0.0.1:1")
	p := &plan.Plan{Model: "m", Hints: plan.Hints{Ext: &plan.NoExt}}
	d := newTestDispatch(h, p)
	if d.Select(ctx, h.ReverseProxy.Upstreams) == nil {
		tb.Fatal("no worker")
	}
	req := httptest.NewRequestWithContext(ctx, http.MethodPost, "/v1/chat/completions", http.NoBody)
	req.Header.Set("Traceparent", "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01")
	return d, req
}

var ended = &Report{Outcome: outcomeOK}

// walk does for a request all that tracing does.
func (d *Dispatch) walk(req *http.Request) {
	_, d.Trace = attempt.StartTrace(req.Context(), d.plan, d.Pool.Name, d.start)
	d.Trace.Selected(d.attempt)
	d.Sent = d.attempt.Build(req)
	d.Trace.Event("retry", d.attempt, [2]string{"reason", "broken"})
	ended.trace(d.Trace)
}

// TestUntracedRequestsCostNoAllocation has a request whose Caddy does not trace.
func TestUntracedRequestsCostNoAllocation(t *testing.T) {
	d, req := tracedDispatch(t, t.Context())
	untraced := testing.AllocsPerRun(100, func() { d.walk(req) })
	without := testing.AllocsPerRun(100, func() { d.Sent = d.attempt.Build(req) })
	if untraced != without || d.Trace != nil {
		t.Errorf("%v allocations for a request that is not traced, %v without the calls", untraced, without)
	}
}

func upstreamsOf(dials ...string) (list reverseproxy.UpstreamPool) {
	for _, dial := range dials {
		list = append(list, &reverseproxy.Upstream{Dial: dial, Host: new(reverseproxy.Host)})
	}
	return list
}
