package dispatch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/queue"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

var (
	errRefused     = reverseproxy.NewDialError(errors.New("dial tcp 10.0.0.1:8000: connect: connection refused"))
	errReset       = errors.New("read tcp 10.0.0.2:1->10.0.0.1:8000: connection reset by peer")
	errNoMoreFiles = reverseproxy.NewDialError(errors.New("dial tcp 10.0.0.1:8000: socket: too many open files"))
)

// String returns what a verdict comes to, in a few words.
func (v *verdict) String() string {
	words := []string{[]string{"deliver", "retry", "fail", "put off"}[v.do]}
	if v.do == retry {
		words = append(words, v.reason)
	}
	words = append(words, []string{"none", "answered", "good", "refused", "unreachable", "broken", "busy", "errored", "limited"}[v.outcome.Kind])
	flags := len(words)
	for word, is := range map[string]bool{"suspect": v.suspect, "withheld": v.withheld, "blameless": v.blameless, "server-side": v.outcome.ServerSide} {
		if is {
			words = append(words, word)
		}
	}
	if slices.Sort(words[flags:]); v.outcome.Wait > 0 {
		words = append(words, v.outcome.Wait.String())
	}
	return strings.Join(words, " ")
}

// TestDecisions has one attempt end in each way, and says what follows. docs/reliability.md has the same table.
func TestDecisions(t *testing.T) {
	suspect := func(d *Dispatch) { d.suspects = 1 }
	limits := func(l Limits, change func(*Dispatch)) func(*Dispatch) {
		return func(d *Dispatch) {
			d.route.Limits = l
			if change != nil {
				change(d)
			}
		}
	}
	pinned := func(d *Dispatch) { d.fixed = &fixed{worker: d.attempt.Worker} }
	spent := func(d *Dispatch) {
		s := *d.Pool.Settings.Load()
		s.RetryBudget = new(pool.RetryBudget)
		d.Pool.Settings.Store(&s)
	}
	once := func(change func(*body.Once)) func(*Dispatch) {
		return func(d *Dispatch) {
			d.plan.Once = &body.Once{ReadCloser: http.NoBody}
			change(d.plan.Once)
		}
	}
	unplanned := func(d *Dispatch) { d.plan.API, d.plan.Request, d.plan.Repeatable, d.plan.Model = nil, nil, false, "" }
	longer := func(d *Dispatch) { d.attempt.Worker.Learn(engine.Info{ContextTokens: 100}) }
	backup := func(d *Dispatch) {
		d.attempt.Worker.Configure(worker.Settings{Role: string(engine.RoleBackup), Headers: map[string]string{"Authorization": "key"}})
	}
	theirs := func(d *Dispatch) {
		d.attempt.Worker.Configure(worker.Settings{Role: string(engine.RoleBackup), Headers: map[string]string{"Authorization": "{http.request.header.X}"}})
	}
	matching := func(d *Dispatch) {
		d.RetryMatch = caddyhttp.MatcherSets{{caddyhttp.MatchMethod{http.MethodPost}}}
		d.route.Limits = Limits{Retries: 2}
	}
	answer := func(status int, body string) *http.Response {
		return &http.Response{StatusCode: status, Status: fmt.Sprint(status), Header: make(http.Header), Body: io.NopCloser(strings.NewReader(body))}
	}
	after := func(resp *http.Response, name, value string) *http.Response {
		resp.Header.Set(name, value)
		return resp
	}
	const noModel, tooLong = `{"error":"the model does not exist"}`, `{"error":"longer than the context length"}`
	for name, v := range map[string]struct {
		resp   *http.Response
		err    error
		resent bool
		change func(*Dispatch)
		alone  bool // there is no other worker
		want   string
	}{
		"refused":                         {err: errRefused, want: "retry refused refused"},
		"refused, alone":                  {err: errRefused, alone: true, want: "fail refused"},
		"refused, the budget is spent":    {err: errRefused, change: spent, want: "retry refused refused"},
		"refused, sent before":            {err: errRefused, resent: true, want: "retry refused refused suspect"},
		"refused, not repeatable":         {err: errRefused, change: unplanned, want: "retry refused refused"},
		"unreachable":                     {err: reverseproxy.NewDialError(errors.New("dial tcp 10.0.0.1:8000: i/o timeout")), want: "retry refused unreachable"},
		"no name":                         {err: reverseproxy.NewDialError(errors.New("dial tcp: lookup gpu-1 on 10.0.0.2:53: dial udp 10.0.0.2:53: connect: connection refused")), want: "retry refused unreachable"},
		"no file for a connection":        {err: errNoMoreFiles, want: "retry refused limited"},
		"broken":                          {err: errReset, want: "retry broken broken suspect"},
		"broken, alone":                   {err: errReset, alone: true, want: "fail broken suspect"},
		"broken, as the one before":       {err: errReset, change: suspect, want: "fail broken suspect"},
		"broken, the budget is spent":     {err: errReset, change: spent, want: "fail broken suspect"},
		"broken, pinned":                  {err: errReset, change: pinned, want: "fail broken suspect"},
		"broken, not repeatable":          {err: errReset, change: unplanned, want: "fail broken suspect"},
		"broken, its body is sent":        {err: errReset, change: once(func(o *body.Once) { o.Touched.Store(true) }), want: "fail broken suspect"},
		"its client's body broke":         {err: errReset, change: once(func(o *body.Once) { o.Failed.Store(true) }), want: "fail none"},
		"its client left":                 {err: errReset, want: "fail none"},
		"broken, with limits":             {err: errReset, change: limits(Limits{Retries: 3}, suspect), want: "retry broken broken suspect"},
		"broken, alone with limits":       {err: errReset, alone: true, change: limits(Limits{Duration: time.Minute}, nil), want: "retry broken broken suspect"},
		"broken, the retries are used up": {err: errReset, change: limits(Limits{Retries: 3}, func(d *Dispatch) { d.attempts = 4 }), want: "fail broken suspect"},
		"broken, the time is over":        {err: errReset, change: limits(Limits{Duration: time.Minute}, func(d *Dispatch) { d.start = d.start.Add(-time.Hour) }), want: "fail broken suspect"},
		"broken, pinned with limits":      {err: errReset, change: limits(Limits{Retries: 3}, pinned), want: "fail broken suspect"},
		"late":                            {err: attempt.ErrFirstToken, want: "retry first_token broken suspect"},
		"drained":                         {err: attempt.ErrDrained, want: "retry drain none"},
		"an error of the router's":        {err: &api.Refusal{Err: errReset}, want: "fail none"},
		"a header that cannot be sent":    {err: errors.New("net/http: invalid header field value"), want: "fail none"},
		"retry_match of an error":         {err: errReset, alone: true, change: matching, want: "retry broken broken suspect"},
		"retry_match, the budget is spent": {err: errReset, change: func(d *Dispatch) {
			spent(d)
			matching(d)
		}, want: "retry retry_match broken suspect"},
		"retry_match of an answer it does not read": {resp: answer(500, ""), change: matching, want: "deliver errored server-side"},
		"busy":                           {resp: answer(429, ""), want: "retry 429 busy"},
		"busy for a time":                {resp: after(answer(503, ""), "Retry-After", "2"), want: "retry 503 busy 2s"},
		"busy, alone":                    {resp: answer(529, ""), alone: true, want: "deliver busy"},
		"busy, pinned":                   {resp: answer(503, ""), change: pinned, want: "deliver busy"},
		"busy, the budget is spent":      {resp: answer(503, ""), change: spent, want: "deliver busy"},
		"busy, after two that broke":     {resp: answer(503, ""), change: func(d *Dispatch) { d.suspects = 2 }, want: "deliver busy"},
		"an error":                       {resp: answer(500, ""), want: "deliver errored server-side"},
		"a proxy without its engine":     {resp: answer(502, ""), want: "retry 502 errored server-side suspect"},
		"the second such proxy":          {resp: answer(502, ""), change: suspect, want: "deliver errored server-side suspect"},
		"a wrong key":                    {resp: answer(401, ""), want: "deliver errored"},
		"a wrong request":                {resp: answer(400, ""), want: "deliver answered"},
		"an answer":                      {resp: answer(200, "{}"), want: "deliver answered"},
		"an answer that is not read":     {resp: after(answer(200, ""), "Content-Encoding", "br"), want: "deliver good"},
		"no answer to an inference":      {resp: answer(200, ""), change: unplanned, want: "deliver good"},
		"not found":                      {resp: answer(404, "no"), want: "deliver errored"},
		"no such model":                  {resp: answer(404, noModel), want: "retry 404 answered"},
		"no such model, alone":           {resp: answer(404, noModel), alone: true, want: "deliver answered"},
		"no such model, the budget":      {resp: answer(404, noModel), change: spent, want: "retry 404 answered"},
		"no such model, as a bad one":    {resp: answer(400, noModel), want: "retry 400 answered"},
		"too long":                       {resp: answer(400, tooLong), change: longer, want: "retry context answered"},
		"too long for all":               {resp: answer(400, tooLong), want: "deliver answered"},
		"too long in a longer context":   {resp: answer(413, tooLong), change: longer, alone: true, want: "deliver answered"},
		"too long, compressed":           {resp: after(answer(422, tooLong), "Content-Encoding", "gzip"), change: longer, want: "deliver answered"},
		"no such path":                   {resp: answer(404, ""), change: func(d *Dispatch) { d.plan.API, d.plan.Request = nil, nil }, want: "retry 404 answered"},
		"no such path, the budget":       {resp: answer(404, ""), change: func(d *Dispatch) { d.plan.API, d.plan.Request = nil, nil; spent(d) }, want: "deliver answered"},
		"a backup refuses the key":       {resp: answer(401, ""), change: backup, want: "retry 401 busy withheld 1m0s"},
		"a backup refuses it, alone":     {resp: answer(402, ""), change: backup, alone: true, want: "fail busy withheld 1m0s"},
		"a backup is busy":               {resp: after(answer(429, ""), "Retry-After", "7"), change: backup, want: "retry 429 busy withheld 7s"},
		"a backup refuses a client's":    {resp: answer(403, ""), change: theirs, want: "retry 403 answered blameless"},
		"a backup refuses theirs, alone": {resp: answer(403, ""), change: theirs, alone: true, want: "deliver answered blameless"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dials := []string{"a:1", "b:1"}
				if v.alone {
					dials = dials[:1]
				}
				h := testHandler(t, dials...)
				d, _ := plannedDispatch(t, h, 10)
				defer d.End()
				if d.Select(t.Context(), h.ReverseProxy.Upstreams) == nil {
					t.Fatal("no worker")
				}
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				if v.change != nil {
					v.change(d)
				}
				if name == "its client left" {
					leave()
				}
				given := ""
				if v.resp != nil {
					text, _ := io.ReadAll(v.resp.Body)
					given = string(text)
					v.resp.Body = io.NopCloser(bytes.NewReader(text))
				}
				got := d.judge(ctx, v.resp, v.resent, v.err)
				d.charge(&got, v.resp, v.err)
				d.matchRetry(&got, d.plan.HTTP.WithContext(ctx), v.resp)
				if got.String() != v.want {
					t.Errorf("%s, want %s", got.String(), v.want)
				}
				if v.resp != nil {
					if left, err := io.ReadAll(v.resp.Body); err != nil || string(left) != given {
						t.Errorf("the client gets %q of %q, error %v", left, given, err)
					}
				}
			})
		})
	}
}

