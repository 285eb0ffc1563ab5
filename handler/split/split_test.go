package split

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/response"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// request is a request that a test splits over the workers p:1 and d:1. It is its own owner.
type request struct {
	Request
	t       *testing.T
	offers  pool.Offers
	call    attempt.Call
	prefill *worker.Worker
	decode  *attempt.Attempt
	ended   []string // the phases, with their errors
	counts  response.Counts
}

func (r *request) Offers() pool.Offers                             { return r.offers }
func (r *request) Wants() pool.Wants                               { return pool.Wants{Rank: pool.AnyRank} }
func (r *request) Holds() bool                                     { return false }
func (r *request) IsFinal() bool                                   { return false }
func (r *request) ChargeRetry() bool                               { return true }
func (r *request) Renew() (pool.Offers, bool)                      { return r.offers, false }
func (r *request) Prefilled(_ *attempt.Attempt, c response.Counts) { r.counts = c }

func (r *request) SeatPrefill(_ context.Context, _ *pool.Wants, _ pool.Chooser, p *attempt.Attempt) error {
	if !r.Pool.SeatAt(r.prefill, r.prefill.Target(0), &kvscore.Request{}, &p.Seat) {
		return pool.ErrNoWorker
	}
	p.Call = &r.call
	return nil
}

func (r *request) PhaseEnded(name string, err error, _ time.Duration) {
	if err != nil {
		name += ": " + err.Error()
	}
	r.ended = append(r.ended, name)
}

// newRequest returns a completion of this body, whose prefill worker answers so.
func newRequest(t *testing.T, text string, serve http.HandlerFunc) *request {
	t.Helper()
	set := &pool.Settings{Upstreams: map[string]bool{"p:1": true, "d:1": true}, Workers: map[string]worker.Settings{
		"p:1": {Dial: "p:1", Engine: "vllm", Role: "prefill"}, "d:1": {Dial: "d:1", Engine: "vllm", Role: "decode"},
	}}
	p, err := pool.New("split", set.WithDefaults(), turn.NewCloser)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Destruct() })
	srv := httptest.NewServer(serve)
	t.Cleanup(srv.Close)
	transport := &upstream.Transport{HTTPTransport: &reverseproxy.HTTPTransport{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", srv.Listener.Addr().String())
		},
	}}}
	buf := body.NewBuffer(int64(len(text)))
	buf.Data = append(buf.Data[:0], text...)
	parsed, err := api.Parse(api.For("/v1/completions"), buf.Data, p.Hashing())
	if err != nil {
		t.Fatal(err)
	}
	r := &request{t: t, prefill: p.Worker("p:1")}
	of := &plan.Plan{API: parsed.API, Request: parsed, Model: "m", Hints: plan.Hints{Ext: new(nvext.Ext)}}
	of.Name, of.ShowsHealth = parsed.API.Name(), true
	of.HTTP = httptest.NewRequest(http.MethodPost, "http://d:1/v1/completions", bytes.NewReader(buf.Data)).WithContext(t.Context())
	var tables pool.Tables
	r.offers = tables.Offers(p, reverseproxy.UpstreamPool{{Dial: "p:1"}, {Dial: "d:1"}}, nil)
	r.Request = Request{
		Of: r, Pool: p, Plan: of, Policy: new(kvscore.LeastLoad), Rule: kvscore.SplitAlways, Metrics: r,
		Client: upstream.NewClient(new(reverseproxy.Handler), transport, func(string) (string, bool) { return "", true }),
	}
	r.call = attempt.Call{
		Runner: &attempt.Runner{Pool: p, Logger: zap.NewNop()}, Owner: r, Plan: of, Ready: time.Now(), Body: body.NewReplay(buf, buf.Data),
	}
	w := p.Worker("d:1")
	r.decode = new(attempt.Attempt)
	p.SeatAt(w, w.Target(0), &kvscore.Request{}, &r.decode.Seat)
	r.decode.Kind = worker.KindStream
	r.decode.Call = &r.call
	return r
}

const prompt = `{"model":"m","prompt":"once upon a time","stream":true}`

func says(status int, text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = w.Write([]byte(text))
	}
}

