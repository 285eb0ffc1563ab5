package handler

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// observer is the body of an answer on its way to the client. It changes no
// byte, but that it takes out usage that the client did not ask for, puts in the
// nvext that it did ask for, and ends a stream that broke off with an event that
// says so.
type observer struct {
	rt      *route
	attempt *attempt
	body    io.ReadCloser
	reader  *api.Answer // nil where the answer is not that of an inference
	status  int
	stream  bool
	// extensible is whether an event can be added to the end.
	extensible bool
	flow       *flow     // that its bytes show to go on; nil if they do not
	promised   bool      // it must be legible
	illegible  bool      // it was not
	vouched    bool      // it spoke for the worker
	kept       bool      // the response that it is was remembered
	headed     time.Time // a plain answer's header came

	alive     time.Time // the lease was told so
	first     time.Time // the first token came
	last      time.Time // the latest did
	refreshed time.Time // the session's binding was
	ended     bool      // the answer came to its end
	broken    error     // it broke off
	frames    rawjson.Framer
	cutsUsage bool      // usage is taken out that the client did not ask for
	ext       *extended // what it carries of nvext, nil if nothing
	edits     []rawjson.Edit
	tail      [4]byte // the last that the client got; 0 where there is none
	rest      []byte  // still to be sent to the client
	over      error   // and what comes then
	awaited   error   // what came of the worker behind the head that await has read
}

// observer returns an observer of an answer, which shall be its body.
func (rt *route) observer(resp *http.Response) *observer {
	o := &observer{rt: rt, attempt: rt.attempt, body: resp.Body, status: resp.StatusCode}
	if resp.StatusCode >= 300 {
		return o
	}
	if rt.attempt.work != workNone {
		o.flow = &rt.attempt.worker.flow
	}
	if rt.plan.request == nil {
		return o
	}
	o.stream = eventStream(resp.Header)
	o.refreshed = now()
	if body.Compressed(resp.Header) { // though it was asked not to be
		rt.fallBack(fallbackUnreadable)
	} else {
		o.reader = rt.plan.request.NewAnswer(o.stream)
		if rt.speculative && rt.plan.ext.AgentHints.SpeculativePrefill.Value {
			o.reader.KeepText(maxKeptText)
		}
		o.promised = resp.StatusCode == http.StatusOK && promises(resp.Header)
	}
	if rt.plan.asked && o.stream && o.reader != nil {
		o.cutsUsage = true
		resp.Header.Del("Content-Length") // it will be shorter
		resp.ContentLength = -1
	}
	o.extend(resp)
	o.frames.Edits = o.cutsUsage || o.ext != nil && o.ext.stream != nil
	o.extensible = o.stream && o.reader != nil && resp.ContentLength < 0
	return o
}

// observe puts an observer between an answer and the client, if there is none.
func (rt *route) observe(req *http.Request, resp *http.Response) {
	o, ok := resp.Body.(*observer) // its first token was awaited
	if !ok {
		o = rt.observer(resp)
	}
	rt.answer = o
	t := now()
	good := rt.plan.request != nil && resp.StatusCode < 300
	switch {
	case o.stream && o.reader != nil: // its first token is seen when it comes
	case good && !o.stream && o.reader != nil:
		o.headed = t // that it had the answer then is learned when it was one
	case good && !o.stream:
		if o.attempt.worker.flow.hangs() { // which is no measure of its prefills
			o.attempt.lease.Prefilled(t)
		} else {
			o.attempt.lease.FirstToken(t)
		}
	default:
		o.attempt.lease.Prefilled(t) // whatever it was, it is over
	}
	if req.Method != http.MethodHead && resp.Body != http.NoBody {
		resp.Body = o
	} else {
		o.end()
	}
}

