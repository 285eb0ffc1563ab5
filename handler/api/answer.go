package api

import (
	"bytes"
	"encoding/json"
	"math"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

const (
	// maxAnswer bounds the plain answer that is kept until its end, and the
	// answer text that is hashed, in bytes. Of longer results without text
	// only the last maxResult bytes are read, for their usage.
	maxAnswer, maxResult = 4 << 20, 64 << 10
	// unknown is a usage count that the engine has not reported.
	unknown = -1
)

// Answer observes the answer to one attempt. Give a plain answer to Write, in
// pieces of any size, or a stream's events to Event; then call Finish. An Answer
// keeps no reference to the bytes and never fails: it ignores what it cannot read.
// It is not safe for concurrent use.
type Answer struct {
	req    *Request
	stream bool
	ended  bool

	body []byte // of a plain answer
	lost bool   // the plain answer was too long to keep

	responseID string

	parseable bool // something in it had the form that the content type promises

	first   bool
	chunks  int
	others  int  // events with JSON, but without content
	bearing bool // the event being read has content
	outcome

	kept   kept   // for the next turn
	hash   hasher // continues the prompt's; blocks are the answer's
	args   []byte // of the last tool call
	ids    idChain
	think  thinkWatch
	grown  int      // the length of the text so far, where each event repeats it
	begins [16]byte // of that text
	repeat repeat
	track  track
}

// outcome is what a chunk may change besides the text.
type outcome struct {
	finished    int  // choices with a finish_reason
	done        bool // [DONE]
	failed      int  // the status of its error; 0 is none
	predictable bool // the prediction is still possible
	calls       callState

	prompt, completion, cached int64
	fresh, created             int64 // of the prompt, where they are reported apart
}

// NewAnswer returns the observer of one attempt. The response's content type
// decides stream: text/event-stream, or else plain JSON.
func (r *Request) NewAnswer(stream bool) *Answer {
	a := &Answer{
		req: r, stream: stream,
		outcome: outcome{
			predictable: r.predictable, prompt: unknown, completion: unknown, cached: unknown, fresh: unknown, created: unknown,
		},
	}
	if a.predictable {
		a.hash = r.rest.follow()
		r.API.begin(a)
	}
	a.ids.begin(r)
	return a
}

// Event shows the next event of a stream.
func (a *Answer) Event(f rawjson.Frame) {
	if f.Failed {
		a.fail(errorStatus(f.Data))
		a.parseable = true
	}
	if f.Long {
		a.unpredictable()
		a.parseable = true
	}
	if f.Long || f.UnknownField {
		a.pinStream(NotResumableUnread)
	}
	a.event(f.Data)
}

// Write shows the next bytes of a plain answer.
func (a *Answer) Write(p []byte) {
	results := a.req.API.Work() == Prefill
	switch {
	case a.ended || a.lost && !results:
	case results && len(a.body)+len(p) > 2*maxResult:
		a.lost, a.parseable = true, true
		a.body = append(a.body, p[max(0, len(p)-maxResult):]...)
		a.body = append(a.body[:0], a.body[max(0, len(a.body)-maxResult):]...)
	case len(a.body)+len(p) > maxAnswer:
		a.lost, a.body, a.predictable, a.parseable = true, nil, false, true
	default:
		a.body = append(a.body, p...)
	}
}

// Finish ends the answer, whole or not, and reads a plain one. Calling it again
// does nothing.
func (a *Answer) Finish() {
	if a.ended {
		return
	}
	a.ended = true
	switch {
	case a.stream:
	case a.lost:
		a.resultsEnd()
	default:
		a.body = bytes.TrimPrefix(a.body, []byte("\xEF\xBB\xBF"))
		a.event(a.body)
		a.parseable = a.parseable || json.Valid(a.body) // JSON, but not this API's
	}
	a.endCall()
	a.body = nil
}

// FirstToken returns whether the engine has sent something that it computed: text,
// reasoning, a tool call. Roles, comments, progress reports and empty deltas do
// not count. For a plain answer, ask after Finish.
func (a *Answer) FirstToken() bool { return a.first }

// Chunks returns the number of events with content so far: in most engines about
// the number of tokens.
func (a *Answer) Chunks() int { return a.chunks }

// Others returns the number of events so far that have JSON, but neither known
// content nor a sign of life. A stream begins with a few. Many mean that the
// Answer cannot read this kind of stream.
func (a *Answer) Others() int { return a.others }

// Usage returns the engine's counts, in tokens: the prompt's, the answer's, and
// the prompt's cached ones. Each is -1 until the engine reports it.
func (a *Answer) Usage() (prompt, completion, cached int64) {
	return a.prompt, a.completion, a.cached
}

// Failed returns whether the answer is an error object or the stream ended in
// one. It also returns true if the engine ended the answer for the reason abort
// or error.
func (a *Answer) Failed() bool { return a.failed != 0 }

// ErrorStatus returns the HTTP status that the answer's error stands for, which
// may be StatusAborted. It is 0 if the answer has not failed.
func (a *Answer) ErrorStatus() int { return a.failed }

// ResponseID returns the id under which the engine keeps this answer of the
// responses API. A stream's first event has it. It is empty until it is known.
func (a *Answer) ResponseID() string { return a.responseID }

// Parseable returns whether the answer has what its content type promises. A stream
// has an event with JSON or [DONE]; a plain answer is JSON and nothing else. An
// answer that was too long to read is parseable. Ask after Finish.
func (a *Answer) Parseable() bool { return a.parseable }

// Done returns whether the answer has ended. The stream has ended by its API's rules
// or with an error, or all choices have a reason for their end.
func (a *Answer) Done() bool { return a.done || a.finished >= a.req.Answers() }

// Closed returns whether nothing of the answer can follow. A stream has sent [DONE],
// the event that ends it in its API, or an error event. Or its engine has aborted it.
func (a *Answer) Closed() bool { return a.done || a.Failed() && a.Done() }

// resultsEnd reads the usage at the end of a long answer with results.
func (a *Answer) resultsEnd() {
	key := []byte(`"usage":`)
	i := bytes.LastIndex(a.body, key)
	if i < 0 {
		return
	}
	rest := a.body[i+len(key):]
	if v := rawjson.Document(rest); v.First(rest) == '{' {
		a.usage(rest, v)
		a.first, a.done = true, true
	}
}

// Prediction returns the blocks with which the next turn's prompt begins if the
// client sends this answer back: those of prompt and answer together. Call it
// after Finish. It is valid until another answer to the request has one. It is nil if
//   - the prompt is unknown, or it is token ids and the answer's ids are unknown,
//   - there are several answers,
//   - the answer is unfinished, failed or too long,
//   - it does not come back in the same form, as with reasoning.
func (a *Answer) Prediction() []uint64 {
	switch {
	case a.Failed() || a.finished == 0 && !a.done:
	case a.req.Kind == Tokens && a.ids.whole():
		return a.ids.after(a.req)
	case a.predictable:
		return append(a.req.Blocks, a.hash.blocks...) // in the room behind them, if there is enough
	}
	return nil
}

// PredictionPast returns how far the text of prompt and answer goes on behind the
// last block of the Prediction, in blocks.
func (a *Answer) PredictionPast() float32 {
	if !a.predictable {
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
		a.unpredictable()
		return
	}
	if data[i] == '[' && string(bytes.TrimSpace(data[i:])) == "[DONE]" {
		a.done, a.parseable = true, true
		return
	}
	a.bearing, a.ids.listed = false, false
	if a.track.on {
		a.seen(data)
	}
	if a.again(data) || a.read(data, i) {
		a.parseable = true
	}
	if a.bearing {
		a.first = true
		a.chunks++
		a.ids.lost = a.ids.lost || a.ids.on && !a.ids.listed
	} else if !bytes.Contains(data, ping) && !bytes.Contains(data, progress) {
		a.others++
	}
}

// Engines send these as signs of life before they have content.
var ping, progress = []byte(`"ping"`), []byte(`"prompt_progress"`)

// read reads one event's data from data[i] on. It returns false if it is
// malformed.
func (a *Answer) read(data []byte, i int) bool {
	before, ids, args := a.outcome, len(a.ids.ids), len(a.args)
	a.repeat.chunk, a.repeat.texts, a.repeat.text = false, 0, nil
	ok := a.req.API.event(a, data, i)
	if !ok {
		a.unpredictable()
	}
	a.remember(data, before == a.outcome && ids == len(a.ids.ids) && args == len(a.args))
	a.repeat.text = nil // it points into data
	return ok
}

// chunk reads the object at b[i] in the form of OpenAI's older APIs: choices,
// usage, error. It returns false if it is malformed.
func (a *Answer) chunk(b []byte, i int) bool {
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
			if c.At = a.each(b, c.At, a.choice); c.At < 0 {
				return false
			}
		case "usage":
			a.usage(b, c.Value())
		case "timings":
			a.timings(b, c.Value())
		case "error":
			a.fault(b, i, c.Value(), rawjson.Span{})
		case "object":
			a.fault(b, i, rawjson.Span{}, c.Value())
		default:
			c.Value()
		}
	}
	return c.Err == nil
}