// TestPrefillPhase makes the prefill phase of a request, whose worker does well or fails.
func TestPrefillPhase(t *testing.T) {
	const transfer = `{"id":"1","object":"text_completion","choices":[{"index":0,"text":"a","finish_reason":"length"}],` +
		`"usage":{"prompt_tokens":9,"completion_tokens":1},"kv_transfer_params":{"do_remote_prefill":true,"remote_host":"h"}}`
	for name, v := range map[string]struct {
		serve http.HandlerFunc
		fails string
		whole bool // the next attempt is
	}{
		"well":        {says(200, transfer), "", false},
		"broken":      {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, "EOF", false},
		"busy":        {says(503, `{}`), "status 503", false},
		"wrong":       {says(400, `{"error":{"message":"no"}}`), "status 400", true},
		"no transfer": {says(200, `{"id":"1","object":"text_completion","choices":[{"index":0,"text":"a","finish_reason":"length"}]}`), errNoTransfer.Error(), true},
		"an error":    {says(200, `{"error":{"message":"no"}}`), errNoTransfer.Error(), true},
		"never":       {func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body); <-r.Context().Done() }, errPhaseSilent.Error(), false},
		"no end":      {says(200, strings.Repeat(" ", maxPrefillAnswer+1)), errNoTransfer.Error(), true},
		"ended there": {says(200, strings.Replace(transfer, `"length"`, `"stop"`, 1)[:strings.Index(transfer, `,"kv_tr`)-2]+`}`), "", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRequest(t, prompt, v.serve)
			if name == "never" {
				r.FirstToken = 100 * time.Millisecond
			}
			l, whole, err := r.Begin(r, r.decode, r.Plan.HTTP)
			if whole != (name == "ended there") {
				t.Errorf("the decode worker serves the whole request: %v", whole)
			}
			if (err == nil) != (v.fails == "") || err != nil && !strings.Contains(err.Error(), v.fails) {
				t.Fatalf("error %v, want %q", err, v.fails)
			}
			if err != nil {
				failed := l.Failure(nil, err)
				if failed == nil || failed.Reason != PhasePrefill || l.Broke(failed) != (name == "broken") {
					t.Errorf("failure %v", failed)
				}
				r.Failed(l, failed)
				if why := r.WhyWhole(); (why != "") != v.whole {
					t.Errorf("goes whole because %q", why)
				}
			}
			if name == "well" {
				if r.counts.Prompt != 9 || l.Prefilled().IsZero() || r.decode.Phase == nil || r.decode.Prefill != l.Prefill {
					t.Errorf("counts %+v, prefilled %v", r.counts, l.Prefilled())
				}
				var b attempt.Bounds
				l.Bound(&b)
				b.Begins(func(error) {})
				if b.Context == nil || b.First <= 0 {
					t.Errorf("bounds %+v", b)
				}
			}
			if !whole {
				l.Leave(true)
			}
			r.decode.Leave(false, nil)
			if s := r.Pool.Scheduler.Stats(); s.Leases != 0 || r.Pool.Memory.Held.Load() != 0 {
				t.Errorf("%d leases and %d bytes are left", s.Leases, r.Pool.Memory.Held.Load())
			}
			if len(r.ended) == 0 || strings.HasPrefix(r.ended[0], PhasePrefill) == false {
				t.Errorf("phases %q", r.ended)
			}
		})
	}
}

// TestTransferFails judges decode phases. Their workers are well.
func TestTransferFails(t *testing.T) {
	r := newRequest(t, prompt, says(200, ""))
	l := &Phases{split: &r.Request, Decode: r.decode, Prefill: &attempt.Attempt{Seat: pool.Seat{}}}
	l.Prefill.Worker = r.prefill
	l.Prefill.Call = &r.call
	for status, fails := range map[int]bool{200: false, 400: true, 429: false, 500: true, 503: false} {
		if failed := l.Failure(&http.Response{StatusCode: status}, nil); (failed != nil) != fails {
			t.Errorf("status %d: %v", status, failed)
		}
	}
	if l.Failure(nil, errors.New("reset")) != nil || l.Failure(nil, attempt.ErrFirstToken) == nil {
		t.Error("a decode worker that breaks, and one that is late")
	}
	if l.BrokeBefore(response.ErrEvent) == nil || l.BrokeBefore(errors.New("reset")) != nil {
		t.Error("before the prompt is there, an error event shows a failed transfer")
	}
	if why := r.WhyWhole(); why != "" {
		t.Errorf("whole because %q", why)
	}
	if r.Failed(l, transferFailed(attempt.ErrFirstToken)); r.WhyWhole() == "" {
		t.Error("the decode worker could serve the request whole")
	}
	if r.Again(); r.WhyWhole() != "" {
		t.Error("another round has no pair")
	}
}

// TestWholeRequestsSayWhy has requests that cannot be split.
func TestWholeRequestsSayWhy(t *testing.T) {
	for text, want := range map[string]string{
		prompt:                                      "",
		`{"model":"m","prompt":"x","n":2}`:          "several answers",
		`{"model":"m","prompt":"x","echo":true}`:    "only the engine",
		`{"model":"m","prompt":"x","max_tokens":1}`: "one token",
		`{"model":"m","prompt":["x","y"]}`:          "several answers",
	} {
		r := newRequest(t, text, says(200, ""))
		if why := r.WhyWhole(); (why == "") != (want == "") || !strings.Contains(why, want) {
			t.Errorf("%s: whole because %q, want %q", text, why, want)
		}
		if part := r.Part(&pool.Wants{Rank: pool.AnyRank}); (part == worker.Answer) != (want == "") {
			t.Errorf("%s: part %v", text, part)
		}
	}
}
