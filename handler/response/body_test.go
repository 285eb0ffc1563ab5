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
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// nobody is a listener that ignores what it gets.
type nobody struct{}

func (nobody) Waits()                             {}
func (nobody) Received(time.Time, int, int, bool) {}
func (nobody) FirstToken(time.Time)               {}
func (nobody) ResponseID(string)                  {}
func (nobody) Ended(Summary)                      {}

// recorder is a listener that writes down what it gets.
type recorder struct {
	nobody
	events []string
	tokens int
	sum    Summary
	ends   int
}

func (l *recorder) FirstToken(time.Time) { l.events = append(l.events, "first") }

func (l *recorder) Received(_ time.Time, _, tokens int, _ bool) {
	if tokens != l.tokens {
		l.tokens = tokens
		l.events = append(l.events, fmt.Sprint("tokens ", tokens))
	}
}

func (l *recorder) ResponseID(id string) { l.events = append(l.events, id) }

func (l *recorder) Ended(s Summary) {
	l.sum = s
	l.ends++
}

// testBody makes the body of an answer to a chat.
func testBody(t testing.TB, stream bool, from io.Reader, o Options) *Body {
	t.Helper()
	body := strings.Replace(testRequest, "true", fmt.Sprint(stream), 1)
	req, err := api.Parse(api.For("/v1/chat/completions"), []byte(body), api.Options{TextBlock: 64, BlockSize: 16})
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
	testRequest = `{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}`
	testRole    = `data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}` + "\n\n"
	testToken   = `data: {"choices":[{"index":0,"delta":{"content":"word "}}]}` + "\n\n"
	testEnd     = `data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\n" + "data: [DONE]\n\n"
)

// TestPlainAnswerCarriesNVExt adds to answers that come in pieces. An error stays as it is, like an answer that
// is too long, or lacks its end.
func TestPlainAnswerCarriesNVExt(t *testing.T) {
	const workers = `"worker_id":{"prefill_worker_id":0,"prefill_dp_rank":0,"decode_worker_id":7,"decode_dp_rank":0}`
	long := `{"data":"` + strings.Repeat("x", maxPlain) + `"}`
	for in, want := range map[string]string{
		`{"choices":[{"finish_reason":"stop"}],"nvext":{"routed_experts":1}}`: `{"choices":[{"finish_reason":"stop"}],"nvext":{"routed_experts":1,` + workers + `}}`,
		`{"data":[]}` + "\n": `{"data":[],"nvext":{` + workers + "}}\n",
		`{"error":{}}`:       `{"error":{}}`,
		`{"choices":[`:       `{"choices":[`,
		`x`:                  `x`,
		``:                   ``,
		long:                 long,
	} {
		for _, from := range []io.Reader{strings.NewReader(in), iotest.HalfReader(strings.NewReader(in))} {
			l := new(recorder)
			b := testBody(t, false, from, Options{Listener: l, Extras: &Extras{Fields: nvext.FieldWorkerID, Worker: 7}})
			if got, err := io.ReadAll(b); string(got) != want || err != nil || l.sum.Skipped != (in == long) {
				t.Errorf("%.80s: %.200s, error %v, skipped %v", in, got, err, l.sum.Skipped)
			}
		}
	}
}

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
		{"no stream", true, "<html>", nil, nil, Summary{Whole: true, Malformed: true}, false},
		{"plain", false, `{"id":"x","choices":[{"message":{"content":"word"},"finish_reason":"stop"}]}`, nil, nil, Summary{Whole: true, Chunks: 1}, false},
		{"an error", false, `{"error":{"message":"no"}}`, nil, nil, Summary{Whole: true, Failed: true}, false},
		{"no JSON", false, "word", nil, nil, Summary{Whole: true, Malformed: true}, false},
	} {
		t.Run(v.name, func(t *testing.T) {
			from := iotest.OneByteReader(strings.NewReader(v.sent))
			if v.err != nil {
				from = io.MultiReader(from, iotest.ErrReader(v.err))
			}
			l := new(recorder)
			b := testBody(t, v.stream, from, Options{Listener: l})
			got, err := io.ReadAll(b)
			if !errors.Is(err, v.err) && !v.want.Whole {
				t.Error(err)
			}
			b.Close()
			added := strings.TrimPrefix(string(got), v.sent)
			if !strings.HasPrefix(string(got), v.sent) || strings.Contains(added, "error") != v.event || v.event != strings.HasPrefix(added, "data: ") || !v.event && added != "" {
				t.Errorf("the client got %q", got)
			}
			s := l.sum
			if l.ends != 1 || s.Whole != v.want.Whole || s.Failed != v.want.Failed || s.Malformed != v.want.Malformed || s.Chunks != v.want.Chunks || !errors.Is(s.Broken, v.want.Broken) {
				t.Errorf("ended %d times: %+v", l.ends, s)
			}
			if !slices.Equal(l.events, v.events) {
				t.Errorf("recorded %q", l.events)
			}
		})
	}
}

// TestStreamsEndWithWholeEvents cuts streams that no other engine goes on with within an event, behind
// an error, and behind an abort.
func TestStreamsEndWithWholeEvents(t *testing.T) {
	reset, broken := errors.New("connection reset"), api.BrokenEvent(nil)
	const failed, aborted = `data: {"error":{"message":"no","code":400}}` + "\n\n", `data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}` + "\n\n"
	long := "data: " + strings.Repeat("x", rawjson.MaxFrame)
	for _, v := range []struct {
		name, sent string
		err        error
		want       string
		wantErr    error
	}{
		{"in JSON", testToken + testToken[:40], reset, testToken + broken, reset},
		{"in a name", testToken + "dat", reset, testToken + broken, reset},
		{"in a comment", testToken + ": pi", reset, testToken + ": pi\n\n" + broken, reset},
		{"before the empty line", testToken + testToken[:len(testToken)-1], reset, testToken + testToken[:len(testToken)-1] + "\n\n" + broken, reset},
		{"in JSON, with a clean end", testToken + testToken[:40], nil, testToken + broken, io.ErrUnexpectedEOF},
		{"in a comment, with a clean end", testToken + ": pi", nil, testToken + ": pi", nil},
		{"in text, with a clean end", testToken + "data: wor", nil, testToken + "data: wor", nil},
		{"behind its end", testToken + "data: [DONE]", reset, testToken + "data: [DONE]", nil},
		{"behind an error", failed, reset, failed, nil},
		{"behind an abort", testToken + aborted, reset, testToken + aborted, nil},
		{"in an event too long to hold", testToken + long, reset, testToken + long, reset},
	} {
		from := io.Reader(strings.NewReader(v.sent))
		if v.err != nil {
			from = io.MultiReader(from, iotest.ErrReader(v.err))
		}
		l := new(recorder)
		got, err := io.ReadAll(testBody(t, true, from, Options{Listener: l}))
		if string(got) != v.want || !errors.Is(err, v.wantErr) || l.sum.Whole != (v.wantErr == nil) {
			t.Errorf("%s: %.300q, %v, %+v", v.name, got, err, l.sum)
		}
	}
}

// restOf is a mover that knows the rest of a stream.
type restOf struct {
	mover
	rest string
}

func (m *restOf) Move(_ error, a *api.Answer) *Rest {
	r, _ := a.Rest([]byte(testRequest))
	rest := m.rest
	if m.rest = ""; rest == "" || r == nil {
		return nil
	}
	return &Rest{From: io.NopCloser(strings.NewReader(rest)), Splicer: r.Splicer}
}

func (*restOf) Track(a *api.Answer) { a.Track([]byte(testRequest), 4<<10, false, nil) }

// TestAbortedWithText has an engine abort a stream in an event that has text, too.
func TestAbortedWithText(t *testing.T) {
	const aborted = `data: {"choices":[{"index":0,"delta":{"content":"and "},"finish_reason":"abort"}]}` + "\n\n"
	for name, v := range map[string]struct{ rest, want string }{
		"it goes on": {testRole + testToken + testEnd, strings.Replace(aborted, `"abort"`, "null", 1) + testToken + testEnd},
		"it ends":    {"", aborted + "data: [DONE]\n\n"},
	} {
		for _, whole := range []bool{true, false} {
			from := io.MultiReader(strings.NewReader(testRole+testToken), strings.NewReader(aborted), strings.NewReader("data: [DONE]\n\n"))
			if !whole {
				from = iotest.OneByteReader(from)
			}
			m := &restOf{rest: v.rest}
			got, err := io.ReadAll(testBody(t, true, from, Options{Listener: nobody{}, Mover: m}))
			if want := testRole + testToken + v.want; string(got) != want || err != nil {
				t.Errorf("%s: %v, %q, want %q", name, err, got, want)
			}
		}
	}
}

// TestRestThatIsTooLong joins a stream with an event that is too long to read. Its client gets none of it.
func TestRestThatIsTooLong(t *testing.T) {
	m := &restOf{rest: "data: " + strings.Repeat("x", 3*rawjson.MaxFrame)}
	got, err := io.ReadAll(testBody(t, true, strings.NewReader(testRole+testToken+testToken[:20]), Options{Listener: nobody{}, Mover: m}))
	if want := testRole + testToken + api.BrokenEvent(nil); string(got) != want || err == nil {
		t.Errorf("%v, %.300q", err, got)
	}
}

// TestBodySaysWhyItWasCanceled breaks off when the answer's context has ended.
func TestBodySaysWhyItWasCanceled(t *testing.T) {
	late := errors.New("too late")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(late)
	l := new(recorder)
	b := testBody(t, true, iotest.ErrReader(context.Canceled), Options{Listener: l, Ctx: ctx})
	if _, err := io.ReadAll(b); !errors.Is(err, late) || !errors.Is(l.sum.Broken, late) {
		t.Error(err, l.sum.Broken)
	}
}

// tokens is a stream of tokens that does not end.
type tokens struct{}

func (tokens) Read(p []byte) (int, error) { return copy(p, testToken), nil }

// mover keeps text, and finds the rest of no stream.
type mover struct{}

func (mover) Track(a *api.Answer)           { a.Track(nil, 4<<10, false, nil) }
func (mover) PinStream()                    {}
func (mover) Misfit([]byte) bool            { return false }
func (mover) Move(error, *api.Answer) *Rest { return nil }

// TestBodyAllocatesNothingPerEvent reads long streams event by event, also one that may move.
func TestBodyAllocatesNothingPerEvent(t *testing.T) {
	for _, m := range []Mover{nil, mover{}} {
		b := testBody(t, true, tokens{}, Options{Listener: nobody{}, Mover: m})
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
}
