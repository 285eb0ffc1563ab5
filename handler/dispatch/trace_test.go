package dispatch

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
)

// tracedDispatch is a dispatch whose worker is chosen, and its request.
func tracedDispatch(tb testing.TB, ctx context.Context) (*Dispatch, *http.Request) {
	tb.Helper()
	h := testHandler(tb, "127.0.0.1:1")
	p := &plan.Plan{Model: "m", Wishes: plan.Wishes{Ext: &plan.NoExt}}
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
	d.Sent = d.Trace.Carry(d.built(req))
	d.Trace.Retried(d.attempt, "broken")
	ended.trace(d.Trace)
}

// TestUntracedRequestsCostNoAllocation has a request whose Caddy does not trace.
func TestUntracedRequestsCostNoAllocation(t *testing.T) {
	d, req := tracedDispatch(t, t.Context())
	untraced := testing.AllocsPerRun(100, func() { d.walk(req) })
	without := testing.AllocsPerRun(100, func() { d.Sent = d.built(req) })
	if untraced != without || d.Trace != nil {
		t.Errorf("%v allocations for a request that is not traced, %v without the calls", untraced, without)
	}
}

// built returns the request of the attempt.
func (d *Dispatch) built(req *http.Request) *http.Request {
	e := attempt.Request{Plan: d.plan, Body: d.Body, Worker: d.attempt.Worker, Target: d.attempt.Target}
	return e.Build(req)
}
