package tests

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

// collector receives the spans that Caddy exports.
type collector struct {
	mu    sync.Mutex
	spans []*tracepb.Span
}

// startCollector starts a collector, to which Caddy's tracing directive exports.
func startCollector(t *testing.T) *collector {
	c := new(collector)
	ln := listen(t)
	srv := &http.Server{Handler: c, ReadHeaderTimeout: 5 * time.Second}
	go func() { _ = srv.Serve(ln) }()
	t.Cleanup(func() { srv.Close() })
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"+ln.Addr().String())
	t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
	t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "20") // ms
	return c
}

// ServeHTTP implements http.Handler.
func (c *collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	var data tracepb.TracesData // on the wire the same as an export request
	if err == nil {
		err = proto.Unmarshal(body, &data)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, resource := range data.GetResourceSpans() {
		for _, scope := range resource.GetScopeSpans() {
			c.spans = append(c.spans, scope.GetSpans()...)
		}
	}
	w.Header().Set("Content-Type", "application/x-protobuf")
}

// named returns the received spans of a name.
func (c *collector) named(name string) []*tracepb.Span {
	c.mu.Lock()
	defer c.mu.Unlock()
	var found []*tracepb.Span
	for _, s := range c.spans {
		if s.GetName() == name {
			found = append(found, s)
		}
	}
	return found
}

// trace waits for the spans of one request: Caddy's, the route's and those of
// its selections.
func (c *collector) trace(t *testing.T, selections int) (caddys, route *tracepb.Span, selected []*tracepb.Span) {
	t.Helper()
	eventually(t, "the spans come", func() bool {
		routes := c.named("kv_router.route_request")
		selected = c.named("kv_router.select_worker")
		if len(routes) != 1 || len(selected) != selections {
			return false
		}
		route = routes[0]
		for _, caddys = range c.named("handler") { // the tests' own requests have one, too
			if bytes.Equal(caddys.GetSpanId(), route.GetParentSpanId()) {
				return true
			}
		}
		return false
	})
	return caddys, route, selected
}

// forget discards the received spans.
func (c *collector) forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.spans = nil
}

// attributes returns those of a span, as text.
func attributes(s *tracepb.Span) map[string]string {
	m := make(map[string]string)
	for _, kv := range s.GetAttributes() {
		m[kv.GetKey()] = valueText(kv.GetValue())
	}
	return m
}

func valueText(v *commonpb.AnyValue) string {
	switch v := v.GetValue().(type) {
	case *commonpb.AnyValue_StringValue:
		return v.StringValue
	case *commonpb.AnyValue_BoolValue:
		return fmt.Sprint(v.BoolValue)
	case *commonpb.AnyValue_IntValue:
		return fmt.Sprint(v.IntValue)
	case *commonpb.AnyValue_DoubleValue:
		return fmt.Sprint(v.DoubleValue)
	}
	return fmt.Sprintf("%T", v.GetValue())
}

// hasAttributes checks that a span has each of the pairs of name and value.
func hasAttributes(t *testing.T, s *tracepb.Span, pairs ...string) {
	t.Helper()
	got := attributes(s)
	for i := 0; i+1 < len(pairs); i += 2 {
		if v, there := got["kv_router."+pairs[i]]; !there || v != pairs[i+1] {
			t.Errorf("%s: %s is %q (there: %v), want %q", s.GetName(), pairs[i], v, there, pairs[i+1])
		}
	}
}

const (
	clientTrace   = "0123456789abcdef0123456789abcdef"
	clientSpan    = "0123456789abcdef"
	clientContext = "00-" + clientTrace + "-" + clientSpan + "-01"
)

// chats returns the chats among an engine's requests.
func chats(e *canned.Engine) []canned.Request {
	var found []canned.Request
	for _, r := range e.Journal() {
		if strings.HasSuffix(r.URI, "/chat/completions") {
			found = append(found, r)
		}
	}
	return found
}

