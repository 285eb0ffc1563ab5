package dispatch

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// benchHandler returns a harness with one worker.
func benchHandler(b testing.TB) *harness { return testHandler(b, "127.0.0.1:1") }

// chatBody is a chat of several turns, of about size bytes.
func chatBody(b *testing.B, size int, stream bool) []byte {
	b.Helper()
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	rng := rand.New(rand.NewPCG(1, 2))
	text := func(n int) string {
		var s strings.Builder
		for s.Len() < n {
			fmt.Fprintf(&s, "word%d ", rng.IntN(1000))
			if rng.IntN(12) == 0 {
				s.WriteString("and \"said\".\n")
			}
		}
		return s.String()
	}
	messages := []message{{"system", text(size / 4)}}
	for written := size / 4; written < size-size/8; written += size / 8 {
		messages = append(messages, message{[]string{"assistant", "user"}[len(messages)%2], text(size / 10)})
	}
	body, err := json.Marshal(map[string]any{"model": "m", "stream": stream, "messages": messages})
	if err != nil {
		b.Fatal(err)
	}
	return body
}

// BenchmarkPlan reads a chat's body, parses it and makes its chain.
func BenchmarkPlan(b *testing.B) {
	for _, kib := range []int{1, 16, 256} {
		b.Run(fmt.Sprintf("%dKiB", kib), func(b *testing.B) {
			h := benchHandler(b)
			body := chatBody(b, kib<<10, false)
			r := httptest.NewRequest(http.MethodPost, "/v1/chat/completions", http.NoBody)
			r.ContentLength = int64(len(body))
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				r.Body = io.NopCloser(bytes.NewReader(body))
				p, err := h.reader.Read(r)
				if err != nil || len(p.Score.Blocks) == 0 {
					b.Fatal(p, err)
				}
				p.Body.Done()
			}
		})
	}
}

// pieces is a body that comes piece by piece, as a stream does.
type pieces struct {
	left [][]byte
}

// Read implements io.Reader.
func (p *pieces) Read(to []byte) (int, error) {
	if len(p.left) == 0 {
		return 0, io.EOF
	}
	n := copy(to, p.left[0])
	p.left = p.left[1:]
	return n, nil
}

// BenchmarkObserve reads along a stream of 100 chunks, each of which comes
// alone, from its header to the end of the lease.
func BenchmarkObserve(b *testing.B) {
	h := benchHandler(b)
	r := httptest.NewRequest(http.MethodPost, "/v1/chat/completions", bytes.NewReader(chatBody(b, 16<<10, true)))
	p, err := h.reader.Read(r)
	if err != nil {
		b.Fatal(err)
	}
	const chunks = 100
	var chunked [][]byte
	for i := range chunks {
		chunked = append(chunked, fmt.Appendf(nil, `data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":" word%d"},"logprobs":null,"finish_reason":null}]}`+"\n\n", i))
	}
	chunked = append(chunked,
		[]byte(`data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}`+"\n\n"),
		[]byte(`data: {"id":"c","choices":[],"usage":{"prompt_tokens":4000,"completion_tokens":100}}`+"\n\n"),
		[]byte("data: [DONE]\n\n"))
	repl := caddy.NewReplacer()
	buf := make([]byte, 32<<10)
	b.ReportAllocs()
	for b.Loop() {
		d := newTestDispatch(h, p)
		d.repl, d.returned = repl, true
		if d.Select(b.Context(), h.ReverseProxy.Upstreams) == nil {
			b.Fatal("no worker")
		}
		resp := &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"text/event-stream"}}, Body: io.NopCloser(&pieces{chunked})}
		d.observe(r, resp)
		for err = nil; err == nil; {
			_, err = resp.Body.Read(buf)
		}
		if report := d.End(); report.Outcome != outcomeOK || report.Chunks != chunks {
			b.Fatal(report.Outcome, report.Chunks)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/chunks, "ns/chunk")
}

