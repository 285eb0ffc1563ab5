package dispatch

import (
	"context"
	"net/http"
	"net/textproto"
	"strings"
	"sync"

	"go.opentelemetry.io/contrib/propagators/autoprop"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

const (
	tracerName = "github.com/caddy-kvrouter/kvrouter/handler"
	// spanRoute lasts as long as the request, over all its attempts.
	spanRoute = "kv_router.route_request"
	// spanPrefill and spanDecode are the legs of a request over two workers, in spanRoute.
	spanPrefill = "kv_router.prefill"
	spanDecode  = "kv_router.decode"
	// spanSelect is one choice of a worker, in spanRoute.
	spanSelect = "kv_router.select_worker"
	// longestTraced bounds, in bytes, what comes from outside into a span.
	longestTraced = 256
)

// dispatchTrace traces a request. It is nil, and its methods do nothing, unless Caddy's
// tracing directive traces the request.
type dispatchTrace struct {
	tracer trace.Tracer
	ctx    context.Context // has the span
	span   trace.Span
}

// startTrace begins the request's span if the one in ctx is recorded, and returns the context
// that has it.
func (d *Dispatch) startTrace(ctx context.Context) context.Context {
	parent := trace.SpanFromContext(ctx)
	if !parent.IsRecording() {
		return ctx
	}
	t := &dispatchTrace{tracer: parent.TracerProvider().Tracer(tracerName)}
	attrs := []attribute.KeyValue{
		attribute.String("kv_router.pool", d.Pool.Name),
		attribute.Bool("kv_router.session", !d.plan.Session.Key.IsZero()), // the key is a secret
	}
	if p := d.plan; p.API != nil {
		attrs = append(attrs, attribute.String("kv_router.api", p.API.Name()),
			attribute.Int64("kv_router.prompt_tokens", p.Score.Tokens))
	}
	if d.plan.Model != "" {
		attrs = append(attrs, attribute.String("kv_router.model", forSpan(d.plan.Model)))
	}
	if d.plan.Fallback != "" {
		attrs = append(attrs, attribute.String("kv_router.fallback", d.plan.Fallback))
	}
	t.ctx, t.span = t.tracer.Start(ctx, spanRoute, trace.WithTimestamp(d.start), trace.WithAttributes(attrs...))
	d.trace = t
	return t.ctx
}

// selected records an attempt's choice with the chosen candidate's terms.
func (t *dispatchTrace) selected(a *attempt) {
	if t == nil {
		return
	}
	_, span := t.tracer.Start(t.ctx, spanSelect, trace.WithTimestamp(a.Begun), trace.WithAttributes(a.attributes()...))
	span.End()
}

// retried records a retry after an attempt.
func (t *dispatchTrace) retried(a *attempt, reason string) {
	if t != nil {
		t.span.AddEvent("retry", trace.WithAttributes(
			attribute.String("kv_router.upstream", a.Worker.Dial), attribute.String("kv_router.reason", reason)))
	}
}

// leg begins the span of a leg. The function ends it.
func (t *dispatchTrace) leg(name string, a *attempt) func(error) {
	if t == nil {
		return func(error) {}
	}
	_, span := t.tracer.Start(t.ctx, name, trace.WithAttributes(a.attributes()...))
	return func(err error) {
		if err != nil {
			span.SetStatus(codes.Error, forSpan(err.Error()))
		}
		span.End()
	}
}

// resumed records that a stream went on elsewhere, or could not.
func (t *dispatchTrace) resumed(a *attempt, cause, way, outcome string) {
	if t != nil {
		t.span.AddEvent("resume", trace.WithAttributes(
			attribute.String("kv_router.upstream", a.Worker.Dial), attribute.String("kv_router.cause", cause),
			attribute.String("kv_router.way", way), attribute.String("kv_router.outcome", outcome)))
	}
}

// carry makes the request's span the engine's parent. If header_up removed Caddy's own,
// nothing is added.
func (t *dispatchTrace) carry(req *http.Request) *http.Request {
	if t == nil {
		return req
	}
	p := thePropagation()
	for _, field := range p.fields {
		if _, there := req.Header[field]; there {
			out := *req
			out.Header = req.Header.Clone() // an attempt before may still be writing it
			p.Inject(t.ctx, propagation.HeaderCarrier(out.Header))
			return &out
		}
	}
	return req
}

func (t *dispatchTrace) end(r *Report) {
	if t == nil {
		return
	}
	var attrs []attribute.KeyValue
	for _, f := range reportFacts {
		attrs = appendAttribute(attrs, f.span, f.of(r))
	}
	if r.Status != 0 {
		attrs = append(attrs, attribute.Int("kv_router.status", r.Status))
		attrs = appendAttribute(attrs, "worker", r.attempt.Target.Worker)
	}
	t.span.SetAttributes(attrs...)
	if why, bad := r.fault(); bad {
		t.span.SetStatus(codes.Error, forSpan(why))
	}
	t.span.End()
}

// forSpan makes a string valid UTF-8 and short: an invalid one would lose all spans exported
// with it.
func forSpan(s string) string {
	return strings.ToValidUTF8(s[:min(len(s), longestTraced)], "\uFFFD")
}

// tracePropagation writes spans to headers; fields are the canonical names of these.
type tracePropagation struct {
	propagation.TextMapPropagator
	fields []string
}

// thePropagation is that of Caddy's tracing directive, from the same environment variable.
var thePropagation = sync.OnceValue(func() *tracePropagation {
	p := &tracePropagation{TextMapPropagator: autoprop.NewTextMapPropagator()}
	for _, field := range p.Fields() {
		p.fields = append(p.fields, textproto.CanonicalMIMEHeaderKey(field))
	}
	return p
})
