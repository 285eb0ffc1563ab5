// Package response is the answer to a request as it streams past: its first token, its usage,
// its end, and the edits in it. It knows no worker and no plan: it reports what an answer
// shows to a [Listener].
package response

import (
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
	// with tokens a stream has brought so far. A stream has begun with its first token, an error or
	// its end. Many other events count, too: the router may not see its tokens.
	Received(t time.Time, n, tokens int, begun bool)
	// Ended is called once: the answer is whole, broke, or was closed early.
	Ended(s Summary)
}

// Summary is what became of an answer.
type Summary struct {
	Status    int
	Stream    bool // a stream of events
	Read      bool // it was read as the answer to an inference request
	Whole     bool // it came to its end
	Broken    error
	Failed    bool // it is an error of the engine, or a stream ended in one
	Malformed bool // it is not what its content type says
	Skipped   bool // some of it was too long to carry nvext
	// ErrorStatus is the HTTP status that the error stands for, see api.Answer; 0 without one.
	ErrorStatus int

	First, Last time.Time // a stream's first and latest token
	Chunks      int       // events with tokens
	Counts

	Blocks []uint64 // of prompt and answer, for the next turn; nil if unknown
	Past   float32  // how far both go on after the last of these, in blocks
	Text   []byte   // the answer's as JSON, if KeepText was set and the answer is whole
}

// Counts are the engine's counts of tokens: the prompt's, the answer's, and how many of
// the prompt's were cached. Each is -1 if it is missing or impossible.
type Counts struct {
	Prompt, Completion, Cached int64
}

// Computed returns whether the worker has certainly computed the prompt.
func (s *Summary) Computed() bool {
	return s.Status < 300 && !s.Malformed && (s.Whole && !s.Failed || !s.First.IsZero())
}

// Options say how an answer is read, and what the client gets of it.
type Options struct {
	Request  *api.Request // that is answered; nil if the answer is not read
	Stream   bool         // a stream of events
	CutUsage bool         // usage is taken out of a stream
	CutIDs   bool         // token ids are
	KeepText int          // the longest text that is kept, in bytes; 0 keeps none
	Name     string       // of the model, in place of the engine's; empty changes nothing
	NameAt   string       // the member that has it, see api.NameIn
	Extras   *Extras      // the nvext to add; nil if none
	// Ctx is the attempt's. Its cause says why a read failed; nil if unknown.
	Ctx      context.Context
	Listener Listener
	// Mover finds the rest of a stream that breaks off. It is nil if the stream cannot go on elsewhere.
	Mover Mover
}

// Body is an answer's body as the client gets it. It changes no byte, with five exceptions.
// It has the public name of a model that the operator maps.
// It removes usage and token ids that the client did not ask for. It adds the nvext that the client asked
// for. It joins a stream that goes on elsewhere. It ends a broken stream with an error event, in place of
// half an event.
type Body struct {
	Options
	Sum    Summary // its counts are set at the end
	from   io.ReadCloser
	ends   error       // of from, which has ended a stream behind its last bytes
	reader *api.Answer // nil if the answer is not read

	promised   bool // its content type promises that it can be read
	extensible bool // an event can be added to its end
	named      bool // the listener has the response's id
	summarized bool // the listener has the summary

	frames  *rawjson.Framer // of a stream; nil for other answers
	added   *added          // the nvext that is added; nil if none
	name    name
	changes []rawjson.Edit // of an event
	stopped rawjson.Frame  // before which events has stopped
	length  int            // of its data, as the engine sent them
	torn    bool           // the client has a part of the last event, which was too long to hold
	rest    []byte         // bytes that the client gets next
	after   error          // what follows them

	splicer *api.Splicer // edits the events of a stream that goes on elsewhere; nil for others
	pinned  bool         // the mover knows that the stream cannot go on elsewhere
}

