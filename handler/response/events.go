package response

import (
	"cmp"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// readOn shows the reader what came, and returns it with the edits of events made.
func (b *Body) readOn(t time.Time, p []byte, over bool) []byte {
	if !b.Stream {
		b.reader.Write(p)
		return p
	}
	before := b.reader.Chunks()
	b.frames.Write(p, over)
	for f, ok := b.frames.Next(); ok; f, ok = b.frames.Next() {
		b.reader.Event(f)
		if b.Sum.First.IsZero() && b.reader.FirstToken() {
			b.Sum.First = t
			b.Listener.FirstToken(t)
		}
		if b.frames.Edits {
			b.edit(f)
		}
	}
	b.tellID()
	if n := b.reader.Chunks(); n != before {
		b.Sum.Last = t
		b.Listener.Tokens(t, n)
	}
	if b.frames.Edits {
		return b.frames.Forward()
	}
	return p
}

// tellID tells the listener the id under which the engine keeps the answer, as soon as
// it is there: clients may name it while the answer is still being made.
func (b *Body) tellID() {
	if b.named {
		return
	}
	if id := b.reader.ResponseID(); id != "" {
		b.named = true
		b.Listener.ResponseID(id)
	}
}

// edit takes the usage that the client did not ask for out of an event, and adds the
// nvext that it did ask for.
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
