package dispatch

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
	"testing/synctest"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/resume"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// TestLimitsAreTheOperators counts attempts and time.
func TestLimitsAreTheOperators(t *testing.T) {
	long, short := time.Now().Add(-time.Hour), time.Now().Add(time.Hour) // begun so long ago; not yet
	for _, v := range []struct {
		l        Limits
		start    time.Time
		attempts int
		allowed  bool
		set      bool
	}{
		{Limits{}, long, 1000, true, false},
		{Limits{Interval: time.Second}, long, 1000, true, false},
		{Limits{Retries: 2}, long, 1, true, true},
		{Limits{Retries: 2}, long, 2, true, true},
		{Limits{Retries: 2}, long, 3, false, true},
		{Limits{Duration: time.Minute}, short, 1000, true, true},
		{Limits{Duration: time.Minute}, long, 1, false, true},
		{Limits{Duration: time.Minute, Retries: 2}, short, 2, true, true},
		{Limits{Duration: time.Minute, Retries: 2}, short, 3, false, true},
		{Limits{Duration: time.Minute, Retries: 2}, long, 1, false, true},
	} {
		if got := v.l.allow(v.start, v.attempts); got != v.allowed || v.l.Set() != v.set {
			t.Errorf("%+v after %d attempts: allowed %v, set %v", v.l, v.attempts, got, v.l.Set())
		}
	}
}

// TestStatusesMeanWhatTheyMean sorts statuses: another worker may serve the
// request, the worker may be ill, or neither.
func TestStatusesMeanWhatTheyMean(t *testing.T) {
	for status, want := range map[int][2]bool{
		200: {}, 400: {}, 422: {}, 429: {true, false}, 503: {true, true}, 529: {true, true}, 401: {false, true}, 404: {false, true}, 500: {false, true},
	} {
		if got := [2]bool{attempt.Retryable(status), attempt.WorkersFault(status)}; got != want {
			t.Errorf("status %d: retryable and the worker's fault %v, want %v", status, got, want)
		}
	}
}

// TestRetryAfterIsSeconds reads what workers ask for.
func TestRetryAfterIsSeconds(t *testing.T) {
	for value, want := range map[string]time.Duration{
		"": 0, "0": 0, "7": 7 * time.Second, "3600": time.Hour, "3601": 0, "9223372036854775807": 0, "99999999999999999999": 0,
		"-1": 0, "1.5": 0, "soon": 0, "Wed, 21 Oct 2026 07:28:00 GMT": 0,
	} {
		if got := attempt.RetryAfter(http.Header{"Retry-After": {value}}); got != want {
			t.Errorf("Retry-After %q: %v, want %v", value, got, want)
		}
	}
}

// TestFailedConnectionsAreAbsences judges attempts that failed before and after the connection.
func TestFailedConnectionsAreAbsences(t *testing.T) {
	h := testHandler(t, "a:1")
	d, _ := plannedDispatch(t, h, 10)
	defer d.End()
	w := h.pool.Worker("a:1")
	d.attempt = newTestTry(d, w)
	d.attempt.Leave(false, nil)
	for _, v := range []struct {
		err  error
		want worker.OutcomeKind
	}{
		{reverseproxy.NewDialError(errors.New("dial tcp 10.0.0.1:8000: connect: connection refused")), worker.OutcomeRefused},
		{reverseproxy.NewDialError(errors.New("dial tcp 10.0.0.1:8000: i/o timeout")), worker.OutcomeUnreachable},
		{reverseproxy.NewDialError(errors.New("dial tcp: lookup gpu-1: no such host")), worker.OutcomeUnreachable},
		{reverseproxy.NewDialError(errors.New("dial tcp: lookup gpu-1 on 10.0.0.2:53: dial udp 10.0.0.2:53: connect: connection refused")), worker.OutcomeUnreachable},
		{reverseproxy.NewDialError(errors.New("dial tcp 10.0.0.1:8000: socket: too many open files")), worker.OutcomeLimited},
		{reverseproxy.NewDialError(errors.New("dial tcp 10.0.0.1:8000: connect: cannot assign requested address")), worker.OutcomeLimited},
		{errors.New("read tcp 10.0.0.2:1->10.0.0.1:8000: connection reset by peer"), worker.OutcomeBroken},
	} {
		o := d.judge(t.Context(), nil, false, v.err).outcome
		if o.Kind != v.want {
			t.Errorf("%v: outcome %d, want %d", v.err, o.Kind, v.want)
		}
		h.pool.Report(w, o)
		absent := h.pool.RecordOwnRequest(t.Context(), w, http.StatusOK, nil) && w.Health.Available(time.Now())
		if want := v.want != worker.OutcomeBroken; absent != want {
			t.Errorf("%v: an answer removes the mark: %v", v.err, absent)
		}
	}
}

