package handler

import (
	"context"
	"strconv"
	"time"

	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
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
		if w.value == "" {
			continue
		}
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

func proxyWarnings(rp *reverseproxy.Handler, t *reverseproxy.HTTPTransport) []warning {
	const silent = "an answer that is not streamed comes whole, after its last token; one that takes longer fails"
	buffers := ""
	if n := rp.ResponseBuffers; n != 0 {
		buffers = strconv.FormatInt(n, 10)
	}
	return []warning{{
		setting: "response_header_timeout", value: tooShort(t.ResponseHeaderTimeout),
		effect: silent, advice: lengthen + "; timeouts first_token bounds the wait for a stream",
	}, {
		setting: "read_timeout", value: tooShort(t.ReadTimeout),
		effect: silent, advice: lengthen + "; timeouts stream_idle bounds the pauses of a stream",
	}, {
		setting: "response_buffers", value: buffers, advice: "remove it",
		effect: "Caddy holds the tokens of a stream back until it has so many bytes of it, or all of it",
	}}
}

// noticeServer warns of harmful settings of the server at the first request. They are
// not known before.
func (h *Handler) noticeServer(ctx context.Context) {
	if h.noticed.Load() || !h.noticed.CompareAndSwap(false, true) {
		return
	}
	if server := serverOf(ctx); server != nil {
		h.warn(warning{
			setting: "servers timeouts write", value: tooShort(server.WriteTimeout),
			effect: "the client loses an answer that takes longer",
			advice: lengthen + "; without it, too, clients that do not read are disconnected",
		})
	}
}