// TestTraceHasTheRouteAndItsChoices follows a retried request from the client's span to
// the span that the engine gets.
func TestTraceHasTheRouteAndItsChoices(t *testing.T) {
	spans := startCollector(t)
	engines := startEngines(t, 2, canned.Pace{Words: 6})
	ids := map[string]string{"e1": "11", "e2": "9007199254740991"}
	s := startCaddy(t, "tracing\n"+route(engines, "pool traced", "inject_usage", affinity("hard"),
		fmt.Sprintf("worker %s {\nid %s\n}\nworker %s {\nid %s\n}", engines[0].Addr(), ids["e1"], engines[1].Addr(), ids["e2"])))
	header := []string{
		"X-Session-Id", "very-secret",
		"Traceparent", clientContext, "Tracestate", "vendor=1", "Baggage", "tenant=t1",
	}
	ill, well := engines[0], engines[1]
	if s.mustChat(t, ask("hello there").streamed(), header...).engine() == well.Name() {
		ill, well = well, ill // the session is bound to this one
	}
	spans.trace(t, 1)
	spans.forget()
	ill.FailNext(1, canned.Fault{Kind: canned.Status, Status: http.StatusServiceUnavailable, Body: `{}`})
	s.mustChat(t, ask("hello there").streamed(), header...)
	caddys, route, selected := spans.trace(t, 2)

	if hex.EncodeToString(caddys.GetTraceId()) != clientTrace || hex.EncodeToString(caddys.GetParentSpanId()) != clientSpan {
		t.Errorf("Caddy's span has trace %x and parent %x, want the client's", caddys.GetTraceId(), caddys.GetParentSpanId())
	}
	isChild(t, route, caddys)
	hasAttributes(t, route, "pool", "traced", "api", "chat", "model", "canned", "session", "true",
		"outcome", "ok", "attempts", "2", "status", "200", "worker", ids[well.Name()],
		"output_tokens", "8")
	for name, want := range map[string]string{"operation.name": "chat", "request.model": "canned", "usage.output_tokens": "8"} {
		equal(t, attributes(route)["gen_ai."+name], want, "gen_ai.%s", name)
	}
	if route.GetStatus().GetCode() != tracepb.Status_STATUS_CODE_UNSET {
		t.Errorf("the route's status is %v", route.GetStatus())
	}
	if events := route.GetEvents(); len(events) != 1 || events[0].GetName() != "retry" {
		t.Errorf("the route's events are %v, want one retry", events)
	}
	for i, sel := range selected {
		isChild(t, sel, route)
		engine, reason, candidates := ill, "session", "2"
		if i == 1 {
			engine, reason, candidates = well, "load", "1"
		}
		hasAttributes(t, sel, "attempt", fmt.Sprint(i+1), "candidates", candidates, "reason", reason,
			"worker", ids[engine.Name()], "upstream", engine.Addr(), "dp_rank", "0", "active_requests", "0")
		for _, name := range []string{
			"prompt_tokens", "predicted_cached_tokens", "overlap_blocks", "request_blocks", "shared_blocks",
			"predicted_time_to_first_token_seconds", "booked_prefill_tokens", "booked_prompt_blocks", "booked_unshared_blocks", "booked_output_blocks",
		} {
			if _, there := attributes(sel)["kv_router."+name]; !there {
				t.Errorf("choice %d has no %s", i+1, name)
			}
		}
		if _, there := attributes(sel)["kv_router.cost"]; there != (i == 1) {
			t.Errorf("choice %d has a cost: %v", i+1, there)
		}
		if _, there := attributes(sel)["kv_router.cost_prefill_ms"]; there != (i == 1) {
			t.Errorf("choice %d has terms of a cost: %v", i+1, there)
		}
	}
	for _, sp := range append(selected, route) {
		if strings.Contains(sp.String(), "very-secret") {
			t.Errorf("%s gives the session's key away: %v", sp.GetName(), sp)
		}
	}
	got := chats(well)[0].Header
	if want := fmt.Sprintf("00-%s-%x-01", clientTrace, route.GetSpanId()); got.Get("Traceparent") != want {
		t.Errorf("the engine got traceparent %q, want %q, the route's", got.Get("Traceparent"), want)
	}
	if got.Get("Tracestate") != "vendor=1" || got.Get("Baggage") != "tenant=t1" {
		t.Errorf("the engine got tracestate %q and baggage %q", got.Get("Tracestate"), got.Get("Baggage"))
	}
}

