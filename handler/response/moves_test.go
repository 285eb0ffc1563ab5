package response

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/tidwall/gjson"
)

// world has engines that tell the same story, and a client that asks for it.
type world struct {
	*rand.Rand
	t      testing.TB
	path   string
	body   []byte
	req    *api.Request
	pieces []string // of the story

	streams int
	kinds   []string // of faults
	left    bool     // a move found no worker, or was not possible
	moved   int
	begun   bool // the client has text
}

var fuzzed = []struct{ path, body string }{
	{"/v1/chat/completions", `{"model":"m","stream":true,"stop":["##END"],"stream_options":{"include_usage":true},"messages":[{"role":"user","content":"q"}]}`},
	{"/v1/completions", `{"model":"m","stream":true,"max_tokens":999,"prompt":"q?"}`},
	{"/v1/messages", `{"model":"m","stream":true,"max_tokens":999,"messages":[{"role":"user","content":"q"}]}`},
	{"/v1/responses", `{"model":"m","stream":true,"input":"q"}`},
}

func newWorld(t testing.TB, seed uint64, kind int) *world {
	w := &world{Rand: rand.New(rand.NewPCG(seed, 44)), t: t}
	of := fuzzed[(kind%len(fuzzed)+len(fuzzed))%len(fuzzed)]
	w.path, w.body = of.path, []byte(of.body)
	var err error
	if w.req, err = api.Parse(api.For(w.path), w.body, api.Options{TextBlock: 64, BlockSize: 16}); err != nil {
		t.Fatal(err)
	}
	words := []string{"word", " and", "\n\n", ` "so"`, " žluťoučký", "日本", " \\tab\t", " 🙂", " ", "##"}
	for range 1 + w.IntN(12) {
		w.pieces = append(w.pieces, words[w.IntN(len(words))])
	}
	w.pieces = append(w.pieces, "end")
	return w
}

func (w *world) text() string { return strings.Join(w.pieces, "") }

// events returns the data of the events of an answer to the request, which goes on with what it has of
// the answer.
func (w *world) events(body []byte) (list []string) {
	v := gjson.ParseBytes(body)
	so := ""
	if m := v.Get("messages"); m.IsArray() {
		if last := m.Array()[len(m.Array())-1]; last.Get("role").Str == "assistant" {
			so = last.Get("content").Str
		}
	} else {
		_, so, _ = strings.Cut(v.Get("prompt").Str, "?")
	}
	text := w.text()
	if !strings.HasPrefix(text, so) {
		w.t.Fatalf("the engine is asked to go on with %q, not %q", so, text)
	}
	limit := v.Get("max_tokens").Int()
	id, n, at := fmt.Sprintf("id-%d", w.streams), 0, len(so)
	finish, event := "stop", func(format string, args ...any) { list = append(list, fmt.Sprintf(format, args...)) }
	switch w.path {
	case "/v1/chat/completions":
		event(`{"id":%q,"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}`, id)
	case "/v1/messages":
		event(`{"type":"message_start","message":{"id":%q,"usage":{"input_tokens":3}}}`, id)
		event(`{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}`)
	case "/v1/responses":
		event(`{"type":"response.created","response":{"id":%q,"status":"in_progress","error":null}}`, id)
		event(`{"type":"response.in_progress","response":{"id":%q,"status":"in_progress","error":null}}`, id)
	}
	for _, p := range w.pieces {
		if at >= len(p) {
			at -= len(p)
			continue
		}
		if limit > 0 && int64(n) == limit {
			finish = "length"
			break
		}
		piece, _ := json.Marshal(p[at:])
		at = 0
		n++
		event(map[string]string{
			"/v1/chat/completions": `{"id":` + fmt.Sprintf("%q", id) + `,"choices":[{"index":0,"delta":{"content":%s},"finish_reason":null}]}`,
			"/v1/completions":      `{"id":` + fmt.Sprintf("%q", id) + `,"choices":[{"index":0,"text":%s,"finish_reason":null}]}`,
			"/v1/messages":         `{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":%s}}`,
			"/v1/responses":        `{"type":"response.output_text.delta","delta":%s}`,
		}[w.path], piece)
	}
	switch w.path {
	case "/v1/chat/completions":
		event(`{"id":%q,"choices":[{"index":0,"delta":{},"finish_reason":%q}]}`, id, finish)
		event(`{"id":%q,"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":%d,"total_tokens":%d}}`, id, n, n+3)
		event("[DONE]")
	case "/v1/completions":
		event(`{"id":%q,"choices":[{"index":0,"text":"","finish_reason":%q}]}`, id, finish)
		event("[DONE]")
	case "/v1/messages":
		event(`{"type":"content_block_stop","index":0}`)
		event(`{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":%d}}`, n)
		event(`{"type":"message_stop"}`)
	case "/v1/responses":
		event(`{"type":"response.completed","response":{"id":%q,"status":"completed","error":null,"output":[]}}`, id)
	}
	return list
}

