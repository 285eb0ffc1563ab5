package handler

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

const (
	// maxHeld bounds the bytes that hold keeps back of a stream without a token.
	maxHeld = 64 << 10
	// maxUnread is how many events without a token may begin a stream before hold
	// takes it for one whose tokens cannot be seen.
	maxUnread = 8
	// maxCount is the largest count of tokens that is believed.
	maxCount = 1 << 31
)

// listener is told what an answer shows while it passes. All calls come from the
// goroutine that reads the answer.
type listener interface {
	// Waiting says that Read waits for the worker, or no longer does. Only streams
	// say so: the time that a client takes is not the worker's.
	Waiting(worker bool)
	// Received says that bytes came.
	Received(t time.Time)
	// FirstToken says that a stream has brought its first token.
	FirstToken(t time.Time)
	// Tokens says how many events with tokens a stream has brought so far.
	Tokens(t time.Time, n int)
	// ResponseID tells, once, the id under which the engine keeps the answer. A
	// stream has it long before its end.
	ResponseID(id string)
	// Ended is called once: the answer is whole, has broken off, or was closed early.
	Ended(s summary)
}

// summary is what became of an answer.
type summary struct {
	status  int
	stream  bool // a stream of events
	read    bool // it was read as an inference's
	whole   bool // it came to its end
	broken  error
	failed  bool // it is an error of the engine, or a stream ended in one
	garbled bool // it was not what its content type says
	skipped bool // some of it was too long to carry nvext

	first, last time.Time // a stream's first and latest token
	chunks      int       // events with tokens
	counts

	blocks []uint64 // of prompt and answer, for the next turn; nil if unknown
	past   float32  // how far both go on behind the last of these, in blocks
	text   []byte   // the answer's as JSON, if it was to be kept and is whole
}

// counts are the engine's counts of tokens: the prompt's, the answer's, and how many of
// the prompt's were cached. Each is -1 if it is missing or cannot be true.
type counts struct {
	prompt, completion, cached int64
}

// computed returns whether the worker has certainly computed the prompt.
func (s *summary) computed() bool {
	return s.status < 300 && !s.garbled && (s.whole && !s.failed || !s.first.IsZero())
}

// bodyOptions say how an answer is read, and what the client gets of it.
type bodyOptions struct {
	request  *api.Request // that is answered; nil if the answer is not read
	stream   bool         // a stream of events
	cutUsage bool         // usage is taken out of a stream
	keepText int          // the longest text that is kept, in bytes; 0 keeps none
	extras   *extras      // the nvext to add; nil if none
	// ctx says by its cause why reading failed once it has ended; nil if unknown.
	ctx      context.Context
	listener listener
}

// answerBody is the body of an answer on its way to the client. It changes no byte,
// with three exceptions: it takes out usage that the client did not ask for, adds the
// nvext that it did ask for, and ends a broken stream with an error event.
type answerBody struct {
	bodyOptions
	sum    summary // its counts are set at the end
	from   io.ReadCloser
	reader *api.Answer // nil if the answer is not read

	promised   bool // its content type promises that it can be read
	extensible bool // an event can be added to its end
	named      bool // the listener knows the response's id
	told       bool // the listener knows the end

	frames rawjson.Framer
	added  *added // the nvext that is added; nil if none
	edits  []rawjson.Edit
	tail   [4]byte // the last bytes that the client got; 0 where there are none
	rest   []byte  // bytes that the client gets next
	over   error   // what comes after them
	held   error   // what came from the worker after the bytes that hold has read
}

// newBody makes the body of an answer. It removes the answer's Content-Length if the
// length may change.
func newBody(resp *http.Response, o bodyOptions) *answerBody {
	b := &answerBody{bodyOptions: o, from: resp.Body}
	b.sum = summary{status: resp.StatusCode, stream: o.stream, read: o.request != nil, counts: counts{-1, -1, -1}}
	if o.request == nil {
		return b
	}
	b.reader = o.request.NewAnswer(o.stream)
	if o.keepText > 0 {
		b.reader.KeepText(o.keepText)
	}
	b.promised = resp.StatusCode == http.StatusOK && promises(body.MediaType(resp.Header))
	b.cutUsage = o.cutUsage && o.stream
	b.added = b.additions()
	if b.cutUsage || b.added != nil {
		resp.Header.Del("Content-Length")
		resp.ContentLength = -1
	}
	b.frames.Edits = b.cutUsage || b.added != nil && b.added.stream != nil
	b.extensible = o.stream && resp.ContentLength < 0
	return b
}

