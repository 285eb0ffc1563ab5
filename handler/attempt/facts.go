package attempt

import (
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.opentelemetry.io/otel/attribute"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
)

// facts are what an attempt shows of its choice. Spans and the log of choices show all of
// them, the access log and clients only some. A value is nil if there is none.
var facts = append([]fact{
	{name: "worker", access: "worker", client: true, of: idOf},
	{name: "upstream", access: "upstream", of: dialOf},
	{name: "dp_rank", access: "dp_rank", client: true, of: rankOf},
	{name: "reason", access: "reason", client: true, of: func(a *Attempt) any { return a.Reason }},
	{name: "prefill_worker", access: "prefill_worker", client: true, of: ofPrefill(idOf)},
	{name: "prefill_upstream", access: "prefill_upstream", of: ofPrefill(dialOf)},
	{name: "prefill_dp_rank", access: "prefill_dp_rank", client: true, of: ofPrefill(rankOf)},
	{name: "overlap_blocks", access: "overlap_blocks", client: true, of: func(a *Attempt) any { return a.Terms.OverlapBlocks }},
	{
		name: "predicted_cached_tokens", access: "predicted_cached_tokens", client: true,
		of: func(a *Attempt) any { return a.Terms.OverlapTokens },
	},
	{name: "prompt_tokens", access: "estimated_prompt_tokens", of: func(a *Attempt) any { return a.Tokens }},
	{name: "model", access: "model", of: func(a *Attempt) any { return When(Renames(a.Call.Plan, a.Worker), a.Call.Plan.Named()) }},
	{
		name: "engine_model", access: "engine_model", client: true,
		of: func(a *Attempt) any { return When(Renames(a.Call.Plan, a.Worker), ModelAt(a.Call.Plan, a.Worker)) },
	},
	{name: "request_id", access: "request_id", client: true, of: func(a *Attempt) any { return a.Call.Plan.ID }},
	{name: "attempt", of: func(a *Attempt) any { return int64(a.Number) }},
	{name: "candidates", of: func(a *Attempt) any { return int64(a.Among) }},
	{name: "request_blocks", of: func(a *Attempt) any { return a.Terms.RequestBlocks }},
	{name: "shared_blocks", of: func(a *Attempt) any { return a.Terms.SharedBlocks }},
	{name: "booked_prefill_tokens", of: func(a *Attempt) any { return a.Terms.PrefillTokens }},
	{name: "booked_prompt_blocks", of: func(a *Attempt) any { return a.Terms.PromptBlocks }},
	{name: "booked_unshared_blocks", of: func(a *Attempt) any { return a.Terms.UnsharedBlocks }},
	{name: "booked_output_blocks", of: func(a *Attempt) any { return a.Terms.OutputBlocks }},
	{name: "active_requests", of: func(a *Attempt) any { return int64(a.Terms.Requests) }},
	{name: "predicted_time_to_first_token_seconds", of: func(a *Attempt) any { return a.Terms.TTFT() / 1e3 }},
	{name: "cost", of: func(a *Attempt) any { return When(!a.Unpriced, a.Terms.Cost) }},
	{name: "split", of: func(a *Attempt) any { return When(a.Terms.Split, "true") }},
}, costs()...)

// costs returns the terms of the cost, if that is a time.
func costs() (list []fact) {
	for i, term := range new(kvscore.Terms).Each() {
		list = append(list, fact{name: "cost_" + term.Name + "_ms", of: func(a *Attempt) any {
			return When(a.CostsTime, a.Terms.Terms.Each()[i].Time)
		}})
	}
	return list
}

type fact struct {
	name   string
	access string // the name in the access log; empty if that does not show it
	client bool   // response headers and placeholders show it
	of     func(*Attempt) any
}

func idOf(a *Attempt) any   { return a.Target.Worker }
func dialOf(a *Attempt) any { return a.Worker.Dial }
func rankOf(a *Attempt) any { return a.Target.Rank }

// ofPrefill returns a fact of the attempt that computes the prompt, nil if that is the same.
func ofPrefill(of func(*Attempt) any) func(*Attempt) any {
	return func(a *Attempt) any {
		if a.Prefill == nil {
			return nil
		}
		return of(a.Prefill)
	}
}