// errorEvents are events that end a stream, by the kind of their fault.
var errorEvents = map[string][]string{
	"engine": {
		`{"error":{"message":"EngineCore died","type":"InternalServerError","code":500}}`,
		`{"type":"error","error":{"type":"overloaded_error","message":"busy"}}`,
		`{"type":"response.failed","response":{"status":"failed","error":{"code":"server_error","message":"x"}}}`,
	},
	"client": {
		`{"error":{"message":"too long","type":"BadRequestError","code":400}}`,
		`{"type":"error","error":{"type":"invalid_request_error","message":"no"}}`,
		`{"type":"response.failed","response":{"status":"failed","error":{"code":"context_length_exceeded","message":"x"}}}`,
	},
}

// stream returns a stream of events, as an engine may send it, and how it ends.
func (w *world) stream(body []byte) io.ReadCloser {
	w.streams++
	newline := []string{"\n", "\r\n", "\r"}[w.IntN(3)]
	var b bytes.Buffer
	line := func(s string) { b.WriteString(s + newline) }
	noise := func() {
		for w.IntN(4) == 0 {
			switch w.IntN(7) {
			case 0:
				line(": ping")
				if w.IntN(2) == 0 {
					line("")
				}
				continue
			case 1:
				line("id: 5")
			case 2:
				line("retry: 10")
			case 3:
				line("event: ping")
			case 4:
				line("event")
			case 5:
				line("")
				continue
			case 6:
				line("data:")
			}
			line("")
		}
	}
	events := w.events(body)
	fault := []string{"", "reset", "reset", "end", "end", "engine", "client", "shape", "abort"}[w.IntN(9)]
	if w.streams == 1 && fault == "" || fault == "shape" && !w.begun { // a first engine may say what it wants
		fault = "reset"
	}
	at := len(events)
	if fault != "" {
		at = w.IntN(len(events))
	}
	for _, e := range events[:at] {
		noise()
		if w.IntN(4) == 0 {
			line("event: " + gjson.Get(e, "type").Str)
		}
		line([]string{"data: ", "data:"}[w.IntN(2)] + e)
		line("")
	}
	noise()
	kind := map[string]int{"/v1/messages": 1, "/v1/responses": 2}[w.path]
	switch fault {
	case "engine", "client":
		if w.IntN(3) == 0 {
			line("event: error")
		}
		line("data: " + errorEvents[fault][kind])
		line("")
		if w.IntN(2) == 0 {
			line("data: [DONE]")
			line("")
		}
	case "abort":
		if kind > 0 {
			fault = "reset"
			break
		}
		event := `{"id":"aborted","choices":[{"index":0,"delta":{},"text":"","finish_reason":"abort"}]}`
		if with := strings.Replace(events[at], `"finish_reason":null`, `"finish_reason":"abort"`, 1); w.IntN(2) == 0 && with != events[at] {
			event = with
		}
		line("data: " + event)
		line("")
		if w.IntN(2) == 0 {
			line("data: [DONE]")
			line("")
		}
	case "shape":
		line("data: " + []string{"what", "[1]", `{"x":1}`, "{\ndata: }", `{"cut`}[w.IntN(5)])
		line("")
	case "reset", "end":
		line("data: " + events[at])
		line("")
		whole := len(b.Bytes())
		b.Truncate(whole - w.IntN(min(whole, len(events[at])+12)))
	}
	w.kinds = append(w.kinds, fault)
	err := io.EOF
	if fault == "reset" || fault != "" && fault != "end" && w.IntN(3) == 0 {
		err = errors.New("connection reset")
	}
	return io.NopCloser(&pieces{w: w, rest: b.Bytes(), err: err})
}

// pieces reads in pieces.
type pieces struct {
	w    *world
	rest []byte
	err  error
}

func (r *pieces) Read(p []byte) (int, error) {
	if len(r.rest) == 0 {
		return 0, r.err
	}
	n := min(1+r.w.IntN(1+r.w.IntN(400)), len(r.rest), len(p))
	copy(p, r.rest[:n])
	if r.rest = r.rest[n:]; len(r.rest) == 0 && r.w.IntN(2) == 0 {
		return n, r.err
	}
	return n, nil
}

func (w *world) Track(a *api.Answer) { a.Track(w.body, 4<<10, false, nil) }
func (w *world) PinStream()          {}
func (w *world) Misfit([]byte) bool  { return false }

