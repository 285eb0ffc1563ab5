package dispatch

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// engineSession is a request's part in a session that an engine holds. See [pool.Pool.CloseSession]
// for who closes it, and docs/sessions.md for the rules.
type engineSession struct {
	id     string           // the engine's id of it, empty if no engine holds it
	opened affinity.Version // of the binding made for this request, until an answer begins
	closes *affinity.Want   // to be closed after the request
}

const (
	// openTimeout is how long an engine may take to open a session.
	openTimeout = 10 * time.Second
	// engineGrace is how much longer the engine keeps an idle session than the router, so that
	// the router closes it first. SGLang counts from the beginning of the latest turn, and the
	// router from its end, so this includes the longest turn.
	engineGrace = 10*time.Minute + 30*time.Second
)

// enterSession finds out whether an engine holds the request's session. If so, the request goes
// to that engine only, and has the session alone. The error is a refusal.
func (d *Dispatch) enterSession(r *http.Request) error {
	s, ctx := &d.plan.Session, r.Context()
	if s.EngineSession == "" || d.plan.Request == nil {
		return nil
	}
	d.Pool.AwaitRestored(ctx)
	b := d.peek(ctx, s.Key)
	if b.Kind != affinity.EngineBacked && !s.Opens() && !d.Pool.Sessions.HasAlone(s.Key) {
		return d.enterUnheld(ctx)
	}
	if !d.dry {
		if err := d.haveAlone(ctx); err != nil {
			return err
		}
		b, _ = d.find(ctx) // it may have waited long
	}
	if b.Kind != affinity.EngineBacked {
		if s.Opens() {
			return nil
		}
		return d.lost(errors.New("the session was closed, or not opened, while the request waited for an earlier turn"))
	}
	return d.stayAt(r, &b)
}

// enterUnheld refuses a turn of a session that the engine has lost: it lacks the turns before. A
// client that binds the session has only the router remember it.
func (d *Dispatch) enterUnheld(ctx context.Context) error {
	s := &d.plan.Session
	switch {
	case s.Action != nvext.ActionBind:
		if d.Pool.Lost(ctx, s.Key) {
			return d.lost(errors.New("the engine no longer holds the session: it expired, or its worker failed; open it again"))
		}
	case !d.dry:
		d.Pool.ForgetLost(s.Key)
	}
	return nil
}

// haveAlone waits until the request has the session alone: an engine serves one turn of a
// session at a time.
func (d *Dispatch) haveAlone(ctx context.Context) error {
	d.Pool.Sessions.Begin(&d.use, d.plan.Session.Key)
	patience := time.Duration(d.Pool.Settings.Load().MaxWait)
	if d.RefuseBusy {
		patience = 0
	}
	alone, err := d.use.Alone(ctx, patience)
	if err != nil {
		return err
	}
	if !alone {
		return &api.Refusal{
			API: d.plan.API, Status: http.StatusConflict, Code: api.CodeSessionBusy, RetryAfter: 1,
			Err: errors.New("an earlier turn of the session is still under way, and the engine serves one at a time"),
		}
	}
	return nil
}

// stayAt makes the target that holds the session the only one. The client's last turn unbinds
// the session at once.
func (d *Dispatch) stayAt(r *http.Request, b *affinity.Binding) error {
	p, w := d.plan, d.named(d.upstreams(r), b.Target.Worker)
	d.bound, d.pending = *b, false
	if w == nil && d.Pool.IsNowUpstream(b.Target.Worker) {
		return &api.Refusal{
			API: p.API, Status: http.StatusServiceUnavailable, Code: api.CodeNoWorker, RetryAfter: 1,
			Err: fmt.Errorf("worker %d, whose engine holds the session, is not offered for this request now; try again later", b.Target.Worker),
		}
	}
	if w == nil {
		d.unbind(true)
		return d.lost(fmt.Errorf("worker %d, whose engine held the session, is gone; open the session again", b.Target.Worker))
	}
	if e := w.Engine(); !e.HoldsSessions(p.Name) {
		return d.notOpened(http.StatusBadRequest, fmt.Errorf("the engine of worker %d holds the session, but not in the API %s", w.ID, p.Name))
	}
	if p.Pin.Named && p.Pin.Worker != w.ID || p.Pin.Rank.Set && p.Pin.Rank.Value != b.Target.Rank {
		if !p.Session.Final {
			return d.badPin("nvext: the session is on worker %d, rank %d, whose engine holds it", w.ID, b.Target.Rank)
		}
		d.leaveEngine(b) // the turn goes where the client says, and the close where the session is
		return nil
	}
	if !d.keepsApart(w) {
		return d.shared("not the engine with the session")
	}
	d.only = only{w, nvext.Some(b.Target.Rank), ReasonSession}
	d.backed.id = b.EngineSession
	if p.Session.Final {
		d.leaveEngine(b)
	}
	return nil
}

// leaveEngine unbinds the session. The engine closes it after this request.
func (d *Dispatch) leaveEngine(b *affinity.Binding) {
	if d.dry {
		return
	}
	if old, ended, _ := d.Pool.Sessions.Unbind(context.Background(), d.plan.Session.Key, b.Version); ended {
		d.backed.closes = &old.Want
	}
}

// leaveSession ends the request's part in its session. It has the engine close the session that
// was left first: the next turn of the session begins when this one has ended.
func (d *Dispatch) leaveSession() {
	if held := d.backed.closes; held != nil {
		d.backed.closes = nil
		d.Pool.CloseSession(*held)
	}
	_ = d.use.End(context.Background(), 0)
}

