package admin

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// TestQuestionsAreBounded sends a query while the bound on concurrent questions or
// on body memory is reached. The router asks no engine, and no lease remains. With
// room for it one is asked, which is not there.
func TestQuestionsAreBounded(t *testing.T) {
	var dials atomic.Int32
	the, err := pool.New("test", new(pool.Settings).WithDefaults(), turn.NewCloser)
	if err != nil {
		t.Fatal(err)
	}
	defer the.Destruct()
	s := *the.Settings.Load()
	s.Workers = map[string]worker.Settings{worker.AllWorkers: {Engine: engine.SGLang}}
	the.Settings.Store(&s)
	transport := &upstream.Transport{HTTPTransport: &reverseproxy.HTTPTransport{Transport: &http.Transport{
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			dials.Add(1)
			return nil, errors.New("nobody is there")
		},
	}}}
	x := &Explainer{Dispatcher: &dispatch.Dispatcher{
		Runner: attempt.Runner{Pool: the, Logger: zap.NewNop()},
		Client: upstream.NewClient(new(reverseproxy.Handler), transport, func(string) (string, bool) { return "", true }),
	}}
	prompt := `{"prompt":"` + strings.Repeat("x", 1000) + `","nvext":{"annotations":["query_instance_id"]}}`
	for _, v := range []struct {
		asking int32
		bodies int64
	}{{maxAsking, 0}, {0, body.MaxBytes() - 1000}, {0, 0}} {
		the.Memory.Held.Store(0)
		of, whole := api.For("/v1/completions"), body.NewBuffer(int64(len(prompt)))
		whole.Data = append(whole.Data[:0], prompt...)
		the.Memory.Count(whole)
		req, err := api.Parse(of, whole.Data, api.Options{TextBlock: s.TextBlock, BlockSize: s.BlockSize})
		if err != nil {
			t.Fatal(err)
		}
		p := &plan.Plan{HTTP: httptest.NewRequest(http.MethodPost, "/v1/completions", nil), API: of, Request: req, Hints: plan.Hints{Ext: &plan.NoExt}, Content: plan.Content{Body: body.NewReplay(whole, whole.Data)}}
		the.Asking.Store(v.asking)
		the.Memory.Held.Add(v.bodies)
		ids := x.askTokens(p, the.Worker("127.0.0.1:1"))
		if refused := v.asking > 0 || v.bodies > 0; ids != nil || (dials.Load() == 0) != refused {
			t.Errorf("%+v: the worker was dialled %d times, the ids are %s", v, dials.Load(), ids)
		}
		p.Close()
		if n, held := the.Asking.Load(), the.Memory.Held.Load(); n != v.asking || held != v.bodies {
			t.Errorf("%+v: then %d are asked, and %d bytes held", v, n, held)
		}
		the.Memory.Held.Add(-v.bodies)
	}
}
