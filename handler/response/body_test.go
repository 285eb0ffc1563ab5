package response

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
)

// nobody is a listener that ignores what it is told.
type nobody struct{}

// Waits implements Listener.
func (nobody) Waits() {}

// Received implements Listener.
func (nobody) Received(time.Time, int, int) {}

// FirstToken implements Listener.
func (nobody) FirstToken(time.Time) {}

// ResponseID implements Listener.
func (nobody) ResponseID(string) {}

// Ended implements Listener.
func (nobody) Ended(Summary) {}

// told is a listener that writes down what it is told.
type told struct {
	nobody
	events []string
	tokens int
	sum    Summary
	ends   int
}

// FirstToken implements Listener.
func (l *told) FirstToken(time.Time) { l.events = append(l.events, "first") }

// Received implements Listener.
func (l *told) Received(_ time.Time, _, tokens int) {
	if tokens != l.tokens {
		l.tokens = tokens
		l.events = append(l.events, fmt.Sprint("tokens ", tokens))
	}
}

// ResponseID implements Listener.
func (l *told) ResponseID(id string) { l.events = append(l.events, id) }

// Ended implements Listener.
func (l *told) Ended(s Summary) {
	l.sum = s
	l.ends++
}

// testBody makes the body of an answer to a chat.
func testBody(t testing.TB, stream bool, from io.Reader, o Options) *Body {
	t.Helper()
	req, err := api.Parse(api.For("/v1/chat/completions"), fmt.Appendf(nil, `{"model":"m","stream":%v,"messages":[{"role":"user","content":"hi"}]}`, stream), api.Options{TextBlock: 64, BlockSize: 16})
	if err != nil {
		t.Fatal(err)
	}
	kind := "application/json"
	if stream {
		kind = "text/event-stream"
	}
	o.Request, o.Stream = req, stream
	return NewBody(&http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {kind}}, Body: io.NopCloser(from), ContentLength: -1}, o)
}

