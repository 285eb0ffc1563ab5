package handler

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
)

// TestEngineThatBecomesAnotherOne plans requests with token_data for an engine of
// one type, and sends them when it has become one of another type: the ids do not
// reach who was planned to compute the body's prompt, and nothing is learned of
// who does not compute the planned one.
func TestEngineThatBecomesAnotherOne(t *testing.T) {
	const chats, completions = "/v1/chat/completions", "/v1/completions"
	for _, v := range []struct {
		path, from, to string
		kind           api.Kind
		foreign, given bool
	}{
		{chats, engine.SGLang, engine.SGLang, api.Tokens, false, true},
		{chats, engine.SGLang, engine.VLLM, api.Tokens, true, false},
		{chats, engine.VLLM, engine.SGLang, api.Text, false, false},
		{chats, engine.VLLM, engine.Dynamo, api.Text, true, false},
		{completions, engine.VLLM, engine.Dynamo, api.Tokens, true, false},
		{completions, engine.VLLM, engine.LlamaCpp, api.Tokens, false, true},
		{chats, engineAuto, engine.SGLang, api.None, false, true},
		{chats, engineAuto, engine.VLLM, api.None, false, false},
	} {
		h := benchHandler(t)
		become := func(kind string) {
			s := *h.pool.settings.Load()
			s.engine = kind
			h.pool.settings.Store(&s)
		}
		become(v.from)
		body := `{"messages":[{"role":"user","content":"hi"}],"prompt":"hi","nvext":{"token_data":[` + strings.Repeat("7,", 99) + `7]}}`
		r := httptest.NewRequest(http.MethodPost, v.path, bytes.NewReader([]byte(body)))
		p, err := h.plan(r)
		if err != nil {
			t.Fatal(err)
		}
		become(v.to)
		w := h.pool.worker("127.0.0.1:1")
		rt := newTestAttempt(h, p, w)
		out := rt.outgoing(r, new(atomic.Int32))
		sent, err := io.ReadAll(out.Body)
		if err != nil {
			t.Fatal(err)
		}
		given := strings.Contains(string(sent), `:[7,7,`) && !strings.Contains(string(sent), "nvext")
		if p.request.Kind != v.kind || rt.attempt.foreign != v.foreign || given != v.given {
			t.Errorf("%s from %s to %s: kind %d, foreign %v, the ids given %v: %s", v.path, v.from, v.to, p.request.Kind, rt.attempt.foreign, given, sent)
		}
	}
}
