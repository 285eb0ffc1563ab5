package api

import (
	"bytes"
	"encoding/json"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

const (
	// maxAnswer bounds the plain JSON answer that is kept to be read at its
	// end, and the answer text that is hashed, in bytes. Of one with results
	// and no text only the end is looked at, where its usage is.
	maxAnswer, maxResult = 4 << 20, 64 << 10
	// unknown is a usage count that the engine has not said.
	unknown = -1
)

// Answer observes the answer to one attempt at a request. A plain answer is
// shown to Write, in pieces of any size, and a stream's events to Event; then
// Finish is called. An Answer keeps no reference to what it is shown and never
// fails: what it cannot read leaves it ignorant and nothing else. It is not safe
// for concurrent use.
type Answer struct {
	req    *Request
	stream bool
	ended  bool

	body []byte // of a plain answer
	lost bool   // the plain answer was too long to keep

	responseID string // the id of the response that it is, while it is not known ""

	legible bool // something in it was what the content type says

	first    bool
	chunks   int
	others   int  // events with JSON that have none of that
	bearing  bool // the event being read has content
	finished int  // choices with a finish_reason
	done     bool // [DONE]
	failed   bool

	prompt, completion, cached int64
	fresh, created             int64 // of the prompt, where they are said apart

	kept   kept   // for the turn that follows
	steady bool   // the prediction is still possible
	hash   Hasher // continues the prompt's; blocks are the answer's
	ids    idChain
	think  thinkWatch
	calls  callState
	grown  grownText
	repeat repeat
}

// NewAnswer returns the observer of one attempt. Stream says what the
// response is by its content type: text/event-stream, or else plain JSON.
func (r *Request) NewAnswer(stream bool) *Answer {
	a := &Answer{
		req: r, stream: stream, steady: r.steady,
		prompt: unknown, completion: unknown, cached: unknown, fresh: unknown, created: unknown,
	}
	if a.steady {
		a.hash = r.rest.follow()
		r.API.begin(a)
	}
	a.ids.begin(r)
	return a
}

// Event shows the next event of a stream.
func (a *Answer) Event(f rawjson.Frame) {
	if f.Failed {
		a.failed, a.legible = true, true
	}
	if f.Long {
		a.unlike()
		a.legible = true
	}
	a.event(f.Data)
}

// Write shows the next bytes of a plain answer.
func (a *Answer) Write(p []byte) {
	switch {
	case a.ended:
	case a.req.API.Work() == Prefill && len(a.body)+len(p) > 2*maxResult:
		a.lost, a.legible = true, true
		a.body = append(a.body, p[max(0, len(p)-maxResult):]...)
		a.body = append(a.body[:0], a.body[max(0, len(a.body)-maxResult):]...)
	case a.lost && a.req.API.Work() != Prefill:
	case len(a.body)+len(p) > maxAnswer:
		a.lost, a.body, a.steady, a.legible = true, nil, false, true
	default:
		a.body = append(a.body, p...)
	}
}

// Finish says that no more bytes will come, whether the answer is whole or
// not. A plain answer is read here. Calling it again does nothing.
func (a *Answer) Finish() {
	if a.ended {
		return
	}
	a.ended = true
	if a.stream {
		return
	}
	if !a.lost {
		a.body = bytes.TrimPrefix(a.body, []byte("\xEF\xBB\xBF"))
		a.event(a.body)
		a.legible = a.legible || json.Valid(a.body) // JSON, though none of this API
	} else {
		a.resultsEnd()
	}
	a.body = nil
}

// FirstToken is whether the answer has begun: something that the engine
// computed (text, reasoning, a tool call) has been seen. Roles, comments,
// progress reports and empty deltas are not that. For a plain answer it is
// known after Finish.
func (a *Answer) FirstToken() bool { return a.first }

// Chunks is the number of events with content so far: in most engines about
// the number of tokens.
func (a *Answer) Chunks() int { return a.chunks }

// Others is the number of events so far that have JSON and no content that is
// known, but for signs of life. A stream begins with a few; one of many is of a
// kind that cannot be read here.
func (a *Answer) Others() int { return a.others }

// Usage returns the engine's counts, in tokens: the prompt's, the answer's,
// and how many of the prompt's were cached. Each is -1 while the engine has
// not said it, which is not the same as 0.
func (a *Answer) Usage() (prompt, completion, cached int64) {
	return a.prompt, a.completion, a.cached
}

// Failed is whether the answer is, or a stream ended in, an error object, or
// the engine gave abort or error as the reason for its end.
func (a *Answer) Failed() bool { return a.failed }

// ResponseID returns the id under which the engine keeps this answer, as the
// answer of the responses API says it, in a stream with its first event. It is
// empty where there is none, or none yet.
func (a *Answer) ResponseID() string { return a.responseID }

// Legible is whether there was anything in the answer that its content type
// promises: in a stream an event with JSON or [DONE] in it, in a plain answer
// JSON from its beginning to its end. What was too long to be read counts. Ask
// after Finish.
func (a *Answer) Legible() bool { return a.legible }

// Done is whether the answer is complete: all its choices have a reason for
// their end, or the stream said so.
func (a *Answer) Done() bool {
	return a.done || a.finished >= a.req.answers*a.req.prompts
}

// Closed is whether a stream has said that nothing more comes: by [DONE], or
// the event that ends it in its API.
func (a *Answer) Closed() bool { return a.done }

// resultsEnd reads the usage at the end of a long answer with results.
func (a *Answer) resultsEnd() {
	key := []byte(`"usage":`)
	i := bytes.LastIndex(a.body, key)
	if i < 0 {
		return
	}
	v, ok := rawjson.ValueAt(a.body, rawjson.SkipSpace(a.body, i+len(key)))
	if ok && v.First(a.body) == '{' {
		a.usage(a.body, v)
		a.first, a.done = true, true
	}
}

// Prediction returns the blocks that the next turn's prompt begins with if the
// client sends this answer back: those of prompt and answer together. Call it after
// Finish. It is nil if
//   - the prompt is unknown, or the answer's ids are where the prompt is ids,
//   - there are several answers,
//   - the answer is unfinished, failed or too long,
//   - it does not come back in the same form, as with reasoning.
func (a *Answer) Prediction() []uint64 {
	switch {
	case a.failed || a.finished == 0 && !a.done:
	case a.ids.whole():
		return slices.Concat(a.req.Blocks, a.ids.blocks)
	case a.steady:
		return slices.Concat(a.req.Blocks, a.hash.blocks)
	}
	return nil
}

// PredictionPast returns how far the text of prompt and answer goes on behind the
// last block of the Prediction, in blocks.
func (a *Answer) PredictionPast() float32 {
	if !a.steady {
		return 0
	}
	return a.hash.past()
}

// event reads one event's data, or the body of a plain answer.
func (a *Answer) event(data []byte) {
	i := rawjson.SkipSpace(data, 0)
	if i >= len(data) {
		return
	}
	if data[i] != '{' && data[i] != '[' {
		a.unlike()
		return
	}
	if data[i] == '[' && string(bytes.TrimSpace(data[i:])) == "[DONE]" {
		a.done, a.legible = true, true
		return
	}
	a.bearing = false
	if a.again(data) || a.read(data, i) {
		a.legible = true
	}
	if a.bearing {
		a.first = true
		a.chunks++
	} else if !bytes.Contains(data, ping) && !bytes.Contains(data, progress) {
		a.others++
	}
}

// What engines send to show that they are there, while they compute nothing yet
// or not enough.
var ping, progress = []byte(`"ping"`), []byte(`"prompt_progress"`)

// read reads one event's data, which begins at data[i]. It returns false if it
// is malformed.
func (a *Answer) read(data []byte, i int) bool {
	repeats := a.stream && !a.repeat.off
	var before outcome
	if repeats {
		before = a.outcome()
		a.repeat.chunk, a.repeat.texts, a.repeat.text = false, 0, nil
	}
	ok := a.req.API.event(a, data, i)
	if !ok {
		a.unlike()
	}
	if repeats {
		a.remember(data, before)
	}
	a.repeat.text = nil // it is not ours
	return ok
}

// choice reads the object at b[i], an element of choices, and returns the
// index behind it, or -1 if it is malformed.
type choice func(a *Answer, b []byte, i int) int

// chunk reads the object at b[i] in the form that OpenAI's older APIs and many
// others have: choices, usage, error. It returns false if it is malformed.
func (a *Answer) chunk(b []byte, i int, read choice) bool {
	if b[i] != '{' {
		return false
	}
	a.repeat.chunk = true
	c := rawjson.Enter(b, i)
	for c.Next() {
		switch string(c.Key()) {
		case "choices":
			if b[c.At] != '[' {
				c.Value()
				continue
			}
			c.At = a.choices(b, c.At, read)
			if c.At < 0 {
				c.Fail(0)
			}
		case "usage":
			if v := c.Value(); v.First(b) == '{' {
				a.usage(b, v)
			}
		case "error":
			a.fault(b, c.Value())
		case "object":
			a.object(b, c.Value())
		default:
			c.Value()
		}
	}
	return c.Err == nil
}

// fault notes an error member, unless it is null.
func (a *Answer) fault(b []byte, v rawjson.Span) {
	if v.End > 0 && !v.IsNull(b) {
		a.failed = true
	}
}

// object notes SGLang's form of an error.
func (a *Answer) object(b []byte, v rawjson.Span) {
	if raw, ok := v.Str(b); ok && string(raw) == "error" {
		a.failed = true
	}
}

// choices reads the array at b[i] and returns the index behind it, or -1.
func (a *Answer) choices(b []byte, i int, read choice) int {
	c := rawjson.Enter(b, i)
	for c.Next() {
		if b[c.At] != '{' {
			c.Value()
			continue
		}
		c.At = read(a, b, c.At)
		if c.At < 0 {
			return -1
		}
	}
	if c.Err != nil {
		return -1
	}
	return c.At
}

// select0 gives up the prediction if the choice is not the first one.
func (a *Answer) select0(b []byte, index rawjson.Span) {
	if n, ok := integer(index.Of(b)); ok && n != 0 {
		a.unlike()
	}
}

// text reads a piece of the answer's text, as it stands between its quotes.
func (a *Answer) text(raw []byte) {
	a.repeat.texts++
	a.repeat.text = raw
	if len(raw) == 0 {
		return
	}
	a.bearing = true
	if a.kept.most > 0 {
		a.kept.add(raw)
	}
	if a.steady {
		a.hash.AddString(raw)
		a.bound()
	}
}

// bound gives up the prediction of an answer without end.
func (a *Answer) bound() {
	if len(a.hash.blocks)*a.hash.size > maxAnswer {
		a.steady = false
		a.hash.blocks = nil
	}
}

func (a *Answer) finishReason(b []byte, v rawjson.Span) {
	raw, ok := v.Str(b)
	if !ok || len(raw) == 0 {
		return
	}
	a.finished++
	if string(raw) == "abort" || string(raw) == "error" {
		a.failed = true
	}
}

// usage reads a usage object. Some engines send one with each chunk: a count
// that a later one leaves out stays.
func (a *Answer) usage(b []byte, v rawjson.Span) {
	var prompt, completion, details rawjson.Span
	v.Read(b, rawjson.To("prompt_tokens", &prompt), rawjson.To("completion_tokens", &completion),
		rawjson.To("prompt_tokens_details", &details))
	count(&a.prompt, b, prompt)
	count(&a.completion, b, completion)
	count(&a.cached, b, details.Get(b, "cached_tokens"))
}

func count(to *int64, b []byte, v rawjson.Span) {
	if n, ok := integer(v.Of(b)); ok && n >= 0 {
		*to = n
	}
}