// NewBody makes the body of an answer. It removes the answer's Content-Length if the
// length may change.
func NewBody(resp *http.Response, o Options) *Body {
	b := &Body{Options: o, from: resp.Body}
	b.Sum = Summary{Status: resp.StatusCode, Stream: o.Stream, Read: o.Request != nil, Counts: Counts{-1, -1, -1}}
	if b.Name != "" {
		b.rename(resp)
	}
	if o.Request == nil {
		return b
	}
	b.reader = o.Request.NewAnswer(o.Stream)
	if o.KeepText > 0 {
		b.reader.KeepText(o.KeepText)
	}
	b.promised = resp.StatusCode == http.StatusOK && promises(body.MediaType(resp.Header))
	b.CutUsage, b.CutIDs = o.CutUsage && o.Stream, o.CutIDs && o.Stream
	b.added = b.additions()
	if b.CutUsage || b.CutIDs || b.added != nil {
		resize(resp, -1)
	}
	if b.extensible = o.Stream && resp.ContentLength < 0; !b.extensible {
		b.Mover = nil
	}
	if o.Stream && b.frames == nil {
		b.frames = new(rawjson.Framer)
	}
	if b.Mover != nil {
		b.Mover.Track(b.reader)
	}
	return b
}

// edits returns whether events are edited beside their model's name.
func (b *Body) edits() bool {
	return b.CutUsage || b.CutIDs || b.added != nil && b.added.nvext != nil || b.splicer != nil
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
	out, err := b.deliver(in, err)
	m := copy(p, out)
	b.after = err
	if m < len(out) {
		b.rest = slices.Clone(out[m:]) // it may be the framer's
	}
	if len(b.rest) > 0 {
		err = nil
	}
	return m, err
}

// receive reads from the worker into p.
func (b *Body) receive(p []byte) (in []byte, err error) {
	if b.ends != nil {
		return nil, b.ends
	}
	if b.Stream {
		b.Listener.Waits()
	}
	n, err := b.from.Read(p)
	if b.Stream && err != nil && b.Ctx != nil && b.Ctx.Err() != nil && !errors.Is(err, io.EOF) {
		err = context.Cause(b.Ctx) // HTTP/2 says only that the request was canceled
	}
	if b.Stream && n > 0 {
		b.ends, err = err, nil
	}
	return p[:n:len(p)], err
}

// deliver reads the next bytes of the answer, and returns what the client gets of them. The error
// is err, or nil if the stream goes on elsewhere.
func (b *Body) deliver(p []byte, err error) ([]byte, error) {
	t, out := time.Now(), p
	switch {
	case b.reader == nil:
		if b.frames != nil {
			out = b.renamedEvents(p, err != nil)
		}
		b.Listener.Received(t, len(p), 0, true)
	case b.Stream:
		out, err = b.stream(t, p, err)
	default:
		b.reader.Write(p)
		b.Listener.Received(t, len(p), 0, false)
	}
	if b.added != nil {
		out = b.addTo(out, len(p) > 0, err != nil)
	}
	if err != nil {
		if out = b.end(out, err); b.Sum.Whole {
			err = io.EOF // also if the connection broke behind the answer's end
		}
	}
	return out, err
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
		b.summarize()
		if b.extensible && !b.torn && !errors.Is(err, context.Canceled) {
			return append(slices.Clip(out), api.BrokenEvent(b.Request.API)...)
		}
	}
	return out
}

// Finish records that the answer is whole.
func (b *Body) Finish() {
	b.Sum.Whole = true
	if b.reader != nil {
		b.reader.Finish()
		b.Sum.Malformed = b.promised && !b.reader.Parseable()
	}
	b.summarize()
}

func (b *Body) Close() error {
	b.summarize()
	return b.from.Close()
}

// summarize gives the listener the summary, once.
func (b *Body) summarize() {
	if b.summarized {
		return
	}
	b.summarized = true
	if r := b.reader; r != nil {
		s := &b.Sum
		s.Failed, s.ErrorStatus, s.Chunks = r.Failed(), r.ErrorStatus(), r.Chunks()
		s.Counts = b.usage()
		if s.Whole && !s.Malformed {
			b.tellID()
			s.Blocks, s.Past = r.Prediction(), r.PredictionPast()
			if b.KeepText > 0 {
				s.Text = r.Text()
			}
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

// maxUnread is the most events without a token before a stream counts as begun: the router
// may not see its tokens.
const maxUnread = 8

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
