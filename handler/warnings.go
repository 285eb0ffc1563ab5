package handler

import (
	"net/http"
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
	setting, value string
	effect         string
	advice         string
}

// longAnswer is how long the first byte of an answer may take. An answer that is not
// streamed comes whole, after its last token.
const longAnswer = 10 * time.Minute

func (h *Handler) warn(list []warning) {
	for _, w := range list {
		h.logger.Warn("setting hurts: "+w.setting, zap.String("pool", h.Pool), zap.String("value", w.value),
			zap.String("effect", w.effect), zap.String("advice", w.advice))
	}
}

// proxyWarnings returns the harmful settings of a provisioned reverse proxy.
func proxyWarnings(rp *reverseproxy.Handler, t *reverseproxy.HTTPTransport) []warning {
	var list []warning
	number := func(name string, n int64, effect, advice string) {
		if n != 0 {
			list = append(list, warning{name, strconv.FormatInt(n, 10), effect, advice})
		}
	}
	number("request_buffers", rp.RequestBuffers,
		"kv_router has already read the body, so it is in memory twice", "remove it")
	number("response_buffers", rp.ResponseBuffers,
		"Caddy holds the tokens of a stream back until it has so many bytes of it, or all of it", "remove it")
	late := func(name string, d caddy.Duration, effect, advice string) {
		if d > 0 && time.Duration(d) < longAnswer {
			list = append(list, warning{name, time.Duration(d).String(), effect, advice})
		}
	}
	const silent = "an answer that is not streamed comes whole, after its last token; one that takes longer fails"
	late("response_header_timeout", t.ResponseHeaderTimeout, silent,
		"remove it, or make it at least "+longAnswer.String()+"; timeouts first_token bounds the wait for a stream")
	late("read_timeout", t.ReadTimeout, silent,
		"remove it, or make it at least "+longAnswer.String()+"; timeouts stream_idle bounds the pauses of a stream")
	if hc := rp.HealthChecks; hc != nil && hc.Passive != nil && hc.Passive.FailDuration > 0 {
		late("unhealthy_latency", hc.Passive.UnhealthyLatency,
			"answers that are not streamed may take long, and count as failures of a healthy worker then",
			"remove it; kv_router measures by itself which workers are slow")
	}
	number("max_conns_per_host", int64(max(0, t.MaxConnsPerHost)),
		"requests wait for a connection, which kv_router does not see; they have a lease on the worker and cannot go to another one",
		"remove it, and set max_running of the worker")
	return list
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
		h.warn([]warning{{
			"pool", h.Pool + ", as the kv_router of " + strings.Join(own, ", ") + " and that of " + strings.Join(others, ", ") + " name none",
			"sites without a common upstream share sessions, the index, the queue and the retry budget, and must agree on their settings",
			"name a pool in each kv_router; name the same one if the sites are to share it",
		}})
	}
}

// noticeServer warns of harmful settings of the server at the first request. They are
// not known before.
func (h *Handler) noticeServer(r *http.Request) {
	if h.noticed.Load() || !h.noticed.CompareAndSwap(false, true) {
		return
	}
	server, ok := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	if !ok || server == nil {
		return
	}
	if d := time.Duration(server.WriteTimeout); d > 0 && d < longAnswer {
		h.warn([]warning{{
			"servers timeouts write", d.String(),
			"the client loses an answer that takes longer",
			"remove it, or make it at least " + longAnswer.String() + "; without it, too, clients that do not read are disconnected",
		}})
	}
}