func (w *world) Move(why error, a *api.Answer) *Rest {
	if a.Closed() && !errors.Is(why, ErrEvent) || a.ErrorStatus() == 400 {
		w.t.Fatalf("a stream that has ended moves: %v", why)
	}
	w.begun = a.FirstToken()
	rest, reason := a.Rest(w.body)
	if errors.Is(why, ErrAborted) && w.IntN(2) == 0 || reason != "" || w.moved == 6 || w.IntN(12) == 0 {
		w.left = true
		return nil
	}
	w.moved++
	e := w.req.Editor(w.body)
	if !rest.Fits(w.req.Editor(w.body)) {
		w.t.Fatal("it does not fit")
	}
	rest.Ask(e, false)
	return &Rest{From: w.stream(e.Apply()), Splicer: rest.Splicer}
}

// sse reads a stream as clients do. The last event counts without its empty line, too.
func sse(stream string) (events []string) {
	stream = strings.ReplaceAll(strings.ReplaceAll(stream, "\r\n", "\n"), "\r", "\n")
	for event := range strings.SplitSeq(stream, "\n\n") {
		var data []string
		for line := range strings.SplitSeq(event, "\n") {
			if v, ok := strings.CutPrefix(line, "data:"); ok {
				data = append(data, strings.TrimPrefix(v, " "))
			}
		}
		if all := strings.Join(data, "\n"); all != "" {
			events = append(events, all)
		}
	}
	return events
}

// check looks at what a client has got.
func (w *world) check(out string, err error) {
	t := w.t
	const broken = `"code":"stream_broken"`
	text, done, ends, errs, usages := "", 0, 0, 0, 0
	ids := make(map[string]bool)
	fail := func(format string, args ...any) {
		t.Helper()
		t.Fatalf("%s, faults %q, error %v: %s\nstory %q\n%s", w.path, w.kinds, err, fmt.Sprintf(format, args...), w.text(), out)
	}
	events := sse(out)
	for i, e := range events {
		if e == "[DONE]" {
			done++
			continue
		}
		if !json.Valid([]byte(e)) {
			fail("event %q is no JSON", e)
		}
		v := gjson.Parse(e)
		kind := v.Get("type").Str
		if v.Get("error").IsObject() || kind == "response.failed" || v.Get("choices.0.finish_reason").Str == "abort" {
			if errs++; errs > 1 || len(events) > i+2 || len(events) == i+2 && (events[i+1] != "[DONE]" || strings.Contains(e, broken)) {
				fail("something follows %s", e)
			}
			continue
		}
		if done+ends > 0 {
			fail("%s follows the end", e)
		}
		if id := v.Get("id").Str + v.Get("message.id").Str + v.Get("response.id").Str; id != "" {
			ids[id] = true
		}
		text += v.Get("choices.0.delta.content").Str + v.Get("choices.0.text").Str + v.Get("delta.text").Str
		if kind == "response.output_text.delta" {
			text += v.Get("delta").Str
		}
		if v.Get("usage").IsObject() {
			usages++
		}
		if kind == "message_stop" || kind == "response.completed" {
			ends++
		}
	}
	last := w.kinds[len(w.kinds)-1]
	switch {
	case !strings.HasPrefix(w.text(), text):
		fail("text %q", text)
	case usages > 1 && w.path != "/v1/responses":
		fail("%d usages", usages)
	case len(ids) > 1 && w.path != "/v1/responses": // its events keep their ids
		fail("ids %v", ids)
	case (err != nil) != strings.Contains(out, broken):
		fail("an aborted connection has an error event, and only that")
	case err == nil && errs == 0 && text != w.text() && (!w.left || last != "end"):
		fail("text %q, and a clean end", text)
	case (last == "client" || last == "abort" && text != w.text()) && (err != nil || errs != 1):
		fail("the client does not get its error")
	case !w.left && err == nil && errs == 0 && done+ends == 0:
		fail("it goes on, and does not end")
	case !w.left && last == "" && errs > 0:
		fail("an error of a whole stream")
	}
}

// FuzzMoves has streams move from engine to engine, with all that server-sent events allow, and cuts at
// any byte. The client gets one stream of whole events, or one error event at its end.
func FuzzMoves(f *testing.F) {
	for seed := range uint64(400) {
		f.Add(seed, int(seed))
	}
	f.Fuzz(func(t *testing.T, seed uint64, kind int) {
		w := newWorld(t, seed, kind)
		header := http.Header{"Content-Type": {"text/event-stream"}}
		b := NewBody(&http.Response{StatusCode: http.StatusOK, Header: header, Body: w.stream(w.body), ContentLength: -1}, Options{
			Request: w.req, Stream: true, Listener: nobody{}, Mover: w, CutUsage: w.IntN(2) == 0, CutIDs: w.IntN(2) == 0,
		})
		var out []byte
		for p := make([]byte, 1+w.IntN(600)); ; {
			n, err := b.Read(p)
			out = append(out, p[:n]...)
			if err == nil {
				continue
			}
			if b.Close(); errors.Is(err, io.EOF) {
				err = nil
			}
			w.check(string(out), err)
			return
		}
	})
}
