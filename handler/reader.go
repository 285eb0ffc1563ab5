package handler

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// reader reads requests into plans. It is made once for each configuration. It waits
// only for the client's body, asks no worker and counts nothing.
type reader struct {
	// the operator's options
	maxBody      int64
	keys         []keySource
	heldOnly     bool // only sessions that the engine holds count
	injectsUsage bool
	strict       bool // fields of nvext that are not known are an error
	direct       bool // inference requests must name their worker
	enforcesSalt bool
	mergesModels bool
	grants       func(*http.Request) nvext.Grants

	// what is known of the pool at this moment
	memory      *body.Memory
	ratios      *kvscore.Ratios
	hashing     func() api.Options
	takesTokens func(api string) bool // all engines take nvext.token_data in the API
	ttl         func() time.Duration  // of a session's binding
	waiting     func() uint64         // requests in the queue
}

// read makes the plan of a request. An error leaves the request with its body.
func (rd *reader) read(r *http.Request) (*plan, error) {
	p := &plan{wishes: wishes{ext: &noExt}}
	if err := rd.fill(r, p); err != nil {
		p.giveBack(r)
		p.done()
		return nil, err
	}
	return p, nil
}

func (rd *reader) fill(r *http.Request, p *plan) error {
	p.name = engine.PostTo(r.URL.Path)
	if posts(r.Method) {
		p.api = api.For(r.URL.Path)
	}
	if p.api != nil {
		p.name = p.api.Name()
	}
	if err := rd.readBody(r, p); err != nil {
		return err
	}
	// A body that is streamed through takes no slot: the client decides how long its
	// upload takes, and the engine computes nothing meanwhile.
	p.computes = p.api != nil && p.api.Work() != api.Count && p.stream == nil
	if p.request == nil { // else inference has read the wishes
		if err := rd.extend(r, p, p.takeOther()); err != nil {
			return err
		}
		if err := rd.mustRead(p); err != nil {
			return err
		}
	}
	p.editsBody = p.editsBody || p.steers() || engine.Speaks(p.ext) || p.salt() != ""
	if err := rd.saltIsText(r, p); err != nil {
		return err
	}
	p.isolated = rd.enforcesSalt && p.salt() != "" && leavesCache(r, p)
	switch {
	case p.request != nil:
		p.model, p.response = p.request.Model, p.request.PreviousResponse
	case p.api == nil:
		p.response = responseNamed(r)
		if p.model == "" {
			p.model = modelOf(r)
		}
		p.lists = rd.mergesModels && listsModels(r)
	}
	return nil
}

// readBody reads and parses the body of a request for a known API, and every body that
// is declared as JSON. Other bodies are streamed through.
func (rd *reader) readBody(r *http.Request, p *plan) error {
	switch {
	case r.Body == nil || r.Body == http.NoBody || r.Method == http.MethodConnect:
		p.passThrough(r, fallbackMalformed)
		return nil
	case p.api == nil && !saysJSON(r.Header):
		p.passThrough(r, "its Content-Type is not JSON")
		return nil
	case r.ContentLength > rd.maxBody:
		p.passThrough(r, fallbackOversized)
		return nil
	case !rd.memory.HasRoom(r.ContentLength):
		p.passThrough(r, fallbackMemory)
		return nil
	}
	whole, rest, err := rd.memory.Read(r, rd.maxBody)
	switch {
	case err != nil:
		return unreadable(p.api, err)
	case whole != nil && p.api == nil:
		p.readOther(r, whole)
	case whole != nil:
		return rd.inference(r, p, whole)
	default:
		why := fallbackOversized
		if rest.NoRoom {
			why = fallbackMemory
		}
		p.passThrough(r, why)
		if p.stream = rest; p.api != nil { // it has at least as many tokens
			p.score.Tokens = max(p.score.Tokens, estimatedTokens(rd.maxBody))
		}
	}
	return nil
}

// unreadable returns the refusal of a request whose body could not be received.
func unreadable(a api.API, err error) *api.Refusal {
	if limit, tooLarge := errors.AsType[*http.MaxBytesError](err); tooLarge {
		return &api.Refusal{API: a, Status: http.StatusRequestEntityTooLarge, Code: api.CodeTooLarge, Err: fmt.Errorf(
			"the body is longer than the server takes, which is %d bytes", limit.Limit)}
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return &api.Refusal{API: a, Status: http.StatusRequestTimeout, Code: api.CodeUnreadable, Err: errSlowUpload}
	}
	return &api.Refusal{API: a, Status: http.StatusBadRequest, Code: api.CodeUnreadable, Err: fmt.Errorf("reading request body: %w", err)}
}

var errSlowUpload = errors.New("reading request body: the client sent it too slowly")

// passThrough plans a request whose body is not read.
func (p *plan) passThrough(r *http.Request, why string) {
	p.repeatable, p.score.Streamed = p.api != nil || idempotent(r.Method), true
	if p.api != nil {
		p.fallback = why
	}
	if r.Body == nil || r.ContentLength == 0 {
		p.body = body.NewReplay(nil)
		return
	}
	p.stream = &body.Stream{ReadCloser: r.Body}
	if r.Method != http.MethodConnect { // a tunnel has no body
		p.unread = why
	}
	if p.api != nil && r.ContentLength > 0 {
		p.score.Tokens = estimatedTokens(r.ContentLength)
	}
}

func estimatedTokens(size int64) int64 { return int64(float64(size) / kvscore.DefaultBytesPerToken) }

// posts returns whether engines compute requests of a method: SGLang takes PUT where it
// takes POST.
func posts(method string) bool { return method == http.MethodPost || method == http.MethodPut }

// idempotent returns whether a request may be made twice (RFC 9110, 9.2.2).
func idempotent(method string) bool {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace, http.MethodPut, http.MethodDelete:
		return true
	}
	return false
}

// inference plans a request for a known API whose body was read.
func (rd *reader) inference(r *http.Request, p *plan, whole *body.Buffer) error {
	data, opts := whole.Data, rd.hashing()
	p.repeatable, p.score.Tokens = true, estimatedTokens(int64(len(data)))
	req, err := api.Parse(p.api, data, opts)
	p.body = body.NewReplay(whole, data)
	if err != nil { // the engine will tell the client what is wrong
		p.fallback = fallbackMalformed
		if body.Compressed(r.Header) {
			p.fallback = fallbackCompressed
		}
		p.cannotParse(p.fallback)
		return nil
	}
	detach(req)
	p.request = req
	if err := rd.extend(r, p, req.NVExt); err != nil {
		return err
	}
	if err := p.ext.CheckChoices(req.Answers()); err != nil {
		return &api.Refusal{API: p.api, Status: http.StatusBadRequest, Code: api.CodeNVExt, Param: "nvext", Err: err}
	}
	req.SetSalt(p.ext.Salt(req.Salt))
	if p.ext.TokenCount > 0 && rd.takesTokens(p.name) {
		p.given = req.Give(req.NVExt[p.ext.TokenSpan.Start:p.ext.TokenSpan.End], opts)
	}
	p.session = rd.session(r, req, p.ext)
	p.answer = rd.answerExt(r, req, p.ext, data)
	p.editsBody = req.NVExt != nil || req.NullNVExt
	req.NVExt = nil
	if rd.injectsUsage {
		p.ask, p.asked = req.AskUsage(data)
	}
	p.identify(opts, rd.ratios)
	return nil
}

// cannotParse records that the router read the body but could not parse it.
func (p *plan) cannotParse(why string) {
	if p.body.Size > 0 {
		p.unread = why
	}
}
