package response

import (
	"bytes"
	"net/http"
	"slices"
	"strconv"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// name is the public name of a model.
type name struct {
	text []byte       // as JSON
	upTo []byte       // how the latest event begins, up to the engine's name
	at   rawjson.Span // of that in the event
}

func (b *Body) setName(to string) { b.Name, b.name.text = to, rawjson.AppendString(nil, to) }

// in returns where an event names its model. Most events of a stream begin with the same bytes.
func (n *name) in(data []byte, member string) rawjson.Span {
	if len(n.upTo) > 0 && bytes.HasPrefix(data, n.upTo) {
		return n.at
	}
	at := api.NameIn(data, member)
	if at.Len() > 0 {
		n.upTo, n.at = append(n.upTo[:0], data[:at.End]...), at
	}
	return at
}

// rename prepares an answer that gets the public name of its model: JSON, or a stream of events.
func (b *Body) rename(resp *http.Response) {
	b.setName(b.Name)
	switch kind := body.MediaType(resp.Header); {
	case kind == body.EventStream:
		b.frames = new(rawjson.Framer)
	case !body.IsJSON(kind):
		b.Name = ""
		return
	case b.renameBeginning(resp):
		return
	default:
		b.renames = &renamed{member: b.NameAt, text: b.name.text}
	}
	resize(resp)
}

// renameBeginning renames the model in the first bytes of a plain answer, whose length is then known. It returns
// whether they have it. An engine sends such an answer in one piece.
func (b *Body) renameBeginning(resp *http.Response) bool {
	if resp.ContentLength <= 0 {
		return false
	}
	begin := make([]byte, min(resp.ContentLength, 4<<10), min(resp.ContentLength, 4<<10)+int64(len(b.name.text)))
	n, err := b.from.Read(begin)
	begin = begin[:n]
	at := api.NameIn(begin, b.NameAt)
	if at.Len() > 0 {
		begin = slices.Replace(begin, at.Start, at.End, b.name.text...)
		resp.ContentLength += int64(len(begin) - n)
		resp.Header.Set("Content-Length", strconv.FormatInt(resp.ContentLength, 10))
	}
	b.from = &Replayed{ReadCloser: b.from, Begin: begin, Err: err}
	return at.Len() > 0
}

// resize prepares an answer for another length.
func resize(resp *http.Response) {
	resp.Header.Del("Content-Length")
	resp.ContentLength = -1
}

// renamedEvent returns what the client gets of a read that is one event.
func (b *Body) renamedEvent(p []byte, f rawjson.Frame) []byte {
	at := b.name.in(f.Data, b.NameAt)
	if at.Len() == 0 {
		return p
	}
	begin := len(p) - len("\n\n") - len(f.Data)
	return slices.Replace(p, begin+at.Start, begin+at.End, b.name.text...)
}

// renamedEvents returns what the client gets of the next bytes of a stream that is not read otherwise.
func (b *Body) renamedEvents(p []byte, last bool) []byte {
	b.frames.Write(p, false)
	out := b.editEvents()
	if last {
		out = slices.Clone(out)
		b.frames.Write(nil, true)
		out = append(out, b.editEvents()...)
	}
	return out
}

func (b *Body) editEvents() []byte {
	for f, ok := b.frames.Next(); ok; f, ok = b.frames.Next() {
		b.edit(f, len(f.Data))
	}
	return b.frames.Forward()
}

// renamed puts the public name of a model into a plain answer. It holds only what comes before the name, in most
// answers nothing. An answer whose first MaxAnswer bytes do not have it passes unchanged.
type renamed struct {
	member string
	text   []byte // the name as JSON
	held   []byte
	next   int  // how much must be held before it is searched again
	done   bool // the rest passes
}

// write returns what the client gets after the next bytes of the answer.
func (r *renamed) write(p []byte, last bool) []byte {
	if r.done {
		return p
	}
	r.held = append(r.held, p...)
	if len(r.held) < r.next && !last {
		return nil
	}
	r.next = 2 * len(r.held)
	at := api.NameIn(r.held, r.member)
	if r.done = at.Len() > 0 || last || r.next > nvext.MaxAnswer; !r.done {
		return nil
	}
	out := r.held
	if r.held = nil; at.Len() > 0 {
		out = rawjson.Splice(make([]byte, 0, len(out)+len(r.text)), out, []rawjson.Edit{{Span: at, Text: r.text}})
	}
	return out
}
