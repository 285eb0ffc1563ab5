package plan

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/queue"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/texts"
)

// Reader reads requests into plans. It is made once for each configuration. It waits
// only for the client's body, asks no worker and counts nothing.
type Reader struct {
	// the operator's options
	MaxBody      int64
	Sessions     Sessions
	InjectsUsage bool
	Direct       bool // inference requests must name their worker
	EnforcesSalt bool
	Public       PublicModels
	Grants       func(*http.Request) nvext.Grants
	Tenant       string // the placeholder's name; empty: by the trusted header or the scope of sessions
	// Class returns a request's class, and the name of the placeholder with its own target, which may be
	// empty. It is nil if there are no classes.
	Class func(*http.Request) (class *queue.Class, from string)
	// Backups returns the ids of the backups that may get a request; nil if there are none.
	Backups func(*http.Request) []uint64

	// what is known of the pool at this moment
	Memory    *body.Memory
	Ratios    *texts.Ratios
	Hashing   func() api.Options
	Adapter   func(model string) (name string, known bool) // the LoRA adapter that a model's name stands for, if any
	Canonical func(model string) string                    // the one name of a model that has several
	Lists     func(model string) bool                      // a worker is known to serve it
	Keeps     func(id string) bool                         // an engine is known to keep something of that id
	// KeeperServes returns whether the worker that keeps something of that id is known to serve a model.
	KeeperServes func(id, model string) bool
	OnlyModel    func() string         // the model of requests that name none; empty if there are several
	TakesTokens  func(api string) bool // all engines take nvext.token_data in the API
	Transfers    func() bool           // engines transfer prompts to each other
	TTL          func() time.Duration  // of a session's binding
	Waiting      func() uint64         // requests in the queue
}

// Read makes the plan of a request. An error leaves the request with its body.
func (rd *Reader) Read(r *http.Request) (*Plan, error) {
	p := &Plan{HTTP: r, ID: requestID(r), Name: engine.PostTo(r.URL.Path), Hints: Hints{Ext: &NoExt}}
	if r.Method == http.MethodPost || r.Method == http.MethodPut { // SGLang takes PUT where it takes POST
		if p.API = api.For(r.URL.Path); p.API != nil {
			p.Name, p.prefills = p.API.Name(), p.API.Work() != api.Count
		} else {
			p.prefills = engine.Infers(r.URL.Path)
		}
	}
	p.Everywhere = p.API == nil && r.Method != http.MethodHead && r.Method != http.MethodOptions && engine.MeansAll(r.URL.Path)
	err := rd.readBody(r, p)
	if err == nil {
		err = rd.fill(r, p)
	}
	if err != nil {
		p.GiveBack()
		p.Close()
		return nil, err
	}
	return p, nil
}

// beginning is how much is read of bodies that are not needed whole, in bytes.
const beginning = 64 << 10