// answers is a transport to workers that a test makes up.
type answers func(*http.Request) (*http.Response, error)

func (f answers) Send(req *http.Request) (*http.Response, error)      { return f(req) }
func (f answers) SendFresh(req *http.Request) (*http.Response, error) { return f(req) }

// answers has the workers answer by a function. No other request of the router's reaches them.
func (h *harness) answers(t *testing.T, by answers) {
	t.Helper()
	for dial := range h.settings.Upstreams {
		h.settings.Workers[dial] = worker.Settings{Dial: dial, Engine: "vllm"}
	}
	if err := h.dispatcher.Resume.Complete(); err != nil {
		t.Fatal(err)
	}
	nobody := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return nil, pool.ErrNoWorker }}
	h.dispatcher.Transport = by
	h.dispatcher.Client = upstream.NewClient(h.ReverseProxy, &upstream.Transport{
		HTTPTransport: &reverseproxy.HTTPTransport{Transport: nobody},
	}, func(string) (string, bool) { return "", true })
}

// serve does what Caddy's proxy does.
func (d *Dispatch) serve(t *testing.T) (*http.Response, error) {
	t.Helper()
	if d.Select(t.Context(), d.Proxy.Upstreams) == nil {
		return nil, errors.New("no upstreams available")
	}
	return d.RoundTrip(httptest.NewRequestWithContext(d.plan.HTTP.Context(), http.MethodPost, "http://w:1/v1/chat/completions", new(bytes.Buffer)))
}