// Read implements io.Reader.
func (o *observer) Read(p []byte) (int, error) {
	if len(o.rest) > 0 || o.over != nil {
		n := copy(p, o.rest)
		if o.rest = o.rest[n:]; len(o.rest) > 0 {
			return n, nil
		}
		o.rest = nil // what is left of it is memory
		return n, o.over
	}
	n, err := o.receive(p)
	out := o.pass(p[:n], err)
	m := copy(p, out)
	o.over = err
	if m < len(out) {
		o.rest = slices.Clone(out[m:]) // it may be the framer's
		return m, nil
	}
	return m, err
}

// pass reads what came of the answer, and returns what the client gets of it.
func (o *observer) pass(p []byte, err error) []byte {
	t := now()
	if len(p) > 0 {
		o.markAlive(t)
	}
	out := p
	if o.reader != nil {
		out = o.feed(t, p, err != nil)
	}
	if o.ext != nil {
		out = o.ext.pass(o, out, len(p) > 0, err != nil)
	}
	o.keepTail(out)
	if err != nil {
		out = o.stop(out, err)
	}
	return out
}

// keepTail keeps the last bytes that the client gets.
func (o *observer) keepTail(out []byte) {
	if n := len(o.tail); len(out) < n {
		copy(o.tail[:], o.tail[len(out):])
		copy(o.tail[n-len(out):], out)
	} else {
		copy(o.tail[:], out[len(out)-n:])
	}
}

// stop takes in that no more comes, and why. It returns what the client gets
// of it: out, and an event more if it must be told.
func (o *observer) stop(out []byte, err error) []byte {
	switch {
	case errors.Is(err, io.EOF):
		o.end()
	case o.reader != nil && o.stream && o.reader.Closed():
		o.end() // the connection broke, the answer is whole
	default:
		o.broken = err
		if o.extensible && !isCanceled(err) {
			return append(slices.Clip(out), api.BrokenEvent(o.rt.plan.api, bytes.TrimLeft(o.tail[:], "\x00"))...)
		}
	}
	return out
}

// Close implements io.Closer.
func (o *observer) Close() error { return o.body.Close() }

// end takes in that the answer has come whole.
func (o *observer) end() {
	if o.ended {
		return
	}
	o.ended = true
	if o.reader == nil {
		return
	}
	o.reader.Finish()
	if !o.judge() {
		return
	}
	o.keep()
	prompt, completion, reported := o.usage()
	cached := o.cachedTokens(reported)
	m := o.rt.figures
	if req := o.rt.plan.request; prompt > 0 {
		m.inputTokens.Observe(float64(prompt))
		o.counted(req, prompt, completion, cached)
		if cached >= 0 {
			m.reportedHits.Observe(float64(cached) / float64(prompt))
			o.attempt.worker.hits.reported(cached, prompt)
		}
	}
	if completion >= 0 {
		m.outputTokens.Observe(float64(completion))
	}
	o.verify(prompt, cached)
	if reported >= 0 {
		o.rt.cached = reported
	}
	if n := o.reader.Chunks(); n > 1 {
		m.itl.Observe(o.last.Sub(o.first).Seconds() / float64(n-1))
	}
}

// computed tells whether the worker has certainly computed the prompt.
func (o *observer) computed() bool {
	if o == nil || o.status >= 300 || o.illegible {
		return false
	}
	failed := o.reader != nil && o.reader.Failed()
	return o.ended && !failed || !o.first.IsZero()
}

// most is the largest count of tokens that is believed.
const most = 1 << 31

// usage returns the engine's counts, -1 for those that are missing or cannot
// be true.
func (o *observer) usage() (prompt, completion, cached int64) {
	prompt, completion, cached = o.reader.Usage()
	if prompt > most {
		prompt = -1
	}
	if completion > most {
		completion = -1
	}
	if cached > prompt {
		cached = -1
	}
	return prompt, completion, cached
}

// prediction returns the blocks of prompt and answer, nil if they are not
// known.
func (o *observer) prediction() []uint64 {
	if o.reader == nil || !o.ended || o.illegible {
		return nil
	}
	return o.reader.Prediction()
}

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
