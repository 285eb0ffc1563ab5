package dispatch

import (
	"bytes"
	"context"
	"errors"
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
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"

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
		want pool.OutcomeKind
	}{
		{reverseproxy.NewDialError(errors.New("dial tcp 10.0.0.1:8000: connect: connection refused")), pool.OutcomeRefused},
		{reverseproxy.NewDialError(errors.New("dial tcp 10.0.0.1:8000: i/o timeout")), pool.OutcomeUnreachable},
		{reverseproxy.NewDialError(errors.New("dial tcp: lookup gpu-1: no such host")), pool.OutcomeUnreachable},
		{reverseproxy.NewDialError(errors.New("dial tcp: lookup gpu-1 on 10.0.0.2:53: dial udp 10.0.0.2:53: connect: connection refused")), pool.OutcomeUnreachable},
		{reverseproxy.NewDialError(errors.New("dial tcp 10.0.0.1:8000: socket: too many open files")), pool.OutcomeLimited},
		{reverseproxy.NewDialError(errors.New("dial tcp 10.0.0.1:8000: connect: cannot assign requested address")), pool.OutcomeLimited},
		{errors.New("read tcp 10.0.0.2:1->10.0.0.1:8000: connection reset by peer"), pool.OutcomeBroken},
	} {
		o := d.judge(t.Context(), nil, false, v.err).outcome
		if o.Kind != v.want {
			t.Errorf("%v: outcome %d, want %d", v.err, o.Kind, v.want)
		}
		h.pool.Report(w, o)
		absent := h.pool.RecordOwnRequest(t.Context(), w, http.StatusOK, nil) && w.Health.Available(time.Now())
		if want := v.want != pool.OutcomeBroken; absent != want {
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
	one.dropBody()
	if got := h.pool.Memory.Held.Load(); got != m || one.Body != nil {
		t.Errorf("%d bytes are booked after one was let go, want %d", got, m)
	}
	one.dropBody() // again
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
