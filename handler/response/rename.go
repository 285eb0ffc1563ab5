package response

import (
	"bytes"
	"net/http"
	"slices"
	"strconv"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
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
		resize(resp, -1)
	case body.IsJSON(kind):
		b.renameBeginning(resp)
		fallthrough
	default:
		b.Name = ""
	}
}

// renameBeginning reads a plain answer up to the name of its model, and replaces that. Engines send such an answer
// in one piece. An answer whose first maxPlain bytes have no name passes unchanged.
func (b *Body) renameBeginning(resp *http.Response) {
	most := int64(4 << 10)
	if resp.ContentLength >= 0 {
		most = min(most, resp.ContentLength)
	}
	read := &Replayed{ReadCloser: b.from, Begin: make([]byte, 0, most+int64(len(b.name.text)))}
	b.from = read
	for searched := 0; read.Err == nil && len(read.Begin) <= maxPlain; {
		var n int
		read.Begin = slices.Grow(read.Begin, 1)
		held := len(read.Begin)
		n, read.Err = read.ReadCloser.Read(read.Begin[held:cap(read.Begin)])
		read.Begin = read.Begin[:held+n]
		if len(read.Begin) < 2*searched && read.Err == nil {
			continue
		}
		searched = len(read.Begin)
		if at := api.NameIn(read.Begin, b.NameAt); at.Len() > 0 {
			read.Begin = slices.Replace(read.Begin, at.Start, at.End, b.name.text...)
			length := resp.ContentLength
			if length >= 0 {
				length += int64(len(b.name.text) - at.Len())
			}
			resize(resp, length)
			return
		}
	}
}

// resize prepares an answer for another length; -1 is unknown. What vouches for its bytes goes.
func resize(resp *http.Response, length int64) {
	resp.ContentLength = length
	resp.Header.Del("Content-Length")
	if length >= 0 {
		resp.Header.Set("Content-Length", strconv.FormatInt(length, 10))
	}
	for _, name := range []string{"Accept-Ranges", "Content-Digest", "Content-Md5", "Digest", "Etag", "Last-Modified", "Repr-Digest"} {
		delete(resp.Header, name)
	}
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
