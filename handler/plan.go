package handler

import (
	"net/http"
	"slices"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/index"
)

// plan is what is known of a request before a worker is chosen. It does not
// change once it is made.
type plan struct {
	// api is the client's API by the path; nil if the request passes through.
	api api.API
	// name is the API's name, or that of the path in package engine; empty if it has
	// none.
	name string
	// computes is whether the request takes a slot of its worker.
	computes bool
	// model is the model that the request names, empty if it names none.
	model string
	// lists is whether the answer is the list of models, to be completed.
	lists bool
	// asked is whether ask is made in the body: the engine is asked for usage that the
	// client did not ask for.
	asked bool
	ask   rawjson.Edit
	// speaks says that the engine is to be told something of ext, or not to see
	// the body's nvext.
	speaks bool
	// request is what the body says; nil if it was not read as an inference
	// request.
	request *api.Request
	// other is that of a request for no API that is known, nil if it was not
	// read.
	other *api.Request
	// body can be sent on each attempt; nil if the client's body is streamed
	// through, which works once. The route takes it over.
	body *body.Replay
	// stream is the client's body where it is streamed through.
	stream  *body.Stream
	session session
	// response is the id of the response that the request names; empty if it names
	// none.
	response string
	// ext is what the client says to the router, as far as it is trusted with
	// that, never nil; grants is what it is trusted with, of what it asks for.
	ext    *nvext.Ext
	grants nvext.Grants
	// dropped is what it is not trusted with, malformed are the routing headers
	// that nobody can read.
	dropped   nvext.Grants
	malformed []string
	headers   nvext.Grants // what its routing headers need
	pin       pin
	apart     bool // it goes only where its cache is kept apart
	// given says that the ids of token_data are the prompt.
	given bool
	// score is what the scheduler is told; textBlock is the size of its blocks of
	// text, in bytes.
	score     kvscore.Request
	textBlock int
	// repeatable says that an attempt that reached a worker may be made again
	// on another one.
	repeatable bool
	// answer is what the answer must carry for the client, nil if nothing.
	answer *answerExt
	// fallback is why an inference request is routed by load alone.
	fallback string
	// unread says why the router could not read the body, in most cases in the
	// words of fallback; empty if it could, or there is none.
	unread string
}

// Why an inference request has no prompt to be compared, or its session no
// binding.
const (
	fallbackCompressed = "compressed"
	fallbackOversized  = "oversized"
	fallbackMalformed  = "malformed"
	fallbackNoPrompt   = "no_prompt"
	fallbackUnbound    = "unbound"
	// the engine's answer cannot be read as it passes
	fallbackUnreadable = "answer_unreadable"
	// the other workers' models are not in a list of models
	fallbackUnmerged = "models_unmerged"
	// so many bodies are in memory already
	fallbackMemory = "memory"
	// the answer cannot carry the nvext or annotations that were asked for
	fallbackUntold = "nvext_untold"
	// a query's answer has no token ids, as no engine tells them
	fallbackUntokenized = "untokenized"
)

// plan reads the request and makes the plan.
func (h *Handler) plan(r *http.Request) (*plan, error) {
	p, err := h.makePlan(r)
	if err != nil {
		p.giveBack(r)
		p.done()
		return nil, err
	}
	return p, nil
}

// makePlan is plan that leaves what was read to be let go of, where there is an
// error.
func (h *Handler) makePlan(r *http.Request) (*plan, error) {
	var a api.API
	if posts(r.Method) {
		a = api.For(r.URL.Path)
	}
	p, err := h.read(r, a)
	if err != nil {
		return p, err
	}
	if p.api, p.name = a, engine.PostTo(r.URL.Path); a != nil {
		p.name = a.Name()
	}
	// A body that is streamed through takes no slot: how long its upload takes is
	// up to the client, and the engine computes nothing meanwhile.
	p.computes = a != nil && a.Work() != api.Count && p.stream == nil
	if p.request == nil { // else that has happened
		if err := h.extend(r, a, p, p.takeOther()); err != nil {
			return p, err
		}
		if err := h.mustRead(a, p); err != nil {
			return p, err
		}
	}
	p.speaks = p.speaks || p.steers() || engine.Speaks(p.ext) || p.salt() != ""
	if err := h.saltIsText(r, p); err != nil {
		return p, err
	}
	p.apart = h.mustKeepApart(r, p)
	switch {
	case p.request != nil:
		p.model, p.response = p.request.Model, p.request.PreviousResponse
	case a == nil:
		p.response = responseNamed(r)
		if p.model == "" {
			p.model = modelOf(r)
		}
		p.lists = listsModels(r) && (h.MergeModels == nil || *h.MergeModels)
	}
	return p, nil
}