// breaks is a body that breaks off.
type breaks struct{ io.Reader }

func (b breaks) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	if errors.Is(err, io.EOF) {
		err = errReset
	}
	return n, err
}

// TestAttemptsFollow sends requests to workers that answer one after the other. docs/reliability.md says how many are
// asked, and what the client gets.
func TestAttemptsFollow(t *testing.T) {
	const (
		chunk = `data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"TEXT"},"finish_reason":null}]}` + "\n\n"
		begun = "200 once"
	)
	// An answer is its status, and its text. A stream breaks off unless it has an end.
	answer := func(req *http.Request, say string) (*http.Response, error) {
		status, text, _ := strings.Cut(say, " ")
		resp := &http.Response{Status: say, Header: http.Header{"Content-Type": {"application/json"}}, ContentLength: -1}
		switch status {
		case "refused":
			return nil, errRefused
		case "broken":
			return nil, errReset
		case "never":
			<-req.Context().Done()
			return nil, req.Context().Err()
		case "events":
			resp.Header.Set("Content-Type", "text/event-stream")
			resp.Body = io.NopCloser(strings.NewReader(text + "\n\n"))
		case "200":
			resp.Header.Set("Content-Type", "text/event-stream")
			words, end := strings.CutSuffix(text, ".")
			if text = strings.Replace(chunk, "TEXT", words, 1); end {
				text += "data: [DONE]\n\n"
			}
			resp.Body = io.NopCloser(breaks{strings.NewReader(text)})
		default:
			resp.Body = io.NopCloser(strings.NewReader(text))
		}
		_, err := fmt.Sscan(strings.NewReplacer("plain", "200", "events", "200").Replace(status), &resp.StatusCode)
		return resp, err
	}
	for name, v := range map[string]struct {
		workers int
		limits  Limits
		answers []string      // the last one is also that of all others
		tries   int           // how many of them were asked
		took    time.Duration // by the router's own clock
		want    string        // what the client gets: a status, or a refusal's code
		text    string        // in it
		fails   bool          // the stream breaks
	}{
		"at once":                {workers: 2, answers: []string{"200 once."}, tries: 1, want: "200", text: "once"},
		"at another one":         {workers: 3, answers: []string{"503", "200 once."}, tries: 2, want: "200", text: "once"},
		"at the last one":        {workers: 4, answers: []string{"refused", "503", "broken", "200 once."}, tries: 4, want: "200", text: "once"},
		"all are busy":           {workers: 3, answers: []string{"503 first", "429 second", "503 third"}, tries: 3, want: "503", text: "third"},
		"busy and gone":          {workers: 3, answers: []string{"429 first", "refused"}, tries: 3, want: "429", text: "first"},
		"all are gone":           {workers: 3, answers: []string{"refused"}, tries: 3, want: api.CodeNoWorker},
		"two break":              {workers: 4, answers: []string{"broken"}, tries: 2, want: api.CodeFailed},
		"all are late":           {workers: 4, answers: []string{"never"}, tries: 2, took: 4 * time.Second, want: api.CodeTimeout},
		"one is late":            {workers: 2, answers: []string{"never", "200 once."}, tries: 2, took: 2 * time.Second, want: "200", text: "once"},
		"rounds":                 {workers: 2, limits: Limits{Retries: 4, Interval: time.Second}, answers: []string{"broken", "broken", "503", "503", "200 once."}, tries: 5, took: 2 * time.Second, want: "200", text: "once"},
		"rounds that are over":   {workers: 2, limits: Limits{Retries: 4, Interval: time.Second}, answers: []string{"broken"}, tries: 5, took: 2 * time.Second, want: api.CodeFailed},
		"rounds without an end":  {workers: 2, limits: Limits{Duration: 10 * time.Second, Interval: time.Second}, answers: []string{"refused"}, tries: 21, took: 10 * time.Second, want: api.CodeNoWorker},
		"another one lacks it":   {workers: 2, answers: []string{"404 no model", "200 once."}, tries: 2, want: "200", text: "once"},
		"all lack it":            {workers: 3, answers: []string{"404 no model"}, tries: 3, want: "404", text: "no model"},
		"no worker":              {answers: []string{"refused"}, want: api.CodeNoWorker},
		"the rest":               {workers: 2, answers: []string{begun, "200  upon."}, tries: 2, want: "200", text: "upon"},
		"the rest of the rest":   {workers: 3, answers: []string{begun, "200  upon", "200  a time."}, tries: 3, want: "200", text: "a time"},
		"the rest, later":        {workers: 4, answers: []string{begun, "503", "refused", "200  upon."}, tries: 4, want: "200", text: "upon"},
		"the rest is an answer":  {workers: 2, answers: []string{begun, "plain {}"}, tries: 2, want: "200", text: "once", fails: true},
		"the rest is an error":   {workers: 2, answers: []string{begun, "500 {}"}, tries: 2, want: "200", text: "once", fails: true},
		"the rest is not there":  {workers: 5, answers: []string{begun, "503 {}"}, tries: 4, want: "200", text: "once", fails: true},
		"the rest is its ruin":   {workers: 5, answers: []string{begun, "broken"}, tries: 3, want: "200", text: "once", fails: true},
		"the rest is late":       {workers: 3, answers: []string{begun, "never", "200  upon."}, tries: 3, took: 2 * time.Second, want: "200", text: "upon"},
		"no rest":                {workers: 3, answers: []string{begun, "plain {}", "200  upon."}, tries: 3, want: "200", text: "upon"},
		"a refusal of the rest":  {workers: 3, answers: []string{begun, "400 no", "200  upon."}, tries: 3, want: "200", text: "upon"},
		"another stream":         {workers: 3, answers: []string{begun, `events data: {"type":"message_start"}`, "200  upon."}, tries: 3, want: "200", text: "upon"},
		"only another stream":    {workers: 3, answers: []string{begun, `events data: {"type":"message_start"}`}, tries: 3, want: "200", text: "once", fails: true},
		"an error in the rest":   {workers: 3, answers: []string{begun, `events data: {"error":{"message":"no"}}`, "200  upon."}, tries: 3, want: "200", text: "upon"},
		"only an error":          {workers: 3, answers: []string{begun, `events data: {"error":{"message":"no"}}`}, tries: 3, want: "200", text: `{"error":{"message":"no"}}`}, // the engine's own stays
		"nobody else has a rest": {workers: 1, answers: []string{begun}, tries: 1, want: "200", text: "once", fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var dials []string
				for i := range v.workers {
					dials = append(dials, fmt.Sprintf("w%d:1", i))
				}
				h := testHandler(t, dials...)
				h.dispatcher.Limits, h.dispatcher.Timeouts.FirstToken = v.limits, caddy.Duration(2*time.Second)
				var asked []string
				h.answers(t, func(req *http.Request) (*http.Response, error) {
					text, _ := io.ReadAll(req.Body)
					asked = append(asked, string(text))
					return answer(req, v.answers[min(len(asked), len(v.answers))-1])
				})
				start := time.Now()
				d, _ := plannedDispatch(t, h, 10)
				d.plan.Request.Stream = true
				resp, err := d.serve(t)
				if errors.Is(err, attempt.ErrFirstToken) {
					err = caddyhttp.Error(http.StatusGatewayTimeout, err) // as Caddy's proxy has it
				}
				var got, text string
				if own, refused := errors.AsType[*api.Refusal](d.Settle(httptest.NewRecorder(), err)); refused {
					got = own.Code
				} else if err == nil {
					all, broke := io.ReadAll(resp.Body)
					if got, text = fmt.Sprint(resp.StatusCode), string(all); (broke != nil) != v.fails {
						t.Errorf("the answer ends with %v", broke)
					}
					if done, errs := strings.Count(text, "[DONE]"), strings.Count(text, `"error"`); v.answers[0] == begun && (done+errs != 1 || v.fails && errs != 1) {
						t.Errorf("the stream has %d ends and %d errors: %s", done, errs, text)
					}
				}
				if got != v.want || !strings.Contains(text, v.text) || len(asked) != v.tries || time.Since(start) != v.took {
					t.Errorf("after %v and %d tries %s, %s; want %s", time.Since(start), len(asked), got, text, v.want)
				}
				if v.answers[0] == begun && v.tries > 1 && !strings.Contains(asked[1], `"assistant","content":"once"`) {
					t.Errorf("asked for %s", asked[1])
				}
				d.End()
				if s := h.pool.Scheduler.Stats(); s.Leases != 0 || h.pool.Memory.Held.Load() != 0 {
					t.Errorf("%d leases and %d bytes are left", s.Leases, h.pool.Memory.Held.Load())
				}
			})
		})
	}
}