// readBody reads and parses the body of a request for a known API, and every body that is
// declared as JSON. It reads what must go to all engines, and forms as far as they name a model. It
// streams other bodies through, and long ones of methods that usually have none: what is open to
// everybody must take little memory.
func (rd *Reader) readBody(r *http.Request, p *Plan) error {
	p.Repeatable, p.Score.Streamed = p.API != nil || idempotent(r.Method), p.API == nil
	size, kind, limit := r.ContentLength, "", rd.MaxBody
	if p.API == nil {
		kind = body.MediaType(r.Header)
	}
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		limit = min(limit, beginning)
	}
	var why string
	switch {
	case r.Body == nil || r.Body == http.NoBody || r.Method == http.MethodConnect:
		why = fallbackMalformed
	case p.API == nil && body.IsForm(kind) && !p.Everywhere:
		whole, rest, err := rd.readForm(r, p, limit)
		if err != nil {
			return Unreadable(nil, err)
		}
		if why = errNotJSON; whole != nil {
			p.Body, p.unread = body.NewReplay(whole, whole.Data), why
			rd.standInForm(r, p)
			return nil
		}
		p.Once, size = rest, max(size, 1)
	case p.API == nil && !body.IsJSON(kind) && !p.Everywhere:
		why = errNotJSON
	case size > limit:
		why = fallbackOversized
	case !rd.Memory.HasRoom(size):
		why = FallbackMemory
	default:
		whole, rest, err := rd.Memory.Read(r.Body, size, limit)
		if err != nil {
			return Unreadable(p.API, err)
		}
		if whole != nil {
			rd.parse(r.Header, p, whole)
			return nil
		}
		if why = fallbackOversized; rest.NoRoom {
			why = FallbackMemory
		}
		p.Once, size = rest, max(size, limit)
	}
	if p.Score.Streamed = true; p.API != nil {
		p.Fallback = why
	}
	if r.Body == nil || size == 0 {
		p.Body = body.NewReplay(nil, nil)
		return nil
	}
	if p.Once == nil {
		p.Once = &body.Once{ReadCloser: r.Body}
	}
	if r.Method != http.MethodConnect { // a tunnel has no body
		p.unread = why
	}
	if p.API != nil && size > 0 {
		p.Score.Tokens = estimatedTokens(size)
	}
	return nil
}

const errNotJSON = "its Content-Type is not JSON"

// Unreadable returns the refusal of a body that could not be received.
func Unreadable(a api.API, err error) *api.Refusal {
	status, code := http.StatusBadRequest, api.CodeUnreadable
	if limit, tooLarge := errors.AsType[*http.MaxBytesError](err); tooLarge {
		status, code = http.StatusRequestEntityTooLarge, api.CodeTooLarge
		err = fmt.Errorf("the body exceeds the server's limit of %d bytes", limit.Limit)
	} else if errors.Is(err, os.ErrDeadlineExceeded) {
		status, err = http.StatusRequestTimeout, errors.New("reading request body: the client sent it too slowly")
	} else {
		err = fmt.Errorf("reading request body: %w", err)
	}
	return &api.Refusal{API: a, Status: status, Code: code, Err: err}
}

func estimatedTokens(size int64) int64 { return int64(float64(size) / texts.BytesPerToken) }

// idempotent returns whether a request may be made twice (RFC 9110, 9.2.2).
func idempotent(method string) bool {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace, http.MethodPut, http.MethodDelete:
		return true
	}
	return false
}

// parse parses a body. If it cannot, the engine reports to the client what is wrong.
func (rd *Reader) parse(h http.Header, p *Plan, whole *body.Buffer) {
	var opts api.Options
	if p.API != nil {
		opts, p.Score.Tokens = rd.Hashing(), estimatedTokens(int64(len(whole.Data)))
	}
	p.Body = body.NewReplay(whole, whole.Data)
	req, err := api.Parse(OrUnplanned(p.API), whole.Data, opts)
	if err == nil {
		detach(req)
		p.Model, p.hashing = req.Model, opts
		switch {
		case p.API != nil:
			p.Request = req
			return
		case !req.Vertex:
			p.other = req
			return
		}
	}
	why := fallbackMalformed
	if p.API != nil {
		if body.Compressed(h) {
			why = fallbackCompressed
		}
		p.Fallback = why
	}
	if p.Body.Size > 0 {
		p.unread = why
	}
}

