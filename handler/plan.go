package handler

import (
	"maps"
	"net/http"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
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
	// name is what engines know the API by, or the path if it has a name there;
	// else empty.
	name string
	// computes says that it is an inference, which takes a slot of its worker.
	computes bool
	// model is the one that the worker must serve, if it is known who does.
	model string
	// lists says that the answer is the list of models, to be completed.
	lists bool
	// asked says that the engine is asked for usage that the client did not ask
	// for, by the change ask of the body.
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
	body *replay
	// stream is the client's body where it is streamed through.
	stream  *once
	session session
	// response is the id of the response that the request goes on from, or that
	// it wants; empty if there is none.
	response string
	// ext is what the client says to the router, as far as it is trusted with
	// that, never nil; grants is what it is trusted with, of what it asks for.
	ext    *nvext.Ext
	grants nvext.Grants
	// dropped is what it is not trusted with, malformed are the routing headers
	// that nobody can read.
	dropped   nvext.Grants
	malformed []string
	routed    bool // it has routing headers
	pin       pin
	// prompt is which prompt is planned, of a request with token_data.
	prompt engine.Prompt
	// score is what the scheduler is told; textBlock is the size of its blocks of
	// text, in bytes.
	score     kvscore.Request
	textBlock int
	// repeatable says that an attempt that reached a worker may be made again
	// on another one.
	repeatable bool
	// answer is what it asks its answer to carry, nil if it is nothing.
	answer *answerExt
	// fallback says why an inference request goes by load alone.
	fallback string
	// unread says, in the words of fallback, why a body was not read in which an
	// engine may read something; empty if it was, or there is none.
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

const (
	// maxBodies bounds the bytes of request bodies that a pool keeps in memory.
	maxBodies = 2 << 30
	// alwaysRoom is the longest body, in bytes, that is read whatever others take.
	alwaysRoom = 512 << 10
)

// plan reads the request and makes the plan.
func (h *Handler) plan(r *http.Request) (*plan, error) {
	announced := maps.Clone(r.Trailer)
	p, err := h.makePlan(r)
	// net/http adds trailers that the client did not announce
	maps.DeleteFunc(r.Trailer, func(name string, _ []string) bool {
		_, ok := announced[name]
		return !ok
	})
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
	// What is streamed through takes no slot: how long its upload takes is up to
	// the client, and the engine computes nothing meanwhile. What may be JSON takes
	// one all the same: else its Content-Type would get around max_running.
	p.computes = a != nil && a.Work() != api.Count && (p.stream == nil || p.mayCompute())
	if p.request == nil { // else that has happened
		if err := h.extend(r, a, p, p.takeOther()); err != nil {
			return p, err
		}
		if err := h.mustKnow(r, a, p); err != nil {
			return p, err
		}
	}
	p.speaks = p.speaks || p.steers() || engine.Speaks(p.ext) || p.salt() != ""
	if err := h.saltIsText(r, p); err != nil {
		return p, err
	}
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

// read begins the plan with what the body says. With an error, a plan that is not
// nil has what was read.
func (h *Handler) read(r *http.Request, a api.API) (*plan, error) {
	switch {
	case a == nil && (r.Body == nil || r.Body == http.NoBody || r.Method == http.MethodConnect): // which has no end
		return h.passThrough(r, ""), nil
	case a == nil:
		return h.otherAPI(r)
	case r.Body == nil || r.Body == http.NoBody:
		p := h.passThrough(r, fallbackMalformed)
		p.unread = "" // it says nothing
		return p, nil
	}
	if p, err := h.notJSON(r, fallbackMalformed); err != nil {
		return nil, unreadable(a, err)
	} else if p != nil {
		return p, nil
	}
	body, rest, why, err := h.take(r, h.MaxBody)
	switch {
	case err != nil:
		return nil, unreadable(a, err)
	case body != nil:
		return h.inference(r, a, body)
	}
	p := h.passThrough(r, why)
	if rest != nil {
		p.stream = rest
		p.score.Tokens = max(p.score.Tokens, int64(float64(h.MaxBody)/kvscore.DefaultBytesPerToken)) // and more
	}
	return p, nil
}

// take reads a request's body of at most limit bytes into memory. If that cannot
// be, why says so in the words of fallback, and rest is the body if some of it was
// read.
func (h *Handler) take(r *http.Request, limit int64) (body *buffer, rest *once, why string, err error) {
	switch {
	case r.ContentLength > limit:
		return nil, nil, fallbackOversized, nil
	case !h.hasRoom(r.ContentLength):
		return nil, nil, fallbackMemory, nil
	}
	body, rest, err = h.pool.uploads.read(r, limit, &h.pool.bodies)
	if rest != nil {
		why = fallbackOversized
		if rest.noRoom {
			why = fallbackMemory
		}
	}
	return body, rest, why, err
}

// hasRoom tells whether a body of a length may be read into memory. Short ones
// always may.
func (h *Handler) hasRoom(length int64) bool {
	return length <= alwaysRoom || h.pool.bodies.Load()+length <= maxBodies
}

// done lets go of what was read of the request's body.
func (p *plan) done() {
	if p == nil {
		return
	}
	if p.body != nil {
		p.body.done()
		p.body = nil
	}
	p.stream.done()
}

// passThrough plans a request whose body is not read: by load alone.
func (h *Handler) passThrough(r *http.Request, fallback string) *plan {
	p := &plan{fallback: fallback, unread: fallback, repeatable: idempotent(r.Method) || fallback != ""}
	p.score.Streamed = true
	if r.Body == nil || r.ContentLength == 0 {
		p.body = replayOf(nil)
		return p
	}
	p.stream = &once{ReadCloser: r.Body}
	if b, ok := r.Body.(*peeked); ok {
		r.Body, p.stream = b.rest, restOf(&buffer{data: b.begin}, b.rest, false)
	}
	if fallback != "" && r.ContentLength > 0 {
		// it will have to be computed, whatever it is
		p.score.Tokens = int64(float64(r.ContentLength) / kvscore.DefaultBytesPerToken)
	}
	return p
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
func (h *Handler) inference(r *http.Request, a api.API, read *buffer) (*plan, error) {
	set, body := h.pool.settings.Load(), read.data
	p := &plan{api: a, repeatable: true}
	p.score.Tokens = int64(float64(len(body)) / kvscore.DefaultBytesPerToken)
	opts := api.Options{TextBlock: set.textBlock, BlockSize: set.blockSize, Seed: h.pool.seed}
	req, err := api.Parse(a, body, opts)
	if err == nil && req.Kind == api.Tokens {
		if set = h.settledBlocks(r.Context()); set.blockSize != opts.BlockSize {
			opts.BlockSize = set.blockSize
			req, err = api.Parse(a, body, opts)
		}
	}
	p.body = replayOf(read, body)
	if err != nil {
		// the engine will say what is wrong with it
		p.fallback = fallbackMalformed
		if compressed(r.Header) { // which not all say that are read as JSON
			p.fallback = fallbackCompressed
		}
		if mayBeJSON(r.Header, body) {
			p.unread = p.fallback
		}
		return p, nil
	}
	detach(req)
	p.request = req
	if err := h.extend(r, a, p, req.NVExt); err != nil {
		return p, err
	}
	if err := p.ext.CheckChoices(req.Answers()); err != nil {
		return p, &ownError{a, http.StatusBadRequest, codeNVExt, "nvext", err}
	}
	if p.ext.TokenCount > 0 && req.Kind != api.Tokens { // else that has happened
		set = h.settledBlocks(r.Context())
		opts.BlockSize = set.blockSize
	}
	req.SetSalt(p.ext.Salt(req.Salt))
	p.model = req.Model
	h.givePrompt(r, p, req, opts)
	p.session = h.session(r, req, p.ext)
	p.answer = h.answerExt(r, req, p.ext, body)
	p.speaks = req.NVExt != nil || req.NullNVExt
	req.NVExt = nil
	if h.Usage == usageInject {
		p.ask, p.asked = req.AskUsage(body)
	}
	p.identify(req, set, &h.pool.ratios)
	return p, nil
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

// identify fills in what the scheduler is told of the prompt.
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
		p.score.Tokens = max(p.score.Tokens, int64(p.ext.TokenCount))
		return
	}
	p.score.Past, p.textBlock = req.Past, set.textBlock
	p.score.Root, p.score.Blocks = req.Root, req.Blocks
}
