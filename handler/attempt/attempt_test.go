package attempt

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"go.uber.org/zap"
)

// transport is one that a test makes up. fresh answers on new connections.
type transport struct {
	send  Sender
	fresh Sender
}

func (t transport) Send(req *http.Request) (*http.Response, error)      { return t.send(req) }
func (t transport) SendFresh(req *http.Request) (*http.Response, error) { return t.fresh(req) }

// owner is a request whose attempts are tested.
type owner struct{ final bool }

func (owner) Wants() pool.Wants   { return pool.Wants{} }
func (owner) Offers() pool.Offers { return pool.Offers{Table: new(pool.Table)} }
func (o owner) IsFinal() bool     { return o.final }

const chat = `{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}`

// newAttempt returns a streamed attempt over a transport.
func newAttempt(t testing.TB, over transport, o owner) (*Attempt, *http.Request) {
	t.Helper()
	set := &pool.Settings{Workers: map[string]worker.Settings{}, Upstreams: map[string]bool{"a:1": true}}
	p, err := pool.New("attempts", set.WithDefaults(), turn.NewCloser)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Destruct() })
	w := p.Worker("a:1")
	buf := body.NewBuffer(int64(len(chat)))
	buf.Data = append(buf.Data[:0], chat...)
	parsed, err := api.Parse(api.For("/v1/chat/completions"), buf.Data, p.Hashing())
	if err != nil {
		t.Fatal(err)
	}
	c := &Call{
		Runner: &Runner{Pool: p, Transport: over, Logger: zap.NewNop()}, Owner: o, Ready: time.Now(),
		Plan: &plan.Plan{ID: "r", API: parsed.API, Request: parsed, Model: "m", Hints: plan.Hints{Ext: new(nvext.Ext)}},
		Body: body.NewReplay(buf, buf.Data),
	}
	c.Plan.ShowsHealth = true
	a := &Attempt{Seat: pool.Seat{Attempt: worker.Attempt{Worker: w, Kind: worker.KindStream, Begun: time.Now()}, Target: w.Target(0)}}
	a.Call = c
	req := httptest.NewRequest(http.MethodPost, "http://a:1/v1/chat/completions", bytes.NewReader(buf.Data))
	return a, req.WithContext(t.Context())
}

func ok(kind string, from io.Reader) *http.Response {
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {kind}}, Body: io.NopCloser(from)}
}

// TestLateHeaderEndsTheAttempt has a worker that never answers.
func TestLateHeaderEndsTheAttempt(t *testing.T) {
	never := transport{send: func(req *http.Request) (*http.Response, error) {
		<-req.Context().Done()
		return nil, req.Context().Err()
	}}
	a, req := newAttempt(t, never, owner{})
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		_, _, err := a.Header(req.WithContext(t.Context()), &Bounds{First: time.Second})
		if !errors.Is(err, ErrFirstToken) || time.Since(begun) != time.Second {
			t.Errorf("error %v after %v", err, time.Since(begun))
		}
	})
	a, req = newAttempt(t, never, owner{})
	ctx, leave := context.WithCancel(t.Context())
	leave()
	if _, _, err := a.Header(req.WithContext(ctx), &Bounds{First: time.Hour}); !errors.Is(err, context.Canceled) {
		t.Errorf("a client that left: error %v", err)
	}
}

// TestSilentStreamEndsTheAttempt has a stream pause longer than it may, before its first token and later.
func TestSilentStreamEndsTheAttempt(t *testing.T) {
	over := transport{send: func(*http.Request) (*http.Response, error) { return ok("text/event-stream", new(bytes.Buffer)), nil }}
	for _, begun := range []bool{false, true} {
		a, req := newAttempt(t, over, owner{})
		synctest.Test(t, func(t *testing.T) {
			if _, _, err := a.Header(req.WithContext(t.Context()), &Bounds{First: 2 * time.Second, Idle: time.Second}); err != nil {
				t.Fatal(err)
			}
			want := ErrFirstToken
			if begun {
				a.StopFirst()
				a.Await(true)
				want = errStalled
			}
			goOn := a.Suspend() // time of the router's own does not count
			time.Sleep(time.Minute)
			goOn()
			if err := a.Context().Err(); err != nil {
				t.Errorf("begun %v: ended while it was suspended: %v", begun, err)
			}
			<-a.Context().Done()
			if err := context.Cause(a.Context()); !errors.Is(err, want) {
				t.Errorf("begun %v: error %v, want %v", begun, err, want)
			}
		})
	}
}

