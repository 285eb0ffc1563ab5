package attempt

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
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
	// SpanPrefill and SpanDecode are the phases of a request over two workers, in spanRoute.
	SpanPrefill = "kv_router.prefill"
	SpanDecode  = "kv_router.decode"
	// spanSelect is one choice of a worker, in spanRoute.
	spanSelect = "kv_router.select_worker"
	// longestTraced bounds, in bytes, what comes from outside into a span.
	longestTraced = 256
)

// Trace traces a request. It is nil, and its methods do nothing, unless Caddy's tracing directive
// traces the request.
type Trace struct {
	tracer trace.Tracer
	ctx    context.Context // has the span
	span   trace.Span
}

// StartTrace begins the span of a request if the one in ctx is recorded, and returns the context that
// has it.
func StartTrace(ctx context.Context, p *plan.Plan, pool string, start time.Time) (context.Context, *Trace) {
	parent := trace.SpanFromContext(ctx)
	if !parent.IsRecording() {
		return ctx, nil
	}
	t := &Trace{tracer: parent.TracerProvider().Tracer(tracerName)}
	attrs := []attribute.KeyValue{
		attribute.String("kv_router.pool", pool),
		attribute.Bool("kv_router.session", !p.Session.Key.IsZero()), // the key is a secret
	}
	if p.API != nil {
		attrs = append(attrs, attribute.String("kv_router.api", p.API.Name()),
			attribute.Int64("kv_router.prompt_tokens", p.Score.Tokens), attribute.String("gen_ai.operation.name", operation(p.API)))
	}
	if name := p.Named(); name != "" {
		attrs = append(attrs, attribute.String("kv_router.model", forSpan(name)), attribute.String("gen_ai.request.model", forSpan(name)))
	}
	if p.Fallback != "" {
		attrs = append(attrs, attribute.String("kv_router.fallback", p.Fallback))
	}
	t.ctx, t.span = t.tracer.Start(ctx, spanRoute, trace.WithTimestamp(start), trace.WithAttributes(attrs...))
	return t.ctx, t
}

// operation returns OpenTelemetry's name of what an API does (semantic conventions for generative AI).
func operation(a api.API) string {
	switch a.Name() {
	case api.NameChat, api.NameResponses, api.NameMessages:
		return "chat"
	case api.NameEmbeddings:
		return "embeddings"
	case api.NameCompletions, api.NameCompletion, api.NameGenerate, api.NameTokens:
		return "text_completion"
	}
	return a.Name()
}

// Selected records an attempt's choice with the chosen candidate's terms.
func (t *Trace) Selected(a *Attempt) {
	if t == nil {
		return
	}
	_, span := t.tracer.Start(t.ctx, spanSelect, trace.WithTimestamp(a.Begun), trace.WithAttributes(attributesOf(a)...))
	span.End()
}

// Event records what became of an attempt. facts are pairs of a name and a value.
func (t *Trace) Event(event string, a *Attempt, facts ...[2]string) {
	if t == nil {
		return
	}
	attrs := []attribute.KeyValue{attribute.String("kv_router.upstream", a.Worker.Dial)}
	for _, fact := range facts {
		attrs = append(attrs, attribute.String("kv_router."+fact[0], fact[1]))
	}
	t.span.AddEvent(event, trace.WithAttributes(attrs...))
}

// Phase begins the span of a phase. The function ends it.
func (t *Trace) Phase(name string, a *Attempt) func(error) {
	if t == nil {
		return func(error) {}
	}
	_, span := t.tracer.Start(t.ctx, name, trace.WithAttributes(attributesOf(a)...))
	return func(err error) {
		if err != nil {
			span.SetStatus(codes.Error, forSpan(err.Error()))
		}
		span.End()
	}
}

// Carry makes the request's span the engine's parent. If header_up removed Caddy's own,
// nothing is added.
func (t *Trace) Carry(req *http.Request) *http.Request {
	if t == nil {
		return req
	}
	p := thePropagation()
	if !slices.ContainsFunc(p.Fields(), func(name string) bool { return req.Header.Get(name) != "" }) {
		return req
	}
	out := *req
	out.Header = req.Header.Clone() // an attempt before may still be writing it
	p.Inject(t.ctx, propagation.HeaderCarrier(out.Header))
	return &out
}

// Set sets an attribute of the span, unless the value is nil.
func (t *Trace) Set(name string, value any) {
	t.span.SetAttributes(appendAttribute(nil, name, value)...)
}

// End ends the span. fault is why the service has failed, empty if it has not.
func (t *Trace) End(fault string) {
	if fault != "" {
		t.span.SetStatus(codes.Error, forSpan(fault))
	}
	t.span.End()
}

// forSpan makes a string valid UTF-8 and short: an invalid one would lose all spans exported
// with it.
func forSpan(s string) string {
	return strings.ToValidUTF8(s[:min(len(s), longestTraced)], "\uFFFD")
}

// thePropagation writes spans to headers as Caddy's tracing directive does, by the same environment variable.
var thePropagation = sync.OnceValue(func() propagation.TextMapPropagator { return autoprop.NewTextMapPropagator() })