// When returns the value of a fact under a condition, else nil.
func When(is bool, value any) any {
	if !is {
		return nil
	}
	return value
}

// whole cuts the fraction of a number of blocks.
func whole(v any) any {
	if f, ok := v.(float64); ok {
		return int64(f)
	}
	return v
}

// Label adds the response headers that say how the request was routed, as far as the operator shows it. The
// request was received then, and was in the queue so long.
func (a *Attempt) Label(h http.Header, received time.Time, queued time.Duration) {
	if prefix := a.Call.Labels; prefix != "" {
		for i := range facts {
			if f := &facts[i]; f.client && f.of(a) != nil {
				h.Set(prefix+strings.ReplaceAll(f.name, "_", "-"), caddy.ToString(whole(f.of(a))))
			}
		}
	}
	if a.Call.ServerTiming {
		h.Add(ServerTiming, Timing("queue", queued)+", "+Timing("route", a.Begun.Sub(received)-queued)+", "+
			Timing("engine", time.Since(a.Begun)))
	}
	if !a.Call.CacheStatus {
		return
	}
	by, status := a.Computes(), "hit"
	switch {
	case a.Call.Plan.Request == nil:
		h.Add(cacheStatus, "kv_router;fwd=bypass")
		return
	case by.Terms.OverlapTokens == 0:
		status = "fwd=miss"
	}
	h.Add(cacheStatus, "kv_router;"+status+";detail="+a.Reason+";kv-cached-tokens="+strconv.FormatInt(by.Terms.OverlapTokens, 10)+
		";kv-prompt-tokens="+strconv.FormatInt(by.Tokens, 10))
}

const (
	// ServerTiming has how long the parts of a request took (W3C Server Timing).
	ServerTiming = "Server-Timing"
	// cacheStatus is about the KV cache of the worker that computes the prompt (RFC 9211).
	cacheStatus = "Cache-Status"
)

// Timing returns a metric of a Server-Timing field, in milliseconds.
func Timing(name string, t time.Duration) string {
	return name + ";dur=" + strconv.FormatFloat(float64(t)/float64(time.Millisecond), 'f', 1, 64)
}

// Fields returns the facts for the access log.
func (a *Attempt) Fields() (list []zap.Field) {
	for i := range facts {
		if f := &facts[i]; f.access != "" {
			if v := f.of(a); v != nil {
				list = append(list, zap.Any(f.access, whole(v)))
			}
		}
	}
	return list
}

// Chosen completes an attempt that has taken its seat, and records the choice. number is that among the attempts
// of the request, and unit that of the costs.
func (a *Attempt) Chosen(reason string, number int, unit string) {
	a.Reason, a.Number, a.CostsTime = reason, number, !a.Unpriced && unit == kvscore.UnitMilliseconds
	a.Call.Trace.Selected(a)
	c := a.Call.Logger.Check(zap.DebugLevel, "worker chosen")
	if c == nil {
		return
	}
	var fields []zap.Field
	for i := range facts {
		if v := facts[i].of(a); v != nil {
			fields = append(fields, zap.Any(facts[i].name, v))
		}
	}
	c.Write(fields...)
}

func attributesOf(a *Attempt) (list []attribute.KeyValue) {
	for i := range facts {
		list = appendAttribute(list, facts[i].name, facts[i].of(a))
	}
	return list
}

// appendAttribute appends a fact for a span, if it is not nil.
func appendAttribute(list []attribute.KeyValue, name string, fact any) []attribute.KeyValue {
	key := attribute.Key(name)
	if !strings.Contains(name, ".") { // a name of OpenTelemetry's has a namespace
		key = "kv_router." + key
	}
	switch v := fact.(type) {
	case string:
		return append(list, key.String(v))
	case uint64: // an id has 64 bits, and a number here 63
		return append(list, key.String(strconv.FormatUint(v, 10)))
	case uint32:
		return append(list, key.Int64(int64(v)))
	case int64:
		return append(list, key.Int64(v))
	case float64:
		return append(list, key.Float64(v))
	}
	return list
}

// Fact returns a fact that clients may have, by its name.
func (a *Attempt) Fact(name string) (any, bool) {
	for i := range facts {
		if f := &facts[i]; f.client && f.name == name {
			return whole(f.of(a)), true
		}
	}
	return nil, false
}