func (rd *Reader) fill(r *http.Request, p *Plan) error {
	// A body that is streamed through takes no slot: its client decides how long that
	// takes, and the engine computes nothing meanwhile.
	p.TakesSlot = p.API != nil && p.prefills && p.Once == nil
	p.ShowsHealth = p.prefills || p.API == nil && r.Method == http.MethodPost
	var raw []byte
	req := p.Parsed()
	if req != nil {
		raw = req.NVExt
	}
	err := rd.extend(r, p, raw)
	if err != nil && raw != nil && p.API == nil && !p.prefills { // to such a path, it may mean anything
		raw = nil
		err = rd.extend(r, p, nil)
	}
	if err != nil {
		return err
	}
	if err := rd.mustRead(p); err != nil {
		return err
	}
	if p.Request != nil {
		if err := rd.infer(r, p); err != nil {
			return err
		}
	}
	p.EditsBody = engine.Speaks(p.Ext) || p.Salt() != ""
	if req != nil {
		p.EditsBody = p.EditsBody || req.Steers || raw != nil || req.NullNVExt
		req.NVExt = nil // it is in the body's memory
	}
	if req != nil && req.SessionList && p.Salt() != "" {
		return p.refuse(api.CodeShared, "session_params", errors.New(
			"session_params: must be one object if the request has a salt (cache_salt or X-Tenant-Id)"))
	}
	p.Isolated = rd.EnforcesSalt && p.prefills && p.Salt() != ""
	if p.API == nil {
		rd.nameEngine(r, p)
		rd.nameSession(r, p)
	}
	rd.identifyClient(r, p)
	return nil
}

// nameSession records the session that a client opens or closes itself in an engine.
func (rd *Reader) nameSession(r *http.Request, p *Plan) {
	opens, closes := engine.OpensSession(p.Name), engine.ClosesSession(p.Name)
	if p.other == nil || !opens && !closes {
		return
	}
	if p.other.SessionID != "" {
		p.Session = rd.Sessions.held(r, p.other.SessionID, p.Salt())
		p.Session.Final = closes
	}
	if opens {
		p.Opened = func(id string) Session { return rd.Sessions.held(r, id, p.Salt()) }
	}
}

// infer completes the plan of a request for a known API that was parsed.
func (rd *Reader) infer(r *http.Request, p *Plan) error {
	req, data := p.Request, p.Body.Buffer.Data
	if p.Response = req.PreviousResponse; p.Response == "" && req.Conversation != "" && rd.Keeps(req.Conversation) {
		p.Response = req.Conversation
	}
	if req.Model == "" {
		p.Model = rd.modelIn(r.URL.Path)
		req.SetModel(p.Model)
	}
	req.SetSalt(p.Ext.Salt(req.Salt))
	if rd.standFor(p, func() uint64 { return rd.sessionKey(r, p) }); p.Public != "" {
		req.SetModel(p.Model)
	}
	if name := rd.Canonical(req.Model); name != req.Model {
		req.SetModel(name) // not p.Model: a worker may serve only some of the names
	}
	if p.Ext.TokenCount > 0 && rd.TakesTokens(p.Name) {
		p.Given = req.Give(req.NVExt[p.Ext.TokenSpan.Start:p.Ext.TokenSpan.End], p.hashing)
	}
	var err error
	if p.Session, err = rd.Sessions.find(r, req, p.Ext); err != nil {
		return err
	}
	p.Score.Session = p.Session.Rendezvous
	p.Answer = rd.answerExt(p.ID, req, p.Ext, data)
	p.AsksUsage = rd.InjectsUsage && req.LacksUsage(data)
	if req.Model == "" {
		req.SetModel(rd.OnlyModel()) // not p.Model: the client has named none
	}
	p.identify(p.hashing, rd.Ratios, rd.Adapter)
	return nil
}

// longestTimeout is the longest that a client may keep a session or its cache, unless the
// operator keeps sessions for longer.
const longestTimeout = time.Hour

func (rd *Reader) longest() time.Duration { return min(max(longestTimeout, rd.TTL()), nvext.MaxTTL) }

// NoExt is the nvext of most requests. It is shared and never changes.
var NoExt nvext.Ext