// read begins the plan with what the body says. It reads the body of a request
// for a known API, and any other body that says that it is JSON. With an error, a
// plan that is not nil has what was read.
func (h *Handler) read(r *http.Request, a api.API) (*plan, error) {
	switch {
	case r.Body == nil || r.Body == http.NoBody || r.Method == http.MethodConnect:
		return h.passThrough(r, a, fallbackMalformed), nil
	case a == nil && !saysJSON(r.Header):
		return h.passThrough(r, nil, "its Content-Type is not JSON"), nil
	}
	body, rest, why, err := h.take(r)
	switch {
	case err != nil:
		return nil, unreadable(a, err)
	case body != nil && a == nil:
		return otherAPI(r, body), nil
	case body != nil:
		return h.inference(r, a, body)
	}
	p := h.passThrough(r, a, why)
	if rest != nil {
		p.stream = rest
	}
	if rest != nil && a != nil {
		p.score.Tokens = max(p.score.Tokens, int64(float64(h.MaxBody)/kvscore.DefaultBytesPerToken)) // and more
	}
	return p, nil
}

// take reads a request's body of at most max_body into memory. If that cannot be,
// why says so in the words of fallback, and rest is the body if some of it was
// read.
func (h *Handler) take(r *http.Request) (body *body.Buffer, rest *body.Stream, why string, err error) {
	switch {
	case r.ContentLength > h.MaxBody:
		return nil, nil, fallbackOversized, nil
	case !h.pool.memory.HasRoom(r.ContentLength):
		return nil, nil, fallbackMemory, nil
	}
	body, rest, err = h.pool.memory.Read(r, h.MaxBody)
	if rest != nil {
		why = fallbackOversized
		if rest.NoRoom {
			why = fallbackMemory
		}
	}
	return body, rest, why, err
}

// done lets go of what was read of the request's body.
func (p *plan) done() {
	if p == nil {
		return
	}
	if p.body != nil {
		p.body.Done()
		p.body = nil
	}
	p.stream.Done()
}

// passThrough plans a request whose body is not read, for the reason why: by load
// alone.
func (h *Handler) passThrough(r *http.Request, a api.API, why string) *plan {
	p := &plan{repeatable: a != nil || idempotent(r.Method)}
	p.score.Streamed = true
	if a != nil {
		p.fallback = why
	}
	if r.Body == nil || r.ContentLength == 0 {
		p.body = body.NewReplay(nil)
		return p
	}
	p.stream = &body.Stream{ReadCloser: r.Body}
	if r.Method != http.MethodConnect { // a tunnel has no body
		p.unread = why
	}
	if a != nil && r.ContentLength > 0 {
		// it will have to be computed, whatever it is
		p.score.Tokens = int64(float64(r.ContentLength) / kvscore.DefaultBytesPerToken)
	}
	return p
}

// cannotRead records that the router read the body but could not parse it.
func (p *plan) cannotRead(why string) {
	if p.body.Size > 0 {
		p.unread = why
	}
}

// posts tells whether a method is one by which engines are sent what they are to
// compute: SGLang takes PUT where it takes POST.
func posts(method string) bool { return method == http.MethodPost || method == http.MethodPut }

// idempotent tells whether a request may be made twice (RFC 9110, 9.2.2).
func idempotent(method string) bool {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace, http.MethodPut, http.MethodDelete:
		return true
	}
	return false
}

