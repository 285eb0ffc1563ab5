package handler

import (
	"net/http"
	"strconv"
	"time"

	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// warning is a setting of another module that works against this one.
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
		"kv_router has read the body already: it is in memory twice", "remove it")
	number("response_buffers", rp.ResponseBuffers,
		"the tokens of a stream are held back until so many bytes of it have come, or all of it", "remove it")
	late := func(name string, d caddy.Duration, effect, advice string) {
		if d > 0 && time.Duration(d) < longAnswer {
			list = append(list, warning{name, time.Duration(d).String(), effect, advice})
		}
	}
	const silent = "an answer that is not streamed comes whole, after its last token: one that takes longer fails"
	late("response_header_timeout", t.ResponseHeaderTimeout, silent,
		"remove it, or make it at least "+longAnswer.String()+"; timeouts first_token bounds the wait for a stream")
	late("read_timeout", t.ReadTimeout, silent,
		"remove it, or make it at least "+longAnswer.String()+"; timeouts stream_idle bounds the pauses of a stream")
	if hc := rp.HealthChecks; hc != nil && hc.Passive != nil && hc.Passive.FailDuration > 0 {
		late("unhealthy_latency", hc.Passive.UnhealthyLatency,
			"an answer that is not streamed is as long under way as it takes: long ones count as failures of a worker that is well",
			"remove it: kv_router sees by itself which workers are slow")
	}
	number("max_conns_per_host", int64(max(0, t.MaxConnsPerHost)),
		"requests wait for a connection where kv_router does not see it: they are booked on the worker and cannot go to another one",
		"remove it, and set max_running of the worker")
	return list
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
			"an answer that takes longer breaks off for its client",
			"remove it, or make it at least " + longAnswer.String() + "; clients that do not read are ended without it",
		}})
	}
}