// TestClosedConnectionsAreTriedAnew has net/http send a request twice, on connections that the worker has
// closed. The last worker gets it once more, on a new connection.
func TestClosedConnectionsAreTriedAnew(t *testing.T) {
	closed := errors.New("the server closed an idle connection")
	for _, final := range []bool{false, true} {
		var sent []string
		a, req := newAttempt(t, transport{
			send: func(req *http.Request) (*http.Response, error) {
				again, err := req.GetBody()
				if err != nil {
					t.Fatal(err)
				}
				text, _ := io.ReadAll(again)
				sent = append(sent, string(text))
				if _, err = req.GetBody(); !errors.Is(err, errResent) {
					t.Errorf("it is sent a third time: %v", err)
				}
				return nil, closed
			},
			fresh: func(req *http.Request) (*http.Response, error) {
				text, _ := io.ReadAll(req.Body)
				sent = append(sent, string(text))
				return ok("application/json", new(bytes.Buffer)), nil
			},
		}, owner{final})
		resp, resent, err := a.Header(req, new(Bounds))
		if !resent || (err == nil) != final || (resp != nil) != final {
			t.Errorf("final %v: resent %v, error %v", final, resent, err)
		}
		for _, text := range sent {
			if text != chat {
				t.Errorf("the worker gets %q", text)
			}
		}
	}
}

// TestAttemptsAreClassified sorts what attempts show of their worker.
func TestAttemptsAreClassified(t *testing.T) {
	a, _ := newAttempt(t, transport{}, owner{})
	if o := a.Unanswered(ErrFirstToken); o.Kind != worker.OutcomeBroken || o.Begun != a.Begun {
		t.Errorf("no first token: outcome %+v", o)
	}
	if good, bad := a.Shows(worker.OutcomeGood, ""), a.Errored("status 500", true); good.Kind != worker.OutcomeGood || bad.Kind != worker.OutcomeErrored || !bad.ServerSide {
		t.Errorf("good %+v, bad %+v", good, bad)
	}
	a.Answers = a // another worker has answered
	if o := a.Shows(worker.OutcomeGood, ""); o.Kind != worker.OutcomeAnswered {
		t.Errorf("answered elsewhere: %+v", o)
	}
	a.Call.Plan.ShowsHealth = false
	if o := a.Errored("status 500", true); o.Kind != worker.OutcomeAnswered {
		t.Errorf("a request that shows nothing: %+v", o)
	}
}

// TestUnnamedModelStays has a worker with a name of its own for the model get a request that names none.
func TestUnnamedModelStays(t *testing.T) {
	a, req := newAttempt(t, transport{}, owner{})
	a.Worker.Configure(worker.Settings{Model: "engine"})
	for _, given := range []string{`""`, "null"} {
		data := []byte(`{"model":` + given + `,"messages":[]}`)
		parsed, err := api.Parse(a.Call.Plan.API, data, api.Options{TextBlock: 64})
		if err != nil {
			t.Fatal(err)
		}
		p := *a.Call.Plan
		p.Request, p.Model = parsed, ""
		buf := body.NewBuffer(int64(len(data)))
		buf.Data = append(buf.Data[:0], data...)
		a.Call.Plan, a.Call.Body = &p, body.NewReplay(buf, buf.Data)
		out := a.build(req, false)
		if got, err := io.ReadAll(out.Body); err != nil || !bytes.Equal(got, data) {
			t.Errorf("got %s, error %v, want %s", got, err, data)
		}
	}
}

// BenchmarkBuild builds a request whose model has the engine's name, and one whose model has a public name.
func BenchmarkBuild(b *testing.B) {
	a, req := newAttempt(b, transport{}, owner{})
	for _, public := range []string{"", "m"} {
		b.Run(public, func(b *testing.B) {
			if public != "" {
				a.Call.Plan.Public, a.Call.Plan.Model = public, "engine"
			}
			b.ReportAllocs()
			for b.Loop() {
				a.build(req, false)
			}
		})
	}
}