// extend reads nvext and the routing headers and keeps what is granted. raw is the body's
// nvext; nil if there is none or the body was not read.
func (rd *Reader) extend(r *http.Request, p *Plan, raw []byte) error {
	p.Ext, p.headers = &NoExt, headersNeed(r.Header)
	if raw != nil || p.headers != 0 || p.steers() {
		if err := rd.takeExt(r, p, raw); err != nil {
			return p.refuse(api.CodeNVExt, nvextMember, err)
		}
		p.takePin()
	}
	if rd.Direct && !p.Pin.Named && (p.API != nil || p.prefills) {
		return p.refuse(api.CodePin, nvextMember, errDirect)
	}
	return nil
}

const nvextMember = "nvext"

func (p *Plan) refuse(code, member string, err error) error {
	return &api.Refusal{API: OrUnplanned(p.API), Status: http.StatusBadRequest, Code: code, Param: member, Err: err}
}

// takeExt reads nvext and the routing headers, which override it. It drops what is not
// granted.
func (rd *Reader) takeExt(r *http.Request, p *Plan, raw []byte) (err error) {
	ext := new(nvext.Ext)
	p.Ext = ext
	if raw != nil {
		if *ext, err = nvext.Parse(raw, rd.longest()); err != nil {
			return err
		}
	}
	if p.headers != 0 {
		p.Malformed = ext.ApplyHeaders(func(name string) (string, bool) {
			if values := r.Header[name]; len(values) > 0 {
				return oneValue(values), true
			}
			return "", false
		})
	}
	if p.steers() || p.headers|ext.Needs() != 0 {
		p.Grants = rd.Grants(r)
	}
	p.Dropped = ext.Restrict(p.Grants) | p.headers&^p.Grants
	if ext.QueryOnly() { // its answer repeats them
		ext.TokenData, _ = nvext.IDs(ext.TokenSpan.Of(raw))
	}
	p.Score.ExpectedTokens, p.Score.Priority = int64(ext.AgentHints.OSL.Value), priority(&ext.AgentHints)
	if ext.Override != (kvscore.Override{}) {
		p.Score.Override = &ext.Override
	}
	return nil
}

// headersNeed returns the grants that a request's routing headers need, 0 if it has
// none.
func headersNeed(h http.Header) (needs nvext.Grants) {
	for name := range h {
		needs |= nvext.HeaderNeeds(name)
	}
	return needs
}

// oneValue returns a header's value. If a gateway has added a different value, it returns
// both joined (RFC 9110, 5.3): that is no number, and a tenant of its own.
func oneValue(values []string) string {
	for _, v := range values[1:] {
		if v != values[0] {
			return strings.Join(values, ", ")
		}
	}
	return values[0]
}

// mustRead refuses a request whose body the router could not read, for a tenant or if
// enforce_cache_salt is on. The body could name another tenant's cache or session. Where engines
// transfer prompts to each other, the body of an inference could name any host as the other engine.
func (rd *Reader) mustRead(p *Plan) error {
	why := "the request has a tenant, enforce_cache_salt is on, or engines transfer prompts"
	if p.Everywhere && p.Once != nil {
		why = "the request must go to all engines"
	} else if p.unread == "" || p.Ext.Tenant == "" && !rd.EnforcesSalt && !rd.mayTransfer(p) {
		return nil
	}
	status := http.StatusBadRequest
	switch p.unread {
	case fallbackOversized:
		status = http.StatusRequestEntityTooLarge
	case FallbackMemory:
		status = http.StatusServiceUnavailable
	}
	return &api.Refusal{API: OrUnplanned(p.API), Status: status, Code: api.CodeUnreadable, Err: fmt.Errorf(
		"the router cannot read the body (%s), and must, because %s", p.unread, why)}
}

// mayTransfer returns whether an engine may read from an inference which host to transfer from.
func (rd *Reader) mayTransfer(p *Plan) bool {
	return p.prefills && (p.API != nil || body.IsJSON(body.MediaType(p.HTTP.Header))) && rd.Transfers() &&
		rd.Grants(p.HTTP)&nvext.Pins == 0
}
