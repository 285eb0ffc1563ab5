package dispatch

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/split"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// newTestDispatch returns a dispatch of the plan as Begin makes it, without a
// request behind it. All tests that need such a dispatch use this constructor.
func newTestDispatch(h *harness, p *plan.Plan) *Dispatch {
	d := &Dispatch{route: route{Dispatcher: testDispatcher(h), plan: p}, start: time.Now(), result: result{cached: -1}}
	d.ready, d.tried = d.start, d.triedBuf[:0]
	d.split = split.Request{Pool: h.pool, Plan: p, Of: d}
	d.Call = attempt.Call{Runner: &d.route.Runner, Owner: d, Plan: p, Ready: d.ready}
	if p != nil {
		_ = d.Sessions.Enter(context.Background(), &d.turn, p, false)
	}
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

// newTestTry returns an attempt on the worker's first rank, which has no lease.
func newTestTry(d *Dispatch, w *worker.Worker) *attempt.Attempt {
	a := &attempt.Attempt{Seat: pool.Seat{Attempt: worker.Attempt{Worker: w}, Target: w.Target(0)}}
	a.Seated(&d.Call)
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
	m := AllMetrics()
	h.dispatcher = &Dispatcher{
		Runner: attempt.Runner{Pool: h.pool, Logger: zap.NewNop()}, Proxy: h.ReverseProxy, Policy: h.policy, FollowUps: noFollowUps{}, Probes: noProbes{},
		Metrics: m, PoolMetrics: m.Of("test"), Sessions: &turn.Sessions{Pool: h.pool, Failed: func() {}},
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

// noProbes asks no worker anything.
type noProbes struct{}

func (noProbes) Discovered(*worker.Worker) {}
func (noProbes) AskAgain(*worker.Worker)   {}

// noFollowUps makes no requests of the router's own.
type noFollowUps struct{}

func (noFollowUps) Answering(Answering, *http.Response) FollowUp { return nil }

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
