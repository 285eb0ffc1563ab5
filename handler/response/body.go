// Package response is the answer to a request as it streams past: its first token, its usage,
// its end, and the edits in it. It knows no worker and no plan: it reports what an answer
// shows to a [Listener].
package response

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// maxCount is the largest plausible count of tokens.
const maxCount = 1 << 31

// Listener gets what an answer shows while it passes. All calls come from the goroutine
// that reads the answer.
type Listener interface {
	// Waits says that a stream waits for the worker, until Received is called. The
	// time that a client takes is not the worker's.
	Waits()
	// FirstToken says that a stream has brought its first token.
	FirstToken(t time.Time)
	// ResponseID gives, once, the id under which the engine keeps the answer. A
	// stream has it long before its end.
	ResponseID(id string)
	// Received says that a read from the worker returned n bytes, and how many events
	// with tokens a stream has brought so far.
	Received(t time.Time, n, tokens int)
	// Ended is called once: the answer is whole, broke, or was closed early.
	Ended(s Summary)
}

// Summary is what became of an answer.
type Summary struct {
	Status  int
	Stream  bool // a stream of events
	Read    bool // it was read as the answer to an inference request
	Whole   bool // it came to its end
	Broken  error
	Failed  bool // it is an error of the engine, or a stream ended in one
	Garbled bool // it is not what its content type says
	Skipped bool // some of it was too long to carry nvext

	First, Last time.Time // a stream's first and latest token
	Chunks      int       // events with tokens
	Counts

	Blocks []uint64    // of prompt and answer, for the next turn; nil if unknown
	Past   float32     // how far both go on after the last of these, in blocks
	Chains []api.Chain // of prompt and answer; nil if their ids are unknown
	Text   []byte      // the answer's as JSON, if KeepText was set and the answer is whole
}

// Counts are the engine's counts of tokens: the prompt's, the answer's, and how many of
// the prompt's were cached. Each is -1 if it is missing or impossible.
type Counts struct {
	Prompt, Completion, Cached int64
}

// Computed returns whether the worker has certainly computed the prompt.
func (s *Summary) Computed() bool {
	return s.Status < 300 && !s.Garbled && (s.Whole && !s.Failed || !s.First.IsZero())
}

// Options say how an answer is read, and what the client gets of it.
type Options struct {
	Request  *api.Request // that is answered; nil if the answer is not read
	Stream   bool         // a stream of events
	CutUsage bool         // usage is taken out of a stream
	KeepText int          // the longest text that is kept, in bytes; 0 keeps none
	Extras   *Extras      // the nvext to add; nil if none
	// Ctx is the attempt's. Its cause says why a read failed; nil if unknown.
	Ctx      context.Context
	Listener Listener
}

// Body is an answer's body as the client gets it. It changes no byte, with three exceptions.
// It removes usage that the client did not ask for. It adds the nvext that the client asked
// for. It ends a broken stream with an error event.
type Body struct {
	Options
	Sum    Summary // its counts are set at the end
	from   io.ReadCloser
	reader *api.Answer // nil if the answer is not read

	promised   bool // its content type promises that it can be read
	extensible bool // an event can be added to its end
	named      bool // the listener has the response's id
	told       bool // the listener has the summary

	frames *rawjson.Framer // of a stream; nil for other answers
	added  *added          // the nvext that is added; nil if none
	edits  []rawjson.Edit
	tail   [4]byte // the last bytes that the client got; 0 where there are none
	rest   []byte  // bytes that the client gets next
	after  error   // what follows them
	early  error   // what ended the answer while AwaitToken read it

	ahead chan chunk // the result of a read that AwaitToken began; nil if none is under way
}

// NewBody makes the body of an answer. It removes the answer's Content-Length if the
// length may change.
func NewBody(resp *http.Response, o Options) *Body {
	b := &Body{Options: o, from: resp.Body}
	b.Sum = Summary{Status: resp.StatusCode, Stream: o.Stream, Read: o.Request != nil, Counts: Counts{-1, -1, -1}}
	if o.Request == nil {
		return b
	}
	b.reader = o.Request.NewAnswer(o.Stream)
	if o.KeepText > 0 {
		b.reader.KeepText(o.KeepText)
	}
	b.promised = resp.StatusCode == http.StatusOK && promises(body.MediaType(resp.Header))
	b.CutUsage = o.CutUsage && o.Stream
	b.added = b.additions()
	if b.CutUsage || b.added != nil {
		resp.Header.Del("Content-Length")
		resp.ContentLength = -1
	}
	if o.Stream {
		b.frames = &rawjson.Framer{Edits: b.CutUsage || b.added != nil && b.added.stream != nil}
	}
	b.extensible = o.Stream && resp.ContentLength < 0
	return b
}

// promises returns whether answers of a media type must be readable: streams of events
// and JSON. Answers to inference requests are never HTML, so that a page of HTML
// counts as unreadable JSON.
func promises(kind string) bool {
	return kind == body.EventStream || kind == "text/html" || body.IsJSON(kind)
}

func (b *Body) Read(p []byte) (int, error) {
	if len(b.rest) > 0 || b.after != nil {
		n := copy(p, b.rest)
		if b.rest = b.rest[n:]; len(b.rest) > 0 {
			return n, nil
		}
		b.rest = nil // only its memory is left
		return n, b.after
	}
	in, err := b.receive(p)
	out := b.pass(in, err)
	m := copy(p, out)
	b.after = err
	if m < len(out) {
		b.rest = slices.Clone(out[m:]) // it may be the framer's
		return m, nil
	}
	return m, err
}

