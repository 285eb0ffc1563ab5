package engine

import (
	"encoding/json"
	"net/http"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine/batch"
)

// Paths at which an SGLang opens and closes sessions.
const (
	OpenPath  = "/open_session"
	ClosePath = "/close_session"
)

// SessionResult is what an engine did with a session.
type SessionResult string

const (
	// Opened: the session was opened.
	Opened SessionResult = "opened"
	// Exists: it was not opened, for it is open.
	Exists SessionResult = "exists"
	// Disabled: it was not opened, for the engine has no streaming sessions.
	Disabled SessionResult = "disabled"
	// Closed: it was closed.
	Closed SessionResult = "closed"
	// Deferred: it will be closed when its turn has ended.
	Deferred SessionResult = "deferred"
	// Unknown: there is no session to close, or to continue.
	Unknown SessionResult = "unknown"
	// Continued: the request is a turn of it.
	Continued SessionResult = "continued"
	// Busy: the turn was refused, for another one runs.
	Busy SessionResult = "busy"
	// Closing: the turn was refused, for a close is deferred.
	Closing SessionResult = "closing"
	// Unsupported: the turn was refused for members that streaming sessions lack.
	Unsupported SessionResult = "unsupported"
)

// session is a streaming session on one rank. SGLang opens and closes it on all ranks,
// and each keeps what its own turns computed.
type session struct {
	timeout time.Duration // 0: none
	active  time.Time     // when the last turn began
	context []uint32      // of the last turn that ended: its prompt and its answer
	slot    batch.Slot
	busy    bool
	closing bool
}

// ended keeps what a turn computed, when it has ended.
func (s *session) ended(r *batch.Request) {
	s.context, s.busy = slices.Concat(r.Prompt.Tokens, r.Answer), false
}

// sessionParams name a turn's session.
type sessionParams struct {
	ID      *string `json:"id"`
	Offset  int     `json:"offset"`
	Replace bool    `json:"replace"`
	Drop    bool    `json:"drop_previous_output"`
}

// turn returns the session that a request continues, nil for none. It is the first
// one in a list for several prompts.
func (e *Engine) turn(s shape, r *request) *sessionParams {
	heeds := s == generate || e.cfg.SessionsInChat && (s == chats || s == completions)
	raw := r.SessionParams
	if !heeds || e.cfg.Flavour != SGLang || raw == nil {
		return nil
	}
	var list []sessionParams
	if raw[0] != '[' {
		raw = slices.Concat([]byte{'['}, raw, []byte{']'})
	}
	if json.Unmarshal(raw, &list) != nil || len(list) == 0 || list[0].ID == nil {
		return nil
	}
	return &list[0]
}

// sessionNamed returns the id of the session that the request is to open or close.
func (x *exchange) sessionNamed() string {
	var r struct {
		SessionID string `json:"session_id"`
	}
	if p := x.r.URL.Path; x.engine.cfg.Flavour == SGLang && (p == OpenPath || p == ClosePath) {
		_ = json.Unmarshal(x.body, &r)
	}
	return r.SessionID
}

// openSession opens a session on each rank. The first rank's result is the answer.
func (x *exchange) openSession() {
	var r struct {
		Capacity  *int     `json:"capacity_of_str_len"`
		Streaming bool     `json:"streaming"`
		Timeout   *float64 `json:"timeout"`
	}
	if err := json.Unmarshal(x.body, &r); err != nil || r.Capacity == nil || x.record.Session == "" {
		x.sessionError("This engine opens sessions with capacity_of_str_len and session_id.")
		return
	}
	if !x.engine.cfg.StreamingSessions && r.Streaming {
		x.refuseSession()
		return
	}
	if !r.Streaming {
		x.sessionError("This engine has streaming sessions only.")
		return
	}
	var timeout time.Duration
	if r.Timeout != nil {
		timeout = max(1, time.Duration(*r.Timeout*float64(time.Second)))
	}
	var result SessionResult
	for _, k := range slices.Backward(x.life.ranks) { // the first comes last
		result = k.openSession(x.record.Session, timeout)
	}
	x.note(func(r *Record) { r.SessionResult = result })
	switch {
	case x.fail(x.late):
	case result == Exists:
		x.sessionError("Failed to open the session. Check if a session with the same id is still open.")
	default:
		x.value(x.record.Session)
	}
}

// closeSession closes a session on each rank. SGLang answers before it does so, and the
// same whatever becomes of it.
func (x *exchange) closeSession() {
	if x.record.Session == "" {
		x.sessionError("This engine closes sessions by session_id.")
		return
	}
	result := Unknown
	for _, k := range x.life.ranks {
		if of := k.closeSession(x.record.Session); result == Unknown || of == Deferred {
			result = of
		}
	}
	x.note(func(r *Record) { r.SessionResult = result })
	if !x.fail(x.late) {
		x.header(http.StatusOK, "")
	}
}

