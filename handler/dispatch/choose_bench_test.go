package dispatch

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// BenchmarkChooseAmong chooses among many workers by the default policy, books a lease and
// ends it. The requests name no model, or one that all workers serve.
func BenchmarkChooseAmong(b *testing.B) {
	for _, n := range []int{8, 64, 512} {
		for _, model := range []string{"", "m"} {
			b.Run(fmt.Sprintf("%dworkers/model=%s", n, model), func(b *testing.B) {
				h, ups := benchHandler(b), make(reverseproxy.UpstreamPool, n)
				for i := range ups {
					ups[i] = &reverseproxy.Upstream{Dial: fmt.Sprintf("127.0.0.1:%d", i+1), Host: new(reverseproxy.Host)}
					w := h.pool.Worker(ups[i].Dial)
					if model != "" {
						h.pool.LearnModels(w, &worker.ModelList{IDs: map[string]bool{model: true}, Entries: []worker.ModelEntry{{ID: model}}}, zap.NewNop())
					}
				}
				h.ReverseProxy.Upstreams = ups
				h.policy = kvscore.NewDynamo()
				r := httptest.NewRequest(http.MethodPost, "/v1/chat/completions", bytes.NewReader(chatBody(b, 16<<10, true)))
				p, err := h.reader.Read(r)
				if err != nil {
					b.Fatal(err)
				}
				p.Model = model
				b.ReportAllocs()
				for b.Loop() {
					d := newTestDispatch(h, p)
					if d.Select(b.Context(), ups) == nil {
						b.Fatal("no worker")
					}
					d.endAttempt(true)
				}
			})
		}
	}
}
