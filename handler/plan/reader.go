package plan

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

// Reader reads requests into plans. It is made once for each configuration. It waits
// only for the client's body, asks no worker and counts nothing.
type Reader struct {
	// the operator's options
	MaxBody      int64
	Keys         []KeySource
	HeldOnly     bool // only sessions that the engine holds count
	InjectsUsage bool
	Strict       bool // fields of nvext that are not known are an error
	Direct       bool // inference requests must name their worker
	EnforcesSalt bool
	MergesModels bool
	Grants       func(*http.Request) nvext.Grants

	// what is known of the pool at this moment
	Memory      *body.Memory
	Ratios      *kvscore.Ratios
	Hashing     func() api.Options
	TakesTokens func(api string) bool // all engines take nvext.token_data in the API
	TTL         func() time.Duration  // of a session's binding
	Waiting     func() uint64         // requests in the queue
}

// Read makes the plan of a request. An error leaves the request with its body.
func (rd *Reader) Read(r *http.Request) (*Plan, error) {
	p := &Plan{Wishes: Wishes{Ext: &NoExt}}
	if err := rd.fill(r, p); err != nil {
		p.GiveBack(r)
		p.Close()
		return nil, err
	}
	return p, nil
}

func (rd *Reader) fill(r *http.Request, p *Plan) error {
	p.Name = engine.PostTo(r.URL.Path)
	if posts(r.Method) {
		p.API = api.For(r.URL.Path)
	}
	if p.API != nil {
		p.Name = p.API.Name()
	}
	if err := rd.readBody(r, p); err != nil {
		return err
	}
	// A body that is streamed through takes no slot: the client decides how long its
	// upload takes, and the engine computes nothing meanwhile.
	p.Computes = p.API != nil && p.API.Work() != api.Count && p.Stream == nil
	if p.Request == nil { // else inference has read the wishes
		if err := rd.extend(r, p, p.takeOther()); err != nil {
			return err
		}
		if err := rd.mustRead(p); err != nil {
			return err
		}
	}
	p.EditsBody = p.EditsBody || p.steers() || engine.Speaks(p.Ext) || p.Salt() != ""
	if err := rd.saltIsText(r, p); err != nil {
		return err
	}
	p.Isolated = rd.EnforcesSalt && p.Salt() != "" && leavesCache(r, p)
	switch {
	case p.Request != nil:
		p.Model, p.Response = p.Request.Model, p.Request.PreviousResponse
	case p.API == nil:
		p.Response = responseNamed(r)
		if p.Model == "" {
			p.Model = modelOf(r)
		}
		p.Lists = rd.MergesModels && listsModels(r)
	}
	return nil
}

// readBody reads and parses the body of a request for a known API, and every body that
// is declared as JSON. Other bodies are streamed through.
func (rd *Reader) readBody(r *http.Request, p *Plan) error {
	switch {
	case r.Body == nil || r.Body == http.NoBody || r.Method == http.MethodConnect:
		p.passThrough(r, fallbackMalformed)
		return nil
	case p.API == nil && !saysJSON(r.Header):
		p.passThrough(r, "its Content-Type is not JSON")
		return nil
	case r.ContentLength > rd.MaxBody:
		p.passThrough(r, fallbackOversized)
		return nil
	case !rd.Memory.HasRoom(r.ContentLength):
		p.passThrough(r, FallbackMemory)
		return nil
	}
	whole, rest, err := rd.Memory.Read(r, rd.MaxBody)
	switch {
	case err != nil:
		return Unreadable(p.API, err)
	case whole != nil && p.API == nil:
		p.readOther(r, whole)
	case whole != nil:
		return rd.inference(r, p, whole)
	default:
		why := fallbackOversized
		if rest.NoRoom {
			why = FallbackMemory
		}
		p.passThrough(r, why)
		if p.Stream = rest; p.API != nil { // it has at least as many tokens
			p.Score.Tokens = max(p.Score.Tokens, estimatedTokens(rd.MaxBody))
		}
	}
	return nil
}

// Unreadable returns the refusal of a request whose body could not be received.
func Unreadable(a api.API, err error) *api.Refusal {
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
func (p *Plan) passThrough(r *http.Request, why string) {
	p.Repeatable, p.Score.Streamed = p.API != nil || idempotent(r.Method), true
	if p.API != nil {
		p.Fallback = why
	}
	if r.Body == nil || r.ContentLength == 0 {
		p.Body = body.NewReplay(nil)
		return
	}
	p.Stream = &body.Stream{ReadCloser: r.Body}
	if r.Method != http.MethodConnect { // a tunnel has no body
		p.unread = why
	}
	if p.API != nil && r.ContentLength > 0 {
		p.Score.Tokens = estimatedTokens(r.ContentLength)
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
func (rd *Reader) inference(r *http.Request, p *Plan, whole *body.Buffer) error {
	data, opts := whole.Data, rd.Hashing()
	p.Repeatable, p.Score.Tokens = true, estimatedTokens(int64(len(data)))
	req, err := api.Parse(p.API, data, opts)
	p.Body = body.NewReplay(whole, data)
	if err != nil { // the engine will tell the client what is wrong
		p.Fallback = fallbackMalformed
		if body.Compressed(r.Header) {
			p.Fallback = fallbackCompressed
		}
		p.cannotParse(p.Fallback)
		return nil
	}
	detach(req)
	p.Request = req
	if err := rd.extend(r, p, req.NVExt); err != nil {
		return err
	}
	if err := p.Ext.CheckChoices(req.Answers()); err != nil {
		return &api.Refusal{API: p.API, Status: http.StatusBadRequest, Code: api.CodeNVExt, Param: "nvext", Err: err}
	}
	req.SetSalt(p.Ext.Salt(req.Salt))
	if p.Ext.TokenCount > 0 && rd.TakesTokens(p.Name) {
		p.Given = req.Give(req.NVExt[p.Ext.TokenSpan.Start:p.Ext.TokenSpan.End], opts)
	}
	p.Session = rd.session(r, req, p.Ext)
	p.Answer = rd.answerExt(r, req, p.Ext, data)
	p.EditsBody = req.NVExt != nil || req.NullNVExt
	req.NVExt = nil
	if rd.InjectsUsage {
		p.AskUsage, p.AsksUsage = req.AskUsage(data)
	}
	p.identify(opts, rd.Ratios)
	return nil
}

// cannotParse records that the router read the body but could not parse it.
func (p *Plan) cannotParse(why string) {
	if p.Body.Size > 0 {
		p.unread = why
	}
}