// timings reads llama.cpp's report, which streams have without being asked for usage.
func (a *Answer) timings(b []byte, v rawjson.Span) {
	var computed, cached, predicted rawjson.Span
	v.Read(b, rawjson.To("prompt_n", &computed), rawjson.To("cache_n", &cached), rawjson.To("predicted_n", &predicted))
	n, ok := integer(computed.Of(b))
	k, known := integer(cached.Of(b))
	if !ok || !known || min(n, k) < 0 || max(n, k) > math.MaxInt32 || a.req.Answers() > 1 {
		return
	}
	a.prompt, a.cached = n+k, k
	count(&a.completion, b, predicted)
}

// each reads the objects in the array at b[i] and returns the index behind it, or -1. read
// returns the index behind one, or -1 if it is malformed.
func (a *Answer) each(b []byte, i int, read func(b []byte, i int) int) int {
	c := rawjson.Enter(b, i)
	for c.Next() {
		if b[c.At] != '{' {
			c.Value()
			continue
		}
		c.At = read(b, c.At)
		if c.At < 0 {
			return -1
		}
	}
	if c.Err != nil {
		return -1
	}
	return c.At
}

// choice reads an element of choices: a chat's delta or message, the text of completions, or
// vLLM's token ids. The prediction ends if it is not the first one.
func (a *Answer) choice(b []byte, i int) int {
	var index, text, message, finish, ids rawjson.Span
	end := rawjson.ReadAt(b, i, rawjson.To("index", &index), rawjson.To("delta", &message), rawjson.To("message", &message),
		rawjson.To("text", &text), rawjson.To("finish_reason", &finish),
		rawjson.To("token_ids", &ids), rawjson.To("response_token_ids", &ids))
	if end < 0 {
		return -1
	}
	a.ids.add(b, ids, 0)
	a.bearing = a.bearing || a.req.API.Name() == NameTokens && ids.HasContent(b)
	if n, ok := integer(index.Of(b)); ok && n != 0 {
		a.unpredictable()
	}
	if message.First(b) == '{' {
		a.delta(b, message)
	}
	if raw, ok := text.Str(b); ok {
		a.text(raw)
	}
	a.finishReason(b, finish)
	return end
}

// text reads a piece of the answer's text, given between its quotes.
func (a *Answer) text(raw []byte) {
	a.repeat.texts++
	a.repeat.text = raw
	if a.track.last = len(raw); len(raw) == 0 {
		return
	}
	a.bearing = true
	if a.kept.most > 0 {
		a.kept.add(raw)
	}
	if a.predictable {
		a.hash.addString(raw)
		a.bound()
	}
}

// bound ends the prediction of an answer that is too long.
func (a *Answer) bound() {
	if len(a.hash.blocks)*a.hash.size+len(a.args) > maxAnswer {
		a.predictable = false
		a.hash.blocks, a.args = nil, nil
	}
}

func (a *Answer) finishReason(b []byte, v rawjson.Span) {
	a.track.reasons = a.track.reasons || v.End > 0
	raw, ok := v.Str(b)
	if !ok || len(raw) == 0 {
		return
	}
	a.finished++
	switch string(raw) {
	case "abort":
		a.track.aborted = true
		a.blame(StatusAborted)
	case "error":
		a.track.aborted = true
		a.blame(500)
	}
}