// isChild checks that a span is a child of another.
func isChild(t *testing.T, child, parent *tracepb.Span) {
	t.Helper()
	if !bytes.Equal(child.GetTraceId(), parent.GetTraceId()) || !bytes.Equal(child.GetParentSpanId(), parent.GetSpanId()) {
		t.Errorf("%s is no child of %s", child.GetName(), parent.GetName())
	}
}

// TestTraceSaysWhatFailed has requests that fail.
func TestTraceSaysWhatFailed(t *testing.T) {
	for _, f := range []struct {
		name, outcome, says string
		chat                chat
		choices             int
		ill                 bool
		do                  func(*canned.Engine)
	}{
		{"StreamBreaks", "broken", "stream broke", ask("a").streamed(), 1, true, func(e *canned.Engine) {
			e.SetFault(canned.Fault{Kind: canned.DieMidStream, Words: 2})
		}},
		{"NobodyThere", "unavailable", "connection refused", ask("a"), 1, true, func(e *canned.Engine) { e.Kill() }},
		{"EngineFails", "engine_error", "status 500", ask("a"), 1, true, func(e *canned.Engine) {
			e.SetFault(canned.Fault{Kind: canned.Status, Status: http.StatusInternalServerError, Body: `{}`})
		}},
		{"ClientIsWrong", "engine_error", "", ask("a"), 1, false, func(e *canned.Engine) {
			e.SetFault(canned.Fault{Kind: canned.Status, Status: http.StatusBadRequest, Body: `{}`})
		}},
		{"ModelIsCutWithinALetter", "ok", "", chat{Model: "m" + strings.Repeat("ä", 200), Messages: ask("a").Messages}, 1, false, func(*canned.Engine) {}},
	} {
		t.Run(f.name, func(t *testing.T) {
			spans := startCollector(t)
			engines := startEngines(t, 1, canned.Pace{Words: 6})
			s := startCaddy(t, "tracing\n"+route(engines))
			f.do(engines[0])
			s.chat(t.Context(), f.chat)
			_, route, _ := spans.trace(t, f.choices)
			hasAttributes(t, route, "outcome", f.outcome)
			status := route.GetStatus()
			if ill := status.GetCode() == tracepb.Status_STATUS_CODE_ERROR; ill != f.ill || !strings.Contains(status.GetMessage(), f.says) {
				t.Errorf("the route's status is %v, want an error (%v) that says %q", status, f.ill, f.says)
			}
		})
	}
}

// TestTraceContextWithoutTracing has a client that traces and a Caddy that does not. Then
// Caddy traces, and header_up removes the trace context from the engine's requests.
func TestTraceContextWithoutTracing(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines))
	s.mustChat(t, ask("hello"), "Traceparent", clientContext, "Tracestate", "vendor=1")
	got := chats(engines[0])[0].Header
	if got.Get("Traceparent") != clientContext || got.Get("Tracestate") != "vendor=1" {
		t.Errorf("without tracing the engine got traceparent %q, tracestate %q, want the client's", got.Get("Traceparent"), got.Get("Tracestate"))
	}

	spans := startCollector(t)
	s.mustReload(t, "tracing\nkv_router {\nreverse_proxy "+engines[0].Addr()+" {\nheader_up -Traceparent\n}\n}")
	s.mustChat(t, ask("hello"), "Traceparent", clientContext)
	if got := chats(engines[0])[1].Header; got.Get("Traceparent") != "" {
		t.Errorf("header_up took the context out, and the engine got %q", got.Get("Traceparent"))
	}
	spans.trace(t, 1)
}