// pause is a silence in an answer.
type pause time.Duration

func (p *pause) Read([]byte) (int, error) {
	time.Sleep(time.Duration(*p))
	return 0, io.EOF
}

// TestPromisesAreCounted has answers of a class with a target of a second.
func TestPromisesAreCounted(t *testing.T) {
	const token, end = `data: {"choices":[{"index":0,"delta":{"content":"word"}}]}` + "\n\n", "data: [DONE]\n\n"
	for name, v := range map[string]struct {
		before time.Duration // the text
		text   string
		stream bool
		leaves time.Duration // the client, if not 0
		want   string
	}{
		"in time":                 {time.Second, token + end, true, 0, promiseKept},
		"late":                    {time.Second + time.Millisecond, token + end, true, 0, promiseLate},
		"without a token":         {2 * time.Second, end, true, 0, promiseLate},
		"without a token at once": {0, end, true, 0, ""},
		"its client left late":    {time.Hour, token, true, 2 * time.Second, promiseLate},
		"its client left at once": {time.Hour, token, true, time.Second, ""},
		"no stream":               {time.Hour, `{"choices":[{"index":0,"message":{"content":"word"},"finish_reason":"stop"}]}`, false, 0, promisePlain},
	} {
		synctest.Test(t, func(t *testing.T) {
			h := testHandler(t, "a:1")
			h.answers(t, func(*http.Request) (*http.Response, error) {
				from, header := io.MultiReader((*pause)(&v.before), strings.NewReader(v.text)), http.Header{"Content-Type": {"application/json"}}
				if v.stream {
					header.Set("Content-Type", body.EventStream)
				}
				return &http.Response{StatusCode: http.StatusOK, Header: header, Body: io.NopCloser(from), ContentLength: -1}, nil
			})
			d, _ := plannedDispatch(t, h, 10)
			d.plan.Request.Stream, d.plan.Class, d.plan.TTFT = v.stream, &queue.Class{Name: "chat", TTFT: time.Second}, time.Second
			resp, err := d.serve(t)
			if err != nil {
				t.Fatal(err)
			}
			if time.Sleep(v.leaves); v.leaves == 0 {
				_, err = io.Copy(io.Discard, resp.Body)
			}
			_ = d.Settle(httptest.NewRecorder(), err)
			d.End()
			want := map[string]int64{v.want: 1}
			if delete(want, ""); !maps.Equal(h.pool.Outcomes.Recent(time.Now())["chat"], want) {
				t.Errorf("%s: counted %v, want %v", name, h.pool.Outcomes.Recent(time.Now()), want)
			}
		})
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
