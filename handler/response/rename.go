package response

import (
	"net/http"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// rename prepares an answer that gets the public name of its model: JSON, or a stream of events.
func (b *Body) rename(resp *http.Response) {
	b.setName(b.Name)
	switch kind := body.MediaType(resp.Header); {
	case kind == body.EventStream:
		b.frames = new(rawjson.Framer)
	case body.IsJSON(kind):
		b.renames = &renamed{member: b.NameAt, text: b.name}
	default:
		b.Name = ""
		return
	}
	resize(resp)
}

func (b *Body) setName(name string) { b.Name, b.name = name, rawjson.AppendString(nil, name) }

// resize prepares an answer for another length.
func resize(resp *http.Response) {
	resp.Header.Del("Content-Length")
	resp.ContentLength = -1
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
