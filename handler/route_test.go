package handler

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// newTestRoute returns a route of the plan as begin makes it, without a
// request behind it. All tests that need such a route use this constructor.
func newTestRoute(h *Handler, p *plan.Plan) *route {
	rt := &route{dispatcher: testDispatcher(h), plan: p, start: time.Now(), cached: -1}
	rt.ready, rt.tried = rt.start, rt.usual[:0]
	return rt
}

// newTestAttempt returns a route that owns the plan's body, with an attempt on the
// worker's first rank.
func newTestAttempt(h *Handler, p *plan.Plan, w *pool.Worker) *route {
	rt := newTestRoute(h, p)
	rt.body, rt.attempt = p.Body, &attempt{Stream: pool.Stream{Worker: w, Target: w.Target(0)}}
	return rt
}

// testDispatcher returns the dispatcher of a handler that was not provisioned.
func testDispatcher(h *Handler) *dispatcher {
	if h.dispatcher == nil {
		h.dispatcher = new(dispatcher)
	}
	d := h.dispatcher
	d.pool, d.proxy, d.transport, d.client, d.active, d.metrics, d.figures, d.logger = h.pool, h.ReverseProxy, h.transport, h.client, h.policy, h.metrics, h.figures, h.logger
	if d.proxy == nil {
		d.proxy = new(reverseproxy.Handler)
	}
	d.unit, d.followUps = costUnit(h.policy), noFollowUps{}
	h.explainer = &explainer{dispatcher: d, reader: h.reader, config: h.config}
	return d
}

// noFollowUps makes no requests of the router's own.
type noFollowUps struct{}

func (noFollowUps) Arrived(*plan.Plan)                      {}
func (noFollowUps) Answering(turn, *http.Response) followUp { return nil }

// ended returns a context that has ended: a prober that has it probes nothing.
func ended() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// testPool opens a pool of its own.
func testPool(t testing.TB, s *pool.Settings) *pool.Pool {
	t.Helper()
	p, err := pool.New("test", s.WithDefaults())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Destruct() })
	return p
}

// wantedWorkers returns the settings of a pool with these workers.
func wantedWorkers(workers ...pool.WorkerSettings) *pool.Settings {
	s := &pool.Settings{Workers: make(map[string]pool.WorkerSettings), Upstreams: make(map[string]bool)}
	for _, w := range workers {
		s.Workers[w.Dial] = w
		s.Upstreams[w.Dial] = true
	}
	return s
}
