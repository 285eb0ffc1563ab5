package speculative

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// answers is a worker that a test makes up.
type answers func(*http.Request) (*http.Response, error)

func (f answers) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

// TestPrefillGivesAllBack has an engine answer and fail. It gets one request, and nothing that is of the turn alone.
func TestPrefillGivesAllBack(t *testing.T) {
	with := func(status int, text string) answers {
		return func(*http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: status, Header: make(http.Header), Body: io.NopCloser(strings.NewReader(text))}, nil
		}
	}
	for _, c := range []struct {
		outcome string
		by      answers
	}{
		{outcomeOK, with(200, `{"choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"length"}]}`)},
		{outcomeFailed, with(503, "")},
		{outcomeFailed, func(*http.Request) (*http.Response, error) { return nil, io.ErrUnexpectedEOF }},
		{outcomeTimeout, nil},
	} {
		p, err := pool.New("speculative", (&pool.Settings{Workers: map[string]worker.Settings{"a:1": {Dial: "a:1", MaxRunning: 4}}, Upstreams: map[string]bool{"a:1": true}}).WithDefaults(), turn.NewCloser)
		if err != nil {
			t.Fatal(err)
		}
		w, sent, before := p.Worker("a:1"), 0, testutil.ToFloat64(total.WithLabelValues(p.Name, c.outcome))
		over := &reverseproxy.HTTPTransport{Transport: new(http.Transport)}
		over.Transport.RegisterProtocol("http", answers(func(req *http.Request) (*http.Response, error) {
			sent++
			text, _ := io.ReadAll(req.Body)
			const want = `{"model":"m","messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"well"},{"role":"user","content":"."}],"max_tokens":1,"stream":false}`
			if h := req.Header; string(text) != want || h.Get("Authorization") != "Bearer c" || h.Get("Traceparent")+h.Get("Idempotency-Key")+h.Get("X-Request-Id") != "" || req.GetBody != nil {
				t.Errorf("%s: sent %s with %v, want %s", c.outcome, text, h, want)
			}
			load, _ := p.Scheduler.Load(time.Now(), w.Target(0))
			if running, _ := w.Running(); running != 1 || load.Requests != 1 || load.PrefillTokens == 0 || w.Speculating() != 1 {
				t.Errorf("%s: %d requests run, booked %+v, %d prefills", c.outcome, running, load.Booked, w.Speculating())
			}
			if c.by == nil {
				<-req.Context().Done()
				return nil, req.Context().Err()
			}
			return c.by(req)
		}))
		client := upstream.NewClient(nil, &upstream.Transport{HTTPTransport: over}, func(string) (string, bool) { return "", true })
		buf := body.NewBuffer(1024)
		buf.Data = append(buf.Data[:0], `{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}],"max_tokens":50}`...)
		p.Memory.Count(buf)
		parsed, err := api.Parse(api.For("/v1/chat/completions"), buf.Data, p.Hashing())
		if err != nil {
			t.Fatal(err)
		}
		a := &attempt.Attempt{Seat: pool.Seat{Attempt: worker.Attempt{Worker: w}, Target: w.Target(0), Upstream: &reverseproxy.Upstream{Dial: "a:1"}}}
		a.Call = &attempt.Call{Body: body.NewReplay(buf, buf.Data), Plan: &plan.Plan{
			API: parsed.API, Request: parsed, Model: "m",
			Hints:  plan.Hints{Ext: &nvext.Ext{AgentHints: nvext.AgentHints{SpeculativePrefill: nvext.Some(true)}}},
			Prompt: plan.Prompt{Score: kvscore.Request{Prompt: cache.Prompt{Root: 1, Blocks: parsed.Blocks, Past: parsed.Past, Tokens: 10, Weights: cache.Same(4000)}}},
		}}
		req := httptest.NewRequest(http.MethodPost, "http://a:1/v1/chat/completions", http.NoBody)
		req.Header = http.Header{"Authorization": {"Bearer c"}, "Traceparent": {"t"}, "Idempotency-Key": {"k"}, plan.HeaderRequestID: {"r"}}
		synctest.Test(t, func(t *testing.T) {
			NewRunner(t.Context(), p, client, true).Answering(a, false, &http.Response{StatusCode: http.StatusOK})([]byte("well"), a.Call.Body, req)
			time.Sleep(maxDuration + time.Second)
		})
		if n := testutil.ToFloat64(total.WithLabelValues(p.Name, c.outcome)) - before; n != 1 || sent != 1 {
			t.Errorf("%s: counted %v times, %d requests sent", c.outcome, n, sent)
		}
		if running, _ := w.Running(); running != 0 || p.Scheduler.Stats().Leases != 0 || p.Memory.Held.Load() != 0 || w.Speculating() != 0 || !w.Health.Available(time.Now()) {
			t.Errorf("%s: %d requests, %d leases, %d bytes, %d prefills are left; health %+v", c.outcome, running, p.Scheduler.Stats().Leases, p.Memory.Held.Load(), w.Speculating(), w.Health.State(time.Now()))
		}
		_ = p.Destruct()
	}
}