// everyField is an nvext with every field, less the token ids.
const everyField = `{"greed_sampling":true,"use_raw_prompt":true,"annotations":["request_id","token_ids"],"backend_instance_id":1,"max_thinking_tokens":512,` +
	`"extra_fields":["worker_id","timing"],"prefill_worker_id":1,"decode_worker_id":2,"dp_rank":0,"prefill_dp_rank":0,` +
	`"agent_hints":{"priority":5,"strict_priority":1,"osl":100,"speculative_prefill":false,"latency_sensitivity":1.5},"request_timestamp_ms":1.7e12,` +
	`"session_control":{"session_id":"s","timeout":60},"session_params":{"id":"s"},"cache_control":{"type":"ephemeral","ttl":"1h"},"cache_salt":"salt",` +
	`"routing_constraints":{"required_taints":["a"],"preferred_taints":{"b":1}},"router":{"ttft_target":200,"itl_target":5},` +
	`"metadata_upload":{"url":"s3://b/x"},"allowed_worker_ids":[1,2],"router_config_override":{"router_temperature":0.5},"token_data":[1,2,3]}`

// attemptAt plans a request and returns that of an attempt, as the transport has
// it.
func (h *harness) attemptAt(tb testing.TB, body []byte) *http.Request {
	r := httptest.NewRequest(http.MethodPost, "/v1/chat/completions", io.NopCloser(bytes.NewReader(body)))
	r.ContentLength = int64(len(body))
	p, err := h.reader.Read(r)
	if err != nil {
		tb.Fatal(err)
	}
	w := h.pool.Worker("127.0.0.1:1")
	d := newTestAttempt(h, p, w)
	out := d.attempt.Build(r)
	out.Body.Close()
	d.Body.Done()
	return out
}

// TestPlanDoesNotGrowWithTheBody counts what a request with every field takes
// from the heap, of whatever length.
func TestPlanDoesNotGrowWithTheBody(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector empties pools at random")
	}
	h := benchHandler(t)
	count := func(tokens int) float64 {
		ids := strings.Repeat("1,", tokens-1) + "1"
		body := []byte(`{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("x", 64) + `"}],"nvext":` +
			strings.Replace(everyField, "[1,2,3]", "["+ids+"]", 1) + `}`)
		return testing.AllocsPerRun(20, func() { h.attemptAt(t, body) })
	}
	few, many := count(2000), count(200_000)
	// The memory of a long body grows in up to four steps. A step makes two allocations if
	// its sync.Pool is empty. The garbage collector may empty it.
	if many > few+8 {
		t.Errorf("%v allocations, with a hundred times the tokens %v", few, many)
	}
}

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

// TestChoosingAllocatesAsMuchAmongMany chooses among few workers and many.
func TestChoosingAllocatesAsMuchAmongMany(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector empties pools at random")
	}
	count := func(n int) float64 {
		var dials []string
		for i := range n {
			dials = append(dials, fmt.Sprintf("127.0.0.1:%d", i+1))
		}
		h := testHandler(t, dials...)
		h.policy = kvscore.NewDynamo()
		for _, w := range h.pool.All() {
			w.ModelMetrics("") // the first request of a worker makes its metrics
		}
		p := &plan.Plan{Wishes: plan.Wishes{Ext: &plan.NoExt}, Prompt: plan.Prompt{Score: kvscore.Request{Prompt: cache.Prompt{Tokens: 100}, Streamed: true}}}
		return testing.AllocsPerRun(200, func() {
			d := newTestDispatch(h, p)
			if d.Select(t.Context(), h.ReverseProxy.Upstreams) == nil {
				t.Fatal("no worker")
			}
			d.endAttempt(true)
		})
	}
	if few, many := count(2), count(512); many > few+1 {
		t.Errorf("%v allocations among 512 workers, %v among 2", many, few)
	}
}

func upstreamsOf(dials ...string) (list reverseproxy.UpstreamPool) {
	for _, dial := range dials {
		list = append(list, &reverseproxy.Upstream{Dial: dial, Host: new(reverseproxy.Host)})
	}
	return list
}