// openSession has the attempt's engine open the session, if the client wants that, and binds
// it. The error is a refusal, or that of a connection: then another worker may open it.
func (d *Dispatch) openSession(req *http.Request) error {
	a, s := d.attempt, &d.plan.Session
	if !s.Opens() {
		return nil
	}
	id := d.backed.id // of a session that the client opens once more
	if id == "" {
		id = strings.Clone(s.EngineSession) // it outlives the body
	}
	ttl := d.sessionTTL()
	if err := d.askToOpen(req, id, ttl); err != nil {
		return err
	}
	if d.backed.id != "" {
		return nil // it is bound
	}
	want := affinity.Want{Target: a.Target, TTL: ttl, Scope: s.Scope, Kind: affinity.EngineBacked, EngineSession: id}
	b, ok, err := d.use.Bind(context.Background(), d.bound.Version, want)
	if err == nil && !ok && b.Kind == affinity.RouterOnly {
		b, ok, err = d.use.Bind(context.Background(), b.Version, want)
	}
	switch {
	case err != nil:
		d.Pool.CloseSession(want)
		return d.notOpened(http.StatusServiceUnavailable, fmt.Errorf("the router cannot bind the session: %w", err))
	case !ok && (b.Target != a.Target || b.EngineSession != id):
		d.Pool.CloseSession(want)
		return d.notOpened(http.StatusConflict, errors.New("another request bound the session meanwhile"))
	}
	d.backed.id, d.bound, d.pending = id, b, false
	if ok {
		d.backed.opened = b.Version
	}
	d.Pool.ForgetLost(s.Key)
	d.Pool.BoundModels.Add(d.plan.Model)
	return nil
}

// askToOpen asks the attempt's engine to open a session, and waits for its answer.
func (d *Dispatch) askToOpen(req *http.Request, id string, ttl time.Duration) error {
	w := d.attempt.Worker
	e := w.Engine()
	call, ok := e.OpenSession(id, ttl+engineGrace)
	if !ok {
		return d.notOpened(http.StatusBadRequest, fmt.Errorf("the engine of worker %d holds no sessions", w.ID))
	}
	waits, cancel := context.WithTimeout(req.Context(), openTimeout)
	defer cancel()
	if d.backed.id == "" && d.Pool.HoldsForOther(d.plan.Session.Key, w, id) {
		return d.notOpened(http.StatusConflict, fmt.Errorf("the engine of worker %d holds a session of this id with another model", w.ID))
	}
	if err := d.Pool.AwaitClosed(waits, w, id); err != nil {
		return d.notOpened(http.StatusServiceUnavailable, errors.New("the engine is still closing the session of this id"))
	}
	var authorization []string
	if d.Pool.Settings.Load().Worker(w.Dial).APIKey == "" {
		authorization = req.Header["Authorization"]
	}
	// The call goes on if the client leaves: a close could overtake it.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(req.Context()), openTimeout)
	defer cancel()
	ask := func(c engine.SessionCall) (int, []byte, error) {
		return d.Client.Fetch(ctx, w.Dial, http.MethodPost, c.Path, c.Body, authorization, maxOpened)
	}
	status, answer, err := ask(call)
	if err == nil && status != http.StatusOK && d.backed.id == "" && e.Opened(status, answer) == nil {
		// The session is open from before, for instance since a restart of the router. The
		// client sends a new conversation, so the engine must forget the old one.
		if _, _, err = ask(e.CloseSession(id)); err == nil {
			status, answer, err = ask(call)
		}
	}
	if _, unconnected := errors.AsType[reverseproxy.DialError](err); unconnected || err != nil && pool.Refused(err) {
		return err
	}
	if err == nil {
		err = e.Opened(status, answer)
	}
	d.Pool.CountOpened(err == nil)
	if err == nil {
		return nil
	}
	if d.backed.id == "" && status/100 != 4 { // the engine may have opened it all the same
		d.Pool.CloseSession(affinity.Want{Target: d.attempt.Target, EngineSession: id})
	}
	if left := req.Context().Err(); left != nil {
		return left
	}
	return d.notOpened(http.StatusBadGateway, fmt.Errorf("the engine of worker %d did not open the session: %w", w.ID, err))
}

// maxOpened bounds an engine's answer to the opening of a session, in bytes.
const maxOpened = 16 << 10

// rollBack unbinds and closes a session that was opened for a request that got no answer.
func (d *Dispatch) rollBack() {
	if v := d.backed.opened; v != 0 {
		_, _, _ = d.Pool.EndSession(context.Background(), d.plan.Session.Key, v, false)
		d.backed.id, d.backed.opened = "", 0
		d.bound, d.pending = affinity.Binding{}, false
	}
}

// keepSession keeps the session in the engine, for the answer has begun. No other worker may
// serve the request from now on.
func (d *Dispatch) keepSession() {
	if d.backed.opened != 0 {
		d.backed.opened = 0
		d.only = only{d.attempt.Worker, nvext.Some(d.attempt.Target.Rank), ReasonSession}
	}
}

// doubtSession has the worker asked soon whether it has restarted, because its engine refused a
// turn of a session.
func (d *Dispatch) doubtSession() {
	if w := d.attempt.Worker; d.backed.id != "" {
		w.AskAgain()
		d.Probes.AskAgain(w)
	}
}

func (d *Dispatch) notOpened(status int, err error) error {
	return &api.Refusal{API: d.plan.API, Status: status, Code: api.CodeSessionOpen, Param: "nvext.session_control", Err: err}
}

func (d *Dispatch) lost(err error) error {
	return &api.Refusal{API: d.plan.API, Status: http.StatusGone, Code: api.CodeSessionLost, Err: err}
}