const (
	testRole  = `data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}` + "\n\n"
	testToken = `data: {"choices":[{"index":0,"delta":{"content":"word "}}]}` + "\n\n"
	testEnd   = `data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\n" + "data: [DONE]\n\n"
)

// TestBodyTellsWhatItShows reads answers to their end, and closes them.
func TestBodyTellsWhatItShows(t *testing.T) {
	reset := errors.New("connection reset")
	for _, v := range []struct {
		name   string
		stream bool
		sent   string
		err    error // that follows
		events []string
		want   Summary // its other fields are not compared
		event  bool    // the client gets an error event
	}{
		{"whole", true, testRole + testToken + testEnd, nil, []string{"first", "tokens 1"}, Summary{Whole: true, Chunks: 1}, false},
		{"breaks after its end", true, testToken + testEnd, reset, []string{"first", "tokens 1"}, Summary{Whole: true, Chunks: 1}, false},
		{"broken", true, testRole + testToken, reset, []string{"first", "tokens 1"}, Summary{Broken: reset, Chunks: 1}, true},
		{"client gone", true, testRole, context.Canceled, nil, Summary{Broken: context.Canceled}, false},
		{"no stream", true, "<html>", nil, nil, Summary{Whole: true, Garbled: true}, false},
		{"plain", false, `{"id":"x","choices":[{"message":{"content":"word"},"finish_reason":"stop"}]}`, nil, nil, Summary{Whole: true, Chunks: 1}, false},
		{"an error", false, `{"error":{"message":"no"}}`, nil, nil, Summary{Whole: true, Failed: true}, false},
		{"no JSON", false, "word", nil, nil, Summary{Whole: true, Garbled: true}, false},
	} {
		t.Run(v.name, func(t *testing.T) {
			from := iotest.OneByteReader(strings.NewReader(v.sent))
			if v.err != nil {
				from = io.MultiReader(from, iotest.ErrReader(v.err))
			}
			l := new(told)
			b := testBody(t, v.stream, from, Options{Listener: l})
			got, err := io.ReadAll(b)
			if !errors.Is(err, v.err) {
				t.Error(err)
			}
			b.Close()
			added := strings.TrimPrefix(string(got), v.sent)
			if !strings.HasPrefix(string(got), v.sent) || strings.Contains(added, "error") != v.event || v.event != strings.HasPrefix(added, "data: ") || !v.event && added != "" {
				t.Errorf("the client got %q", got)
			}
			s := l.sum
			if l.ends != 1 || s.Whole != v.want.Whole || s.Failed != v.want.Failed || s.Garbled != v.want.Garbled || s.Chunks != v.want.Chunks || !errors.Is(s.Broken, v.want.Broken) {
				t.Errorf("ended %d times: %+v", l.ends, s)
			}
			if !slices.Equal(l.events, v.events) {
				t.Errorf("told %q", l.events)
			}
		})
	}
}

// TestBodyAwaitsItsFirstToken reads streams up to their first token, and then to their end.
func TestBodyAwaitsItsFirstToken(t *testing.T) {
	reset := errors.New("connection reset")
	for _, v := range []struct {
		name string
		sent []string
		err  error
		held error
	}{
		{"a token", []string{testRole, testToken, testToken, testEnd}, nil, nil},
		{"breaks behind it", []string{testRole, testToken}, reset, nil},
		{"breaks before it", []string{testRole}, reset, reset},
		{"ends before it", []string{testRole}, nil, nil},
	} {
		var from []io.Reader
		for _, s := range v.sent {
			from = append(from, strings.NewReader(s))
		}
		if v.err != nil {
			from = append(from, iotest.ErrReader(v.err))
		}
		l := new(told)
		b := testBody(t, true, io.MultiReader(from...), Options{Listener: l})
		if err := b.AwaitToken(0); !errors.Is(err, v.held) {
			t.Errorf("%s: it awaited a token with %v", v.name, err)
		}
		if v.held != nil {
			continue
		}
		if l.ends != 0 {
			t.Errorf("%s: it ended before it was read", v.name)
		}
		got, err := io.ReadAll(b)
		if !errors.Is(err, v.err) || !strings.HasPrefix(string(got), strings.Join(v.sent, "")) || l.ends != 1 {
			t.Errorf("%s: %q, %v, ended %d times", v.name, got, err, l.ends)
		}
	}
}

// TestBodyAwaitsItsFirstTokenForAWhile passes a stream on whose first token is late. No byte
// is lost, and a small buffer of the client's is enough.
func TestBodyAwaitsItsFirstTokenForAWhile(t *testing.T) {
	from, engine := io.Pipe()
	go func() {
		_, _ = io.WriteString(engine, testRole)
	}()
	l := new(told)
	b := testBody(t, true, from, Options{Listener: l})
	if err := b.AwaitToken(50 * time.Millisecond); err != nil || l.ends != 0 {
		t.Fatalf("%v, ended %d times", err, l.ends)
	}
	go func() {
		_, _ = io.WriteString(engine, testToken+testToken)
		_, _ = io.WriteString(engine, testEnd)
		_ = engine.Close()
	}()
	got, err := io.ReadAll(iotest.OneByteReader(b))
	if want := testRole + testToken + testToken + testEnd; err != nil || string(got) != want || !l.sum.Whole {
		t.Errorf("%q, %v, %+v", got, err, l.sum)
	}
}

// TestBodyIsClosedBeforeItsFirstToken closes a stream while a read is under way.
func TestBodyIsClosedBeforeItsFirstToken(t *testing.T) {
	from, engine := io.Pipe()
	defer engine.Close()
	l := new(told)
	b := testBody(t, true, from, Options{Listener: l})
	b.from = from // which testBody does not close
	if err := b.AwaitToken(time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if err := b.Close(); err != nil || l.ends != 1 {
		t.Errorf("%v, ended %d times", err, l.ends)
	}
	if c := <-b.ahead; !errors.Is(c.err, io.ErrClosedPipe) {
		t.Errorf("the read ended with %v", c.err)
	}
}

// TestBodySaysWhyItWasCanceled breaks off when the answer's context has ended.
func TestBodySaysWhyItWasCanceled(t *testing.T) {
	late := errors.New("too late")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(late)
	l := new(told)
	b := testBody(t, true, iotest.ErrReader(context.Canceled), Options{Listener: l, Ctx: ctx})
	if _, err := io.ReadAll(b); !errors.Is(err, late) || !errors.Is(l.sum.Broken, late) {
		t.Error(err, l.sum.Broken)
	}
}

// tokens is a stream of tokens that does not end.
type tokens struct{}

// Read implements io.Reader.
func (tokens) Read(p []byte) (int, error) { return copy(p, testToken), nil }

// TestBodyAllocatesNothingPerEvent reads a long stream event by event.
func TestBodyAllocatesNothingPerEvent(t *testing.T) {
	b := testBody(t, true, tokens{}, Options{Listener: nobody{}})
	p := make([]byte, 4<<10)
	n := testing.AllocsPerRun(1000, func() {
		if _, err := b.Read(p); err != nil {
			t.Fatal(err)
		}
	})
	if n > 0 {
		t.Errorf("%v allocations for each event", n)
	}
}
