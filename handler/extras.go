package handler

import (
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// extras is the nvext that an answer carries for its client, and the values for it.
type extras struct {
	fields      nvext.Fields
	annotations nvext.Annotations // of a stream
	id          string            // the request's; empty if there is none
	ids         []byte            // the prompt's token ids as JSON; nil if unknown
	prompt      []byte            // the prompt's text as JSON; nil if unknown

	worker          uint64 // that answers
	rank            uint32
	waiting         uint64    // requests in the queue when the request came
	received, begun time.Time // the request, its attempt
	hitRate         float64   // the predicted share of the prompt that was cached; negative if unknown
}

// added is what puts an answer's extras into it.
type added struct {
	before []byte // annotations; nil once the client has them
	stream *nvext.Additions
	plain  *nvext.AnswerFilter
	ids    bool // the client has the token ids
}

// additions returns what puts the extras into the answer; nil if there are none.
func (b *answerBody) additions() *added {
	x := b.extras
	if x == nil {
		return nil
	}
	e, add := new(added), nvext.Additions{}
	if x.fields&nvext.FieldWorkerID != 0 {
		add.Each = []nvext.Member{{Name: nvext.NameWorkerID, Value: nvext.OneWorker(x.worker, x.rank).Append(nil)}}
	}
	if x.fields&(nvext.FieldTiming|nvext.FieldTokenIDs) != 0 {
		add.Final = b.finalMembers
	}
	switch {
	case b.stream:
		if e.before = x.events(); x.fields != 0 {
			e.stream = &add
		}
	case x.fields != 0:
		e.plain = &nvext.AnswerFilter{Additions: add}
	}
	if e.before == nil && e.stream == nil && e.plain == nil {
		return nil
	}
	return e
}

// events returns the annotations as events of a stream.
func (x *extras) events() (out []byte) {
	if x.annotations&nvext.AnnotationRequestID != 0 && x.id != "" {
		out = nvext.AppendAnnotation(out, nvext.NameRequestID, rawjson.AppendString(nil, x.id))
	}
	if x.annotations&nvext.AnnotationFormattedPrompt != 0 && x.prompt != nil {
		out = nvext.AppendAnnotation(out, nvext.NameFormattedPrompt, x.prompt)
	}
	if x.annotations&nvext.AnnotationTokenIDs != 0 && x.ids != nil {
		out = nvext.AppendAnnotation(out, nvext.NameTokenIDs, x.ids)
	}
	return out
}

// finalMembers makes the members that only the end of an answer carries.
func (b *answerBody) finalMembers() (list []nvext.Member) {
	x := b.extras
	if x.fields&nvext.FieldTiming != 0 {
		list = append(list, nvext.Member{Name: nvext.NameTiming, Value: b.timing().Append(nil)})
	}
	if x.fields&nvext.FieldTokenIDs != 0 && x.ids != nil && !b.added.ids {
		b.added.ids = true // once is enough if several choices end
		list = append(list, nvext.Member{Name: nvext.NameTokenIDs, Value: x.ids})
	}
	return list
}

// timing returns how long the answer took so far. The first token of a plain answer
// is not seen.
func (b *answerBody) timing() nvext.Timing {
	x, first := b.extras, b.sum.first
	ms := func(d time.Duration) nvext.Opt[float64] { return nvext.Some(d.Seconds() * 1000) }
	t := nvext.Timing{
		RequestReceivedMS: uint64(max(0, x.received.UnixMilli())),
		PrefillWaitTimeMS: ms(x.begun.Sub(x.received)),
		TotalTimeMS:       ms(time.Since(x.received)),
		RouterQueueDepth:  nvext.Some(x.waiting),
	}
	if !first.IsZero() {
		t.PrefillTimeMS, t.TTFTMS = ms(first.Sub(x.begun)), ms(first.Sub(x.received))
	}
	if !b.stream {
		b.reader.Finish() // it has come whole, or nobody would ask
	}
	if c := b.usage(); c.prompt > 0 && c.cached >= 0 {
		t.KVHitRate = nvext.Some(float64(c.cached) / float64(c.prompt))
	} else if x.hitRate >= 0 {
		t.KVHitRate = nvext.Some(x.hitRate)
	}
	return t
}

// addTo returns what the client gets of p: after the annotations, which it gets as soon
// as something came, and of a plain answer nothing until it is over.
func (b *answerBody) addTo(p []byte, came, over bool) []byte {
	e, out := b.added, p
	if e.plain != nil {
		if out = e.plain.Write(p); over {
			b.sum.skipped = e.plain.Skipped()
			out = append(slices.Clip(out), e.plain.End()...)
		}
	}
	if len(e.before) > 0 && came {
		out = slices.Concat(e.before, out)
		e.before = nil
	}
	return out
}
