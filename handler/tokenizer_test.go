package handler

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// TestQuestionsAreBounded has a query while as many are asked about as may be, and
// while bodies take as much memory as they may: no engine is asked, and nothing
// stays booked. With room for it one is asked, which is not there.
func TestQuestionsAreBounded(t *testing.T) {
	var dials atomic.Int32
	h := benchHandler(t)
	h.transport = &upstream.Transport{HTTPTransport: &reverseproxy.HTTPTransport{Transport: &http.Transport{
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			dials.Add(1)
			return nil, errors.New("nobody is there")
		},
	}}}
	h.client = upstream.NewClient(h.ReverseProxy, h.transport, func(string) string { return "" })
	s := *h.pool.settings.Load()
	s.workers = map[string]workerSettings{allWorkers: {Engine: engine.SGLang}}
	h.pool.settings.Store(&s)
	prompt := `{"prompt":"` + strings.Repeat("x", 1000) + `","nvext":{"annotations":["query_instance_id"]}}`
	for _, v := range []struct {
		asking int32
		bodies int64
	}{{maxAsking, 0}, {0, body.MaxBytes - 1000}, {0, 0}} {
		h.pool.memory.Held.Store(0)
		r := httptest.NewRequest(http.MethodPost, "/v1/completions", bytes.NewReader([]byte(prompt)))
		p, err := h.plan(r)
		if err != nil {
			t.Fatal(err)
		}
		h.pool.asking.Store(v.asking)
		h.pool.memory.Held.Add(v.bodies)
		ids := (&explainer{testDispatcher(h), nil}).askTokens(r, p, &chosenView{Dial: "127.0.0.1:1"})
		if refused := v.asking > 0 || v.bodies > 0; ids != nil || (dials.Load() == 0) != refused {
			t.Errorf("%+v: the worker was dialled %d times, the ids are %s", v, dials.Load(), ids)
		}
		p.done()
		if n, held := h.pool.asking.Load(), h.pool.memory.Held.Load(); n != v.asking || held != v.bodies {
			t.Errorf("%+v: then %d are asked, and %d bytes held", v, n, held)
		}
		h.pool.memory.Held.Add(-v.bodies)
	}
}
