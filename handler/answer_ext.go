package handler

import (
	"net/http"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// extended is what makes an answer carry it.
type extended struct {
	before []byte // annotations; nil once the client has them
	stream *nvext.Additions
	plain  *nvext.AnswerFilter
	told   bool // the token ids
	long   bool // an event was too long to carry anything
}

// extend lets the answer carry what its client asked for. An answer that cannot
// passes as it is, and is counted.
func (o *observer) extend(resp *http.Response) {
	x := o.rt.plan.answer
	if x == nil {
		return
	}
	if !x.fits || o.reader == nil {
		o.rt.fallBack(fallbackUntold)
		return
	}
	e := new(extended)
	var add nvext.Additions
	if x.fields&nvext.FieldWorkerID != 0 {
		add.Each = []nvext.Member{{Name: nvext.NameWorkerID, Value: o.workerID().Append(nil)}}
	}
	if x.fields&(nvext.FieldTiming|nvext.FieldTokenIDs) != 0 {
		add.Final = o.finalMembers
	}
	switch {
	case o.stream:
		e.before = o.rt.annotations()
		if x.fields != 0 {
			e.stream = &add
		}
	case x.fields != 0:
		e.plain = &nvext.AnswerFilter{Additions: add}
	}
	if e.before == nil && e.stream == nil && e.plain == nil {
		return
	}
	o.ext = e
	resp.Header.Del("Content-Length") // it will be longer
	resp.ContentLength = -1
}

// workerID says who answers.
func (o *observer) workerID() nvext.WorkerID {
	return bothPhases(o.attempt.target.Worker, o.attempt.target.Rank)
}

// bothPhases says that one worker does all of a request.
func bothPhases(worker uint64, rank uint32) nvext.WorkerID {
	return nvext.WorkerID{
		PrefillWorkerID: nvext.Some(worker), PrefillDPRank: nvext.Some(rank),
		DecodeWorkerID: nvext.Some(worker), DecodeDPRank: nvext.Some(rank),
	}
}

// annotations returns the events that the client asked for. A Dynamo, which
// gets the request's nvext, writes them itself.
func (rt *route) annotations() (out []byte) {
	x := rt.plan.answer
	if rt.attempt.worker.isDynamo(rt.pool) {
		return nil
	}
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

// wrote lets go of what the client has by now: answers may take long.
func (x *answerExt) wrote() {
	x.prompt = nil
	if x.fields&nvext.FieldTokenIDs == 0 {
		x.ids = nil
	}
}

// finalMembers makes what the end of an answer carries besides.
func (o *observer) finalMembers() (list []nvext.Member) {
	x := o.rt.plan.answer
	if x.fields&nvext.FieldTiming != 0 {
		list = append(list, nvext.Member{Name: nvext.NameTiming, Value: o.timing().Append(nil)})
	}
	if x.fields&nvext.FieldTokenIDs != 0 && x.ids != nil && !o.ext.told {
		o.ext.told = true // once is enough, where several choices end
		list = append(list, nvext.Member{Name: nvext.NameTokenIDs, Value: x.ids})
	}
	return list
}

// timing returns how long the answer took so far. The first token of a plain
// answer is not seen.
func (o *observer) timing() nvext.Timing {
	start := o.rt.start
	ms := func(seconds float64) nvext.Opt[float64] { return nvext.Some(seconds * 1000) }
	t := nvext.Timing{
		RequestReceivedMS: uint64(max(0, start.UnixMilli())),
		PrefillWaitTimeMS: ms(o.attempt.begun.Sub(start).Seconds()),
		TotalTimeMS:       ms(now().Sub(start).Seconds()),
		RouterQueueDepth:  nvext.Some(o.rt.plan.answer.waiting),
	}
	if !o.first.IsZero() {
		t.PrefillTimeMS = ms(o.first.Sub(o.attempt.begun).Seconds())
		t.TTFTMS = ms(o.first.Sub(start).Seconds())
	}
	if !o.stream {
		o.reader.Finish() // it has come whole, or nobody would ask
	}
	if prompt, _, cached := o.usage(); prompt > 0 && cached >= 0 {
		t.KVHitRate = nvext.Some(float64(cached) / float64(prompt))
	} else if n := o.attempt.prompt.tokens; n > 0 {
		t.KVHitRate = nvext.Some(float64(o.attempt.terms.OverlapTokens) / float64(n)) // as it was predicted
	}
	return t
}

// pass returns what the client gets: annotations, as soon as something came, and
// a plain answer once it is over.
func (e *extended) pass(o *observer, p []byte, came, over bool) []byte {
	out := p
	if e.plain != nil {
		if out = e.plain.Write(p); over {
			if e.plain.Skipped() {
				o.rt.fallBack(fallbackUntold)
			}
			out = append(slices.Clip(out), e.plain.End()...)
		}
	}
	if len(e.before) > 0 && came {
		out = slices.Concat(e.before, out)
		e.before = nil
		o.rt.plan.answer.wrote()
	}
	return out
}

// isDynamo tells whether a worker is a Dynamo, which has an nvext of its own.
func (w *worker) isDynamo(p *pool) bool {
	return p.engineOf(w).Type == engine.Dynamo
}