// promises returns whether answers of a media type must be readable: streams of events
// and JSON. Answers to inference requests are never HTML, so that a page of HTML
// counts as unreadable JSON.
func promises(kind string) bool {
	switch kind {
	case body.EventStream, "application/json", "text/html":
		return true
	}
	return strings.HasSuffix(kind, "+json")
}

// hold reads a stream up to its first token, an error in its place, or its end, and
// keeps it back for Read. An error says that the stream broke off before.
func (b *answerBody) hold() error {
	p := make([]byte, 4<<10)
	for {
		n, err := b.from.Read(p)
		b.rest = append(b.rest, b.pass(p[:n], nil)...)
		begun := b.reader.FirstToken() || b.reader.Failed() || b.reader.Done() || b.reader.Others() > maxUnread
		if err != nil && !begun && !errors.Is(err, io.EOF) {
			_ = b.from.Close()
			return err
		}
		if begun || err != nil || len(b.rest) >= maxHeld {
			b.held = err
			return nil
		}
	}
}

// Read implements io.Reader.
func (b *answerBody) Read(p []byte) (int, error) {
	if len(b.rest) > 0 || b.over != nil {
		n := copy(p, b.rest)
		if b.rest = b.rest[n:]; len(b.rest) > 0 {
			return n, nil
		}
		b.rest = nil // what is left of it is memory
		return n, b.over
	}
	n, err := b.receive(p)
	out := b.pass(p[:n], err)
	m := copy(p, out)
	b.over = err
	if m < len(out) {
		b.rest = slices.Clone(out[m:]) // it may be the framer's
		return m, nil
	}
	return m, err
}

// receive reads from the worker.
func (b *answerBody) receive(p []byte) (int, error) {
	if b.held != nil {
		return 0, b.held
	}
	if !b.stream {
		return b.from.Read(p)
	}
	b.listener.Waiting(true)
	n, err := b.from.Read(p)
	b.listener.Waiting(false)
	if err != nil && b.ctx != nil && b.ctx.Err() != nil && !errors.Is(err, io.EOF) {
		err = context.Cause(b.ctx) // HTTP/2 says only that the request was canceled
	}
	return n, err
}

// pass reads what came of the answer, and returns what the client gets of it.
func (b *answerBody) pass(p []byte, err error) []byte {
	t := time.Now()
	if len(p) > 0 {
		b.listener.Received(t)
	}
	out := p
	if b.reader != nil {
		out = b.readOn(t, p, err != nil)
	}
	if b.added != nil {
		out = b.addTo(out, len(p) > 0, err != nil)
	}
	b.keepTail(out)
	if err != nil {
		out = b.end(out, err)
	}
	return out
}

// keepTail keeps the last bytes that the client gets.
func (b *answerBody) keepTail(out []byte) {
	n := len(b.tail)
	out = out[max(0, len(out)-n):]
	copy(b.tail[:], b.tail[len(out):])
	copy(b.tail[n-len(out):], out)
}

// end records why no more comes. It returns what the client gets: out, and an error
// event after it if the stream broke.
func (b *answerBody) end(out []byte, err error) []byte {
	switch {
	case errors.Is(err, io.EOF):
		b.finish()
	case b.reader != nil && b.stream && b.reader.Closed():
		b.finish() // the connection broke, the answer is whole
	default:
		b.sum.broken = err
		b.tell()
		if b.extensible && !errors.Is(err, context.Canceled) {
			return append(slices.Clip(out), api.BrokenEvent(b.request.API, bytes.TrimLeft(b.tail[:], "\x00"))...)
		}
	}
	return out
}

// finish records that the answer has come whole.
func (b *answerBody) finish() {
	b.sum.whole = true
	if b.reader != nil {
		b.reader.Finish()
		b.sum.garbled = b.promised && !b.reader.Legible()
	}
	b.tell()
}

// Close implements io.Closer.
func (b *answerBody) Close() error {
	b.tell()
	return b.from.Close()
}

// tell tells the listener what became of the answer, once.
func (b *answerBody) tell() {
	if b.told {
		return
	}
	b.told = true
	if r := b.reader; r != nil {
		s := &b.sum
		s.failed, s.chunks = r.Failed(), r.Chunks()
		s.counts = b.usage()
		if s.whole && !s.garbled {
			b.tellID()
			s.blocks, s.past, s.text = r.Prediction(), r.PredictionPast(), r.Text()
		}
	}
	b.listener.Ended(b.sum)
}

// usage returns the engine's counts so far.
func (b *answerBody) usage() counts {
	believed := func(n, most int64) int64 {
		if n > most {
			return -1
		}
		return n
	}
	prompt, completion, cached := b.reader.Usage()
	prompt = believed(prompt, maxCount)
	return counts{prompt, believed(completion, maxCount), believed(cached, prompt)}
}
