package handler

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// warning is a setting that works against the router.
type warning struct {
	setting string
	value   string // empty if the setting does no harm
	effect  string
	advice  string
}

func (h *Handler) warn(list ...warning) {
	for _, w := range list {
		h.logger.Warn("setting hurts", zap.String("setting", w.setting), zap.String("pool", h.Pool),
			zap.String("value", w.value), zap.String("effect", w.effect), zap.String("advice", w.advice))
	}
}

// longAnswer is how long the first byte of an answer may take. An answer that is not
// streamed comes whole, after its last token.
const longAnswer = 10 * time.Minute

const lengthen = "remove it, or make it at least 10m"

// tooShort returns a time limit, or nothing if it allows long answers.
func tooShort(d caddy.Duration) string {
	if d <= 0 || time.Duration(d) >= longAnswer {
		return ""
	}
	return time.Duration(d).String()
}

// nonZero returns a number, or nothing if it is 0.
func nonZero(n int64) string {
	if n == 0 {
		return ""
	}
	return strconv.FormatInt(n, 10)
}

// proxyWarnings returns the harmful settings of a provisioned reverse proxy.
func proxyWarnings(rp *reverseproxy.Handler, t *reverseproxy.HTTPTransport) []warning {
	const silent = "an answer that is not streamed comes whole, after its last token; one that takes longer fails"
	list := []warning{{
		setting: "request_buffers", value: nonZero(rp.RequestBuffers),
		effect: "kv_router has already read the body, so it is in memory twice", advice: "remove it",
	}, {
		setting: "response_buffers", value: nonZero(rp.ResponseBuffers),
		effect: "Caddy holds the tokens of a stream back until it has so many bytes of it, or all of it", advice: "remove it",
	}, {
		setting: "response_header_timeout", value: tooShort(t.ResponseHeaderTimeout),
		effect: silent, advice: lengthen + "; timeouts first_token bounds the wait for a stream",
	}, {
		setting: "read_timeout", value: tooShort(t.ReadTimeout),
		effect: silent, advice: lengthen + "; timeouts stream_idle bounds the pauses of a stream",
	}, {
		setting: "max_conns_per_host", value: nonZero(int64(max(0, t.MaxConnsPerHost))),
		effect: "requests wait for a connection, which kv_router does not see; they have a lease on the worker " +
			"and cannot go to another one",
		advice: "remove it, and set max_running of the worker",
	}}
	if hc := rp.HealthChecks; hc != nil && hc.Passive != nil && hc.Passive.FailDuration > 0 {
		list = append(list, warning{
			setting: "unhealthy_latency", value: tooShort(hc.Passive.UnhealthyLatency),
			effect: "answers that are not streamed may take long, and count as failures of a healthy worker then",
			advice: "remove it; kv_router measures by itself which workers are slow",
		})
	}
	return slices.DeleteFunc(list, func(w warning) bool { return w.value == "" })
}

// warnOfSharing warns if the handler and others share the pool only because none of them
// names one.
func (h *Handler) warnOfSharing() {
	if !h.unnamed {
		return
	}
	var own []string
	for _, up := range h.ReverseProxy.Upstreams {
		own = append(own, up.Dial)
	}
	if source := h.ReverseProxy.DynamicUpstreamsRaw; source != nil {
		own = append(own, string(source))
	}
	if others := h.config.MeetUnnamed(own); len(others) > 0 {
		list := func(dials []string) string { return strings.Join(dials, ", ") }
		h.warn(warning{
			setting: "pool", value: h.Pool + ", as the kv_router of " + list(own) + " and that of " + list(others) + " name none",
			effect: "sites without a common upstream share sessions, the index, the queue and the retry budget, " +
				"and must agree on their settings",
			advice: "name a pool in each kv_router; name the same one if the sites are to share it",
		})
	}
}

// warnOfIdleQueue warns if the pool's queue is configured and no worker has a limit. This
// is known when all handlers of the pool are provisioned.
func (h *Handler) warnOfIdleQueue() {
	if h.config.QueueIsIdle() {
		h.warn(warning{
			setting: "queue", value: "without max_running",
			effect: "no request ever waits in the queue, because no worker has a limit",
			advice: "set max_running of the workers, or auto, or remove queue",
		})
	}
}

// noticeServer warns of harmful settings of the server at the first request. They are
// not known before.
func (h *Handler) noticeServer(ctx context.Context) {
	if h.noticed.Load() || !h.noticed.CompareAndSwap(false, true) {
		return
	}
	server, ok := ctx.Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	if !ok || server == nil {
		return
	}
	if value := tooShort(server.WriteTimeout); value != "" {
		h.warn(warning{
			setting: "servers timeouts write", value: value,
			effect: "the client loses an answer that takes longer",
			advice: lengthen + "; without it, too, clients that do not read are disconnected",
		})
	}
}
