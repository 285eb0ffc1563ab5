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

	"github.com/caddy-kvrouter/kvrouter/handler/resume"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

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
			nobody := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return nil, errNoWorker }}
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
