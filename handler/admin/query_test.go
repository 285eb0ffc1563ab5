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
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/discovery"
	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// TestQuestionsAreBounded sends a query while the bound on body memory is reached. The router
// asks no engine. With room for it one is asked, which is not there.
func TestQuestionsAreBounded(t *testing.T) {
	var dials atomic.Int32
	the, err := pool.New("test", new(pool.Settings).WithDefaults(), discovery.NewWatch)
	if err != nil {
		t.Fatal(err)
	}
	defer the.Destruct()
	s := *the.Settings.Load()
	s.Workers = map[string]pool.WorkerSettings{pool.AllWorkers: {Engine: engine.SGLang}}
	the.Settings.Store(&s)
	transport := &upstream.Transport{HTTPTransport: &reverseproxy.HTTPTransport{Transport: &http.Transport{
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			dials.Add(1)
			return nil, errors.New("nobody is there")
		},
	}}}
	x := &Explainer{Dispatcher: &dispatch.Dispatcher{
		Pool: the, Metrics: dispatch.AllMetrics(), Logger: zap.NewNop(),
		Client: upstream.NewClient(new(reverseproxy.Handler), transport, func(string) string { return "" }),
	}}
	prompt := `{"prompt":"` + strings.Repeat("x", 1000) + `","nvext":{"annotations":["query_instance_id"]}}`
	for _, bodies := range []int64{body.MaxBytes - 1000, 0} {
		the.Memory.Held.Store(0)
		of, whole := api.For("/v1/completions"), body.NewBuffer(int64(len(prompt)))
		whole.Data = append(whole.Data[:0], prompt...)
		the.Memory.Count(whole)
		req, err := api.Parse(of, whole.Data, api.Options{TextBlock: s.TextBlock, BlockSize: s.BlockSize})
		if err != nil {
			t.Fatal(err)
		}
		p := &plan.Plan{HTTP: httptest.NewRequest(http.MethodPost, "/v1/completions", nil), API: of, Request: req, Wishes: plan.Wishes{Ext: &plan.NoExt}, Content: plan.Content{Body: body.NewReplay(whole, whole.Data)}}
		the.Memory.Held.Add(bodies)
		ids := x.askTokens(p, the.Worker("127.0.0.1:1"))
		if ids != nil || (dials.Load() == 0) != (bodies > 0) {
			t.Errorf("%d bytes held: the worker was dialled %d times, the ids are %s", bodies, dials.Load(), ids)
		}
		p.Close()
		if held := the.Memory.Held.Load(); held != bodies {
			t.Errorf("then %d bytes are held, want %d", held, bodies)
		}
		the.Memory.Held.Add(-bodies)
	}
}