// receive reads from the worker, into p if AwaitToken has no read under way.
func (b *Body) receive(p []byte) (in []byte, err error) {
	if b.early != nil {
		return nil, b.early
	}
	if !b.Stream {
		n, err := b.from.Read(p)
		return p[:n], err
	}
	b.Listener.Waits()
	if b.ahead != nil {
		c := <-b.ahead
		b.ahead, in, err = nil, c.data, c.err
	} else {
		var n int
		n, err = b.from.Read(p)
		in = p[:n]
	}
	if err != nil && b.Ctx != nil && b.Ctx.Err() != nil && !errors.Is(err, io.EOF) {
		err = context.Cause(b.Ctx) // HTTP/2 says only that the request was canceled
	}
	return in, err
}

// pass reads the next bytes of the answer, and returns what the client gets of them.
func (b *Body) pass(p []byte, err error) []byte {
	t, out, tokens := time.Now(), p, 0
	if b.reader != nil {
		out, tokens = b.readOn(t, p, err != nil)
	}
	b.Listener.Received(t, len(p), tokens)
	if b.added != nil {
		out = b.addTo(out, len(p) > 0, err != nil)
	}
	if b.extensible {
		b.keepTail(out)
	}
	if err != nil {
		out = b.end(out, err)
	}
	return out
}

// keepTail keeps the last bytes that the client gets.
func (b *Body) keepTail(out []byte) {
	n := len(b.tail)
	if len(out) >= n {
		b.tail = [4]byte(out[len(out)-n:])
		return
	}
	copy(b.tail[:], b.tail[len(out):])
	copy(b.tail[n-len(out):], out)
}

// end records why the answer ended. It returns what the client gets: out, and an error event
// after it if the stream broke (docs/reliability.md). Caddy's proxy then gets the error from
// Read, and aborts the client's connection with http.ErrAbortHandler.
func (b *Body) end(out []byte, err error) []byte {
	switch {
	case errors.Is(err, io.EOF):
		b.Finish()
	case b.reader != nil && b.Stream && b.reader.Closed():
		b.Finish() // the connection broke, the answer is whole
	default:
		b.Sum.Broken = err
		b.tell()
		if b.extensible && !errors.Is(err, context.Canceled) {
			return append(slices.Clip(out), api.BrokenEvent(b.Request.API, bytes.TrimLeft(b.tail[:], "\x00"))...)
		}
	}
	return out
}

// Finish records that the answer is whole.
func (b *Body) Finish() {
	b.Sum.Whole = true
	if b.reader != nil {
		b.reader.Finish()
		b.Sum.Garbled = b.promised && !b.reader.Legible()
	}
	b.tell()
}

func (b *Body) Close() error {
	b.tell()
	return b.from.Close()
}

// tell gives the listener the summary, once.
func (b *Body) tell() {
	if b.told {
		return
	}
	b.told = true
	if r := b.reader; r != nil {
		s := &b.Sum
		s.Failed, s.Chunks = r.Failed(), r.Chunks()
		s.Counts = b.usage()
		if s.Whole && !s.Garbled {
			b.tellID()
			s.Blocks, s.Past, s.Text, s.Chains = r.Prediction(), r.PredictionPast(), r.Text(), r.Chains()
		}
	}
	b.Listener.Ended(b.Sum)
}

func (b *Body) usage() Counts {
	believed := func(n, most int64) int64 {
		if n > most {
			return -1
		}
		return n
	}
	prompt, completion, cached := b.reader.Usage()
	prompt = believed(prompt, maxCount)
	return Counts{prompt, believed(completion, maxCount), believed(cached, prompt)}
}

// readOn reads the next bytes. It returns them with the events edited, and the number of
// events with tokens that a stream has brought so far.
func (b *Body) readOn(t time.Time, p []byte, last bool) (out []byte, tokens int) {
	if !b.Stream {
		b.reader.Write(p)
		return p, 0
	}
	before := b.reader.Chunks()
	if f, ok := b.frames.Whole(p); ok && !last {
		b.event(t, f)
	} else {
		b.frames.Write(p, last)
		for f, ok := b.frames.Next(); ok; f, ok = b.frames.Next() {
			b.event(t, f)
			if b.frames.Edits {
				b.edit(f)
			}
		}
	}
	b.tellID()
	if tokens = b.reader.Chunks(); tokens != before {
		b.Sum.Last = t
	}
	if b.frames.Edits {
		return b.frames.Forward(), tokens
	}
	return p, tokens
}

// event reads the next event.
func (b *Body) event(t time.Time, f rawjson.Frame) {
	b.reader.Event(f)
	if b.Sum.First.IsZero() && b.reader.FirstToken() {
		b.Sum.First = t
		b.Listener.FirstToken(t)
	}
}

// tellID gives the listener the id under which the engine keeps the answer, as soon as it is
// known. Clients may name it before the answer ends.
func (b *Body) tellID() {
	if b.named {
		return
	}
	if id := b.reader.ResponseID(); id != "" {
		b.named = true
		b.Listener.ResponseID(id)
	}
}

// edit removes the usage that the client did not ask for from an event, and adds the nvext
// that it did ask for.
func (b *Body) edit(f rawjson.Frame) {
	b.edits = b.edits[:0]
	if b.CutUsage {
		cut, all := api.UsageIn(f.Data)
		if all {
			b.frames.Drop()
			return
		}
		if cut.Len() > 0 && f.Lines == 1 { // no engine has several
			b.edits = append(b.edits, rawjson.Edit{Span: cut})
		}
	}
	if b.added != nil && b.added.stream != nil {
		b.edits = append(b.edits, b.added.stream.EditChunk(f)...)
		b.Sum.Skipped = b.Sum.Skipped || f.Long
	}
	if len(b.edits) > 0 {
		slices.SortStableFunc(b.edits, func(x, y rawjson.Edit) int { return cmp.Compare(x.Start, y.Start) })
		b.frames.Edit(b.edits)
	}
}