// plannedDispatch plans a chat of about size bytes, and returns the memory that its
// body takes.
func plannedDispatch(t *testing.T, h *harness, size int) (*Dispatch, int64) {
	t.Helper()
	body := []byte(`{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("x", size) + `"}]}`)
	r := httptest.NewRequest(http.MethodPost, "/v1/chat/completions", bytes.NewReader(body))
	r = r.WithContext(context.WithValue(r.Context(), caddy.ReplacerCtxKey, caddy.NewReplacer()))
	h.adopt()
	p, err := h.reader.Read(r)
	if err != nil {
		t.Fatal(err)
	}
	d, err := testDispatcher(h).Begin(p, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if d.Body == nil {
		return d, 0
	}
	return d, int64(cap(d.Body.Buffer.Data))
}

// TestBodiesAreOnTheBooksWhileTheyAreKept counts the pool's bytes.
func TestBodiesAreOnTheBooksWhileTheyAreKept(t *testing.T) {
	h := testHandler(t, "a:1")
	one, n := plannedDispatch(t, h, 1000)
	two, m := plannedDispatch(t, h, 5000)
	if got := h.pool.Memory.Held.Load(); got != n+m {
		t.Errorf("%d bytes are booked, want %d", got, n+m)
	}
	one.takeBody().Done()
	if got := h.pool.Memory.Held.Load(); got != m || one.Body != nil {
		t.Errorf("%d bytes are booked after one was let go, want %d", got, m)
	}
	one.takeBody().Done() // again
	one.End()
	if got := h.pool.Memory.Held.Load(); got != m {
		t.Errorf("%d bytes are booked after that one's end, want %d", got, m)
	}
	two.End() // never let go before
	if got := h.pool.Memory.Held.Load(); got != 0 {
		t.Errorf("%d bytes are booked after both have ended", got)
	}
}

// TestTooManyBodiesAreStreamedThrough fills the bound on bodies in memory.
func TestTooManyBodiesAreStreamedThrough(t *testing.T) {
	h := testHandler(t, "a:1")
	h.pool.Memory.Held.Store(body.MaxBytes())
	d, _ := plannedDispatch(t, h, 1<<20)
	if d.plan.Fallback != plan.FallbackMemory || d.Body != nil || d.plan.Once == nil {
		t.Errorf("fallback %q, a body: %v, a stream: %v", d.plan.Fallback, d.Body != nil, d.plan.Once != nil)
	}
	d.End()
	if got := h.pool.Memory.Held.Load(); got != body.MaxBytes() {
		t.Errorf("%d bytes are booked, want as many as before", got)
	}
}

// TestWithoutUpstreamsThereIsARefusal has no upstreams. The proxy then returns an error of its own.
func TestWithoutUpstreamsThereIsARefusal(t *testing.T) {
	h := testHandler(t, "a:1")
	d, _ := plannedDispatch(t, h, 10)
	if up := d.Select(context.Background(), nil); up != nil {
		t.Errorf("got %v", up)
	}
	err := d.Settle(httptest.NewRecorder(), caddyhttp.Error(http.StatusServiceUnavailable, errors.New("no upstreams available")))
	if own, ok := errors.AsType[*api.Refusal](err); !ok || own.Status != http.StatusServiceUnavailable || own.Code != api.CodeNoWorker {
		t.Errorf("error %v", err)
	}
	d.End()
}

// TestStalledNotFoundIsClosed answers 404 and then sends only the beginning of the body.
func TestStalledNotFoundIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		from, to := io.Pipe()
		go to.Write([]byte(`{"detail":"Not`)) //nolint:errcheck // the reader closes
		begun := time.Now()
		resp := &http.Response{StatusCode: http.StatusNotFound, Body: from}
		if says(resp, "model") {
			t.Error("the model is missing")
		}
		if took := time.Since(begun); took != longestStall {
			t.Errorf("it took %v", took)
		}
		if head, err := io.ReadAll(resp.Body); string(head) != `{"detail":"Not` || err == nil {
			t.Errorf("the client gets %q, %v", head, err)
		}
	})
}