// inference plans a request whose body was read.
func (h *Handler) inference(r *http.Request, a api.API, read *body.Buffer) (*plan, error) {
	set, data := h.pool.settings.Load(), read.Data
	p := &plan{api: a, repeatable: true}
	p.score.Tokens = int64(float64(len(data)) / kvscore.DefaultBytesPerToken)
	opts := api.Options{TextBlock: set.textBlock, BlockSize: set.blockSize, Seed: h.pool.seed}
	req, err := api.Parse(a, data, opts)
	p.body = body.NewReplay(read, data)
	if err != nil {
		// the engine will say what is wrong with it
		p.fallback = fallbackMalformed
		if body.Compressed(r.Header) { // which not all say that are read as JSON
			p.fallback = fallbackCompressed
		}
		p.cannotRead(p.fallback)
		return p, nil
	}
	detach(req)
	p.request = req
	if err := h.extend(r, a, p, req.NVExt); err != nil {
		return p, err
	}
	if err := p.ext.CheckChoices(req.Answers()); err != nil {
		return p, &api.Refusal{API: a, Status: http.StatusBadRequest, Code: api.CodeNVExt, Param: "nvext", Err: err}
	}
	req.SetSalt(p.ext.Salt(req.Salt))
	p.model = req.Model
	if p.ext.TokenCount > 0 && h.takesTokenData(a.Name()) {
		p.given = req.Give(req.NVExt[p.ext.TokenSpan.Start:p.ext.TokenSpan.End], opts)
	}
	p.session = h.session(r, req, p.ext)
	p.answer = h.answerExt(r, req, p.ext, data)
	p.speaks = req.NVExt != nil || req.NullNVExt
	req.NVExt = nil
	if h.Usage == usageInject {
		p.ask, p.asked = req.AskUsage(data)
	}
	p.identify(req, set, &h.pool.ratios)
	return p, nil
}

// takesTokenData tells whether the engines of all workers take the ids of
// nvext.token_data in an API. If one does not, the body's prompt counts for all.
func (h *Handler) takesTokenData(api string) bool {
	workers, unknown := h.prober.own(), engine.Engine{}
	if len(workers) == 0 {
		return unknown.TakesTokenData(api)
	}
	return !slices.ContainsFunc(workers, func(w *worker) bool {
		e := h.pool.engineOf(w)
		return !e.TakesTokenData(api)
	})
}

// maxKept is the longest text, in bytes, that is kept as long as an answer lasts.
// Of a longer one it is a digest, for which name or salt it is makes no difference.
const maxKept = 4 << 10

// detach copies what a request says of itself: it is around as long as its
// answer, and must not keep the body.
func detach(req *api.Request) {
	for _, s := range []*string{
		&req.Model, &req.LoRA, &req.Salt, &req.PreviousResponse, &req.Conversation, &req.CacheKey, &req.SessionID, &req.UserID,
	} {
		if len(*s) > maxKept {
			*s = digestMark + nvext.Digest([]byte(*s))
		} else {
			*s = strings.Clone(*s)
		}
	}
}

// identify fills in the scheduler's view of the prompt.
func (p *plan) identify(req *api.Request, set *poolSettings, ratios *kvscore.Ratios) {
	p.score.Streamed, p.score.SkipsCache = req.Stream, req.SkipsCache
	p.score.Weights, p.score.MediaTokens, p.score.OtherTokens, p.score.MediaEnd = index.Weights{}, 0, 0, 0 // of another prompt
	if req.API.Work() == api.Count {
		p.score.Tokens = 0 // nothing is computed: any worker can do it
		return
	}
	switch req.Kind {
	case api.Tokens:
		p.score.BlockTokens = float64(set.blockSize)
		p.score.Tokens = req.Tokens
	case api.Text:
		p.score.Weights = ratios.Weights(req.Model, set.textBlock)
		p.score.NominalBlockTokens = float64(set.textBlock) / kvscore.DefaultBytesPerToken
		p.score.BlockTokens = p.score.Weights.Mean(req.Blocks)
		p.score.MediaTokens, p.score.MediaEnd = req.MediaTokens, int((req.MediaEnd+int64(set.textBlock)-1)/int64(set.textBlock))
		p.score.OtherTokens = int64(float64(req.Bytes-req.First) / float64(set.textBlock) * p.score.BlockTokens)
		p.score.Tokens = int64(float64(req.First)/float64(set.textBlock)*p.score.BlockTokens) + p.score.OtherTokens + req.MediaTokens
	case api.None:
		p.fallback = fallbackNoPrompt
		return
	}
	p.score.Past, p.textBlock = req.Past, set.textBlock
	p.score.Root, p.score.Blocks = req.Root, req.Blocks
}

// giveBack puts what the plan has read of the request's body back.
func (p *plan) giveBack(r *http.Request) {
	if p != nil && (p.body != nil || p.stream != nil) {
		body.GiveBack(r, p.body, p.stream)
	}
}