// refuseSession answers as an SGLang without streaming sessions.
func (x *exchange) refuseSession() {
	x.note(func(r *Record) { r.SessionResult = Disabled })
	x.sessionError("Streaming sessions are disabled. Please relaunch with --enable-streaming-session.")
}

// sessionError answers with an error in the form of SGLang's own paths.
func (x *exchange) sessionError(message string) {
	x.json(http.StatusBadRequest, object{"error": object{"message": message}})
	x.finish(Failed)
}

// begin makes the prompt of a call and its answer, for a job. It returns false if it has
// answered with an error instead.
func (x *exchange) begin(c *call, j *job) bool {
	var context []uint32
	k, turn := x.life.ranks[c.rank], c.asked.turn
	if turn != nil {
		s, result, message := k.beginTurn(turn)
		x.note(func(r *Record) { r.Session, r.SessionResult, r.Rank, r.RankFrom = *turn.ID, result, c.rank, c.rankFrom })
		if s == nil {
			x.abortTurn(c, message)
			return false
		}
		j.session, j.Slot, context = s, &s.slot, s.context
	}
	if aerr := x.engine.answered(c, context); aerr != nil {
		k.endTurn(j.session)
		x.reject(aerr)
		return false
	}
	j.Prompt, j.Answer = c.prompt, c.answer
	return true
}

// abortTurn answers as SGLang does when its scheduler aborts a request: 400, or an event
// in a stream that has begun.
func (x *exchange) abortTurn(c *call, message string) {
	flat := object{"object": "error", "message": message, "type": "BadRequestError", "param": nil, "code": http.StatusBadRequest}
	aborted := object{"text": "", "output_ids": []uint32{}, "meta_info": object{
		"id": c.id, "prompt_tokens": 1, "completion_tokens": 0, "cached_tokens": 0,
		"finish_reason": object{"type": "abort", "message": message, "status_code": http.StatusBadRequest, "err_type": "BadRequestError"},
	}}
	switch {
	case c.stream && c.shape == generate:
		x.events(aborted)
	case c.stream:
		flat["type"] = "BAD_REQUEST"
		x.events(object{"error": flat})
	case c.shape == generate:
		x.sessionError(message)
		return
	default:
		x.json(http.StatusBadRequest, flat)
	}
	x.finish(Failed)
}

// events answers with a stream of one event.
func (x *exchange) events(v any) {
	x.header(http.StatusOK, "text/event-stream; charset=utf-8")
	data, _ := json.Marshal(v)
	x.w.Write(slices.Concat([]byte("data: "), data, []byte("\n\ndata: [DONE]\n\n"))) //nolint:errcheck // the client may leave
}

func (k *rank) openSession(id string, timeout time.Duration) SessionResult {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.held[id] != nil {
		return Exists
	}
	k.held[id] = &session{timeout: timeout, active: time.Now()}
	return Opened
}

func (k *rank) closeSession(id string) SessionResult {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.held[id] == nil {
		return Unknown
	}
	return k.end(id)
}

// end closes a session, or defers that until its turn has ended.
func (k *rank) end(id string) SessionResult {
	s := k.held[id]
	if s.busy {
		s.closing = true
		return Deferred
	}
	s.slot.Release()
	delete(k.held, id)
	k.free()
	return Closed
}

// beginTurn begins a turn of a session: endTurn, abort or its last token ends it. It
// returns no session if the turn is refused, and why.
func (k *rank) beginTurn(p *sessionParams) (*session, SessionResult, string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := k.held[*p.ID]
	switch {
	case s == nil:
		return nil, Unknown, "Invalid request: session id " + *p.ID + " does not exist"
	case s.closing:
		return nil, Closing, "Invalid request: close was requested for session " + *p.ID
	case s.busy:
		return nil, Busy, "Streaming session already has an active request."
	case p.Replace:
		return nil, Unsupported, "Streaming sessions do not support replace."
	case p.Drop:
		return nil, Unsupported, "Streaming sessions do not support drop_previous_output."
	case p.Offset != 0:
		return nil, Unsupported, "Streaming sessions do not support offset."
	}
	s.busy, s.active = true, time.Now()
	return s, Continued, ""
}

// endTurn ends a turn that never came into the queue. The session may be nil.
func (k *rank) endTurn(s *session) {
	if s != nil {
		k.mu.Lock()
		s.busy = false
		k.mu.Unlock()
	}
}

// reapEvery is how often SGLang looks for sessions to close.
const reapEvery = time.Second

// reap closes sessions until the engine dies: those that are idle for too long, and
// those whose close was deferred.
func (l *life) reap() {
	tick := time.NewTicker(reapEvery)
	defer tick.Stop()
	for {
		select {
		case now := <-tick.C:
			for _, k := range l.ranks {
				k.reap(now)
			}
		case <-l.dead:
			return
		}
	}
}

func (k *rank) reap(now time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for id, s := range k.held {
		idle := s.timeout > 0 && now.Sub(s.active) > s.timeout
		if s.closing && !s.busy || idle {
			k.end(id)
		}
	}
}