// TestOnlyStreamsThatCanMoveAreWatched asks for the watch of each kind of request.
func TestOnlyStreamsThatCanMoveAreWatched(t *testing.T) {
	for _, v := range []struct {
		workers []string
		stream  bool
		watched bool
	}{
		{[]string{"a:1"}, true, false}, // where else?
		{[]string{"a:1", "b:1"}, true, true},
		{[]string{"a:1", "b:1"}, false, false},
	} {
		h := testHandler(t, v.workers...)
		d, _ := plannedDispatch(t, h, 10)
		d.plan.Request.Stream = v.stream
		d.Select(context.Background(), h.ReverseProxy.Upstreams)
		r := httptest.NewRequest(http.MethodPost, "/", http.NoBody)
		h.dispatcher.Transport = answers(func(*http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: http.StatusBadRequest, Header: make(http.Header), Body: http.NoBody}, nil
		})
		if _, _, err := d.send(r); err != nil {
			t.Error(err)
		}
		if watched := d.attempt.Context() != nil; watched != v.watched {
			t.Errorf("%+v: watched %v", v, watched)
		}
		d.End()
	}
}

// answers is a transport to workers that a test makes up.
type answers func(*http.Request) (*http.Response, error)

func (f answers) Send(req *http.Request) (*http.Response, error)      { return f(req) }
func (f answers) SendFresh(req *http.Request) (*http.Response, error) { return f(req) }

// breaks is a body that breaks off.
type breaks struct{ io.Reader }

func (b breaks) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	if errors.Is(err, io.EOF) {
		err = errors.New("connection reset by peer")
	}
	return n, err
}

// TestRestMustBeAStream breaks off a stream. The other worker gives the rest, or something else.
func TestRestMustBeAStream(t *testing.T) {
	const chunk = `data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"TEXT"},"finish_reason":null}]}` + "\n\n"
	for name, v := range map[string]struct {
		status     int
		kind, rest string
		whole      bool
	}{
		"a stream":  {200, "text/event-stream", strings.Replace(chunk, "TEXT", " upon", 1) + "data: [DONE]\n\n", true},
		"an answer": {200, "application/json", `{"choices":[]}`, false},
		"an error":  {500, "application/json", `{}`, false},
		"busy":      {503, "application/json", `{}`, false},
	} {
		t.Run(name, func(t *testing.T) {
			h := testHandler(t, "a:1", "b:1")
			for _, dial := range []string{"a:1", "b:1"} {
				h.settings.Workers[dial] = worker.Settings{Dial: dial, Engine: "vllm"}
			}
			h.dispatcher.Resume = resume.Config{}
			if err := h.dispatcher.Resume.Complete(); err != nil {
				t.Fatal(err)
			}
			nobody := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return nil, pool.ErrNoWorker }}
			h.dispatcher.Client = upstream.NewClient(h.ReverseProxy, &upstream.Transport{
				HTTPTransport: &reverseproxy.HTTPTransport{Transport: nobody},
			}, func(string) (string, bool) { return "", true })
			var asked []string
			h.dispatcher.Transport = answers(func(req *http.Request) (*http.Response, error) {
				text, _ := io.ReadAll(req.Body)
				asked = append(asked, string(text))
				resp := &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"text/event-stream"}}, ContentLength: -1}
				if len(asked) == 1 {
					resp.Body = io.NopCloser(breaks{strings.NewReader(strings.Replace(chunk, "TEXT", "once", 1))})
					return resp, nil
				}
				resp.StatusCode, resp.Header["Content-Type"] = v.status, []string{v.kind}
				resp.Body = io.NopCloser(strings.NewReader(v.rest))
				return resp, nil
			})
			d, _ := plannedDispatch(t, h, 10)
			d.plan.Request.Stream = true
			if d.Select(t.Context(), h.ReverseProxy.Upstreams) == nil {
				t.Fatal("no worker")
			}
			req := httptest.NewRequestWithContext(d.plan.HTTP.Context(), http.MethodPost, "http://a:1/v1/chat/completions", new(bytes.Buffer))
			resp, err := d.RoundTrip(req)
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(resp.Body)
			if (err == nil) != v.whole || strings.Contains(string(got), "upon") != v.whole || !strings.Contains(string(got), "once") {
				t.Errorf("error %v, %s", err, got)
			}
			if len(asked) != 2 || !strings.Contains(asked[1], `"assistant","content":"once"`) {
				t.Errorf("asked %q", asked)
			}
			d.End()
			if s := h.pool.Scheduler.Stats(); s.Leases != 0 {
				t.Errorf("%d leases are left", s.Leases)
			}
		})
	}
}
