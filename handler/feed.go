package handler

import (
	"cmp"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// markAlive tells the lease and the worker that something came.
func (o *observer) markAlive(t time.Time) {
	if t.Sub(o.alive) > time.Second {
		o.alive = t
		o.attempt.lease.Alive(t)
	}
	if o.flow != nil {
		o.flow.last.Store(ticks(t))
	}
}

// feed shows the reader what came, and returns it with the edits of events made.
func (o *observer) feed(t time.Time, p []byte, over bool) []byte {
	if !o.stream {
		o.reader.Write(p)
		o.keep()
		return p
	}
	before := o.reader.Chunks()
	o.frames.Write(p, over)
	for f, ok := o.frames.Next(); ok; f, ok = o.frames.Next() {
		o.reader.Event(f)
		if o.first.IsZero() && o.reader.FirstToken() {
			o.firstToken(t)
		}
		if o.frames.Edits {
			o.edit(f)
		}
	}
	o.keep()
	if o.reader.Chunks() != before {
		o.tokens(t)
	}
	if o.frames.Edits {
		return o.frames.Forward()
	}
	return p
}

// edit takes usage out of an event that the client did not ask for, and puts the
// nvext in that it did ask for.
func (o *observer) edit(f rawjson.Frame) {
	o.edits = o.edits[:0]
	if o.cutsUsage {
		cut, all := api.UsageIn(f.Data)
		if all {
			o.frames.Drop()
			return
		}
		if cut.Len() > 0 && f.Lines == 1 { // no engine has several
			o.edits = append(o.edits, rawjson.Edit{Span: cut})
		}
	}
	if o.ext != nil && o.ext.stream != nil {
		o.edits = append(o.edits, o.ext.stream.EditChunk(f)...)
		if f.Long && !o.ext.long {
			o.ext.long = true
			o.rt.fallBack(fallbackUntold)
		}
	}
	if len(o.edits) > 0 {
		slices.SortStableFunc(o.edits, func(a, b rawjson.Edit) int { return cmp.Compare(a.Start, b.Start) })
		o.frames.Edit(o.edits)
	}
}

// firstToken records that the stream has brought its first token.
func (o *observer) firstToken(t time.Time) {
	o.first = t
	if o.attempt.worker.flow.hangs() { // which is no measure of its prefills
		o.attempt.lease.Prefilled(t)
	} else {
		o.attempt.lease.FirstToken(t)
	}
	o.rt.figures.ttft.Observe(t.Sub(o.rt.start).Seconds())
	o.vouch()
}

// tokens records that the stream has brought tokens.
func (o *observer) tokens(t time.Time) {
	o.last = t
	o.attempt.lease.Output(t, int64(o.reader.Chunks()))
	if o.rt.session != "" && t.Sub(o.refreshed) > o.rt.sessionTTL()/4 {
		o.refreshed = t
		o.rt.pool.sessions.Get(o.rt.session) // a long answer keeps its session alive
	}
}
