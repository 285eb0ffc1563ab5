package turn

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
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

const (
	// openTimeout is how long an engine may take to open a session.
	openTimeout = 10 * time.Second
	// engineGrace is how much longer the engine keeps an idle session than the router, so that
	// the router closes it first. SGLang counts from the beginning of the latest turn, and the
	// router from its end, so this includes the longest turn.
	engineGrace = 10*time.Minute + 30*time.Second
	// maxOpened bounds an engine's answer to the opening of a session, in bytes.
	maxOpened = 16 << 10
)

// isLost returns whether a binding stands for a session that an engine held until it expired. It
// lives on for a while, so that the next turn is refused: its answer would lack the turns before.
func isLost(b *affinity.Binding) bool {
	return b.Kind == affinity.EngineBacked && b.EngineSession == ""
}

// enterEngine finds out whether an engine holds the session. If so, the request waits until it
// has the session alone. An engine serves one turn of a session at a time: a second one can end
// SGLang's scheduler.
func (t *Turn) enterEngine(ctx context.Context) error {
	s := &t.plan.Session
	t.Pool.AwaitRestored(ctx)
	b := t.peek(s.Key)
	if b.Version == 0 {
		t.Pool.Sessions.Reported() // it may have expired just now: see isLost
		b = t.peek(s.Key)
	}
	if b.Version == 0 && !s.Opens() && !t.dry {
		b = t.claimed(ctx)
	}
	if b.Kind != affinity.EngineBacked && !s.Opens() && !t.Pool.Sessions.HasAlone(s.Key) {
		return nil
	}
	if !t.dry {
		if err := t.haveAlone(ctx); err != nil {
			return err
		}
		t.find(ctx) // the turn may have waited long
		if err := t.followClaim(ctx); err != nil {
			return err
		}
		b = t.bound
	}
	switch {
	case b.Kind == affinity.EngineBacked && !isLost(&b):
		t.bound, t.held = b, b.EngineSession
		return nil
	case s.Opens() || s.Action == nvext.ActionBind:
		return nil
	}
	return t.lost(errors.New("the engine no longer holds the session: it expired or was closed; open it again"))
}

func (t *Turn) haveAlone(ctx context.Context) error {
	t.Pool.Sessions.Begin(&t.use, t.plan.Session.Key)
	alone, err := t.use.Alone(ctx, time.Duration(t.Pool.Settings.Load().MaxWait))
	if err == nil && alone {
		alone, err = t.lockOut(ctx)
	}
	if err != nil || alone {
		return err
	}
	return &api.Refusal{
		API: t.plan.API, Status: http.StatusConflict, Code: api.CodeSessionBusy, RetryAfter: 1,
		Err: errors.New("an earlier turn of the session is still under way, and the engine serves one at a time"),
	}
}

// Held returns the target whose engine holds the session; false if none does. All attempts must
// go there.
func (t *Turn) Held() (at kvscore.Target, held bool) { return t.bound.Target, t.held != "" }

// EngineSession returns the engine's id of the session, empty if no engine holds it.
func (t *Turn) EngineSession() string { return t.held }

// Leave says that the turn does not go to the engine that held the session, which closes it after
// the turn.
func (t *Turn) Leave() {
	if !t.dry {
		if old, ended := t.Pool.Sessions.Unbind(t.plan.Session.Key, t.bound.Version); ended {
			t.closes = &old.Want
		}
		t.dropClaim()
	}
	t.held, t.bound = "", affinity.Binding{}
}

// Gone unbinds a session whose worker is no upstream any more. It returns the refusal.
func (t *Turn) Gone() error {
	t.unbind()
	gone := t.bound.Target.Worker
	return t.lost(fmt.Errorf("worker %d, whose engine held the session, is gone; open the session again", gone))
}

func (t *Turn) lost(err error) error {
	return &api.Refusal{API: t.plan.API, Status: http.StatusGone, Code: api.CodeSessionLost, Err: err}
}

// NotOpened returns the refusal of a request whose session cannot be opened.
func NotOpened(p *plan.Plan, status int, err error) error {
	return &api.Refusal{API: p.API, Status: status, Code: api.CodeSessionOpen, Param: "nvext.session_control", Err: err}
}

// Open has the engine of an attempt open the session, if the client wants that, and binds it. The
// error is a refusal, or that of a connection: then another worker may open it.
func (t *Turn) Open(req *http.Request, w *worker.Worker, at kvscore.Target) error {
	s := &t.plan.Session
	if !s.Opens() {
		return nil
	}
	id := t.held // of a session that the client opens once more
	if id == "" {
		id = strings.Clone(s.EngineSession) // it outlives the body
	}
	want := affinity.Want{Target: at, TTL: t.ttl(), Scope: s.Scope, Kind: affinity.EngineBacked, EngineSession: id}
	if err := t.ask(req, w, &want); err != nil || t.held != "" {
		return err
	}
	b, ok, err := t.use.Bind(t.bound.Version, want)
	if err == nil && !ok && b.Kind == affinity.RouterOnly {
		b, ok, err = t.use.Bind(b.Version, want)
	}
	switch {
	case err != nil:
		t.Pool.Closer.Close(&want)
		return NotOpened(t.plan, http.StatusServiceUnavailable, fmt.Errorf("the store cannot bind the session: %w", err))
	case !ok && (b.Target != at || b.EngineSession != id):
		t.Pool.Closer.Close(&want)
		return NotOpened(t.plan, http.StatusConflict, errors.New("another request bound the session meanwhile"))
	}
	t.held, t.bound, t.pending = id, b, false
	if ok {
		t.opened = b.Version
	}
	if err := t.makeClaim(); err != nil {
		t.RollBack()
		return err
	}
	if c := t.closes; c != nil && c.Target.Worker == at.Worker && c.EngineSession == id {
		t.closes = nil // the session that the turn left is the one that it has opened again
	}
	return nil
}

// ask asks a worker's engine to open a session, and waits for its answer.
func (t *Turn) ask(req *http.Request, w *worker.Worker, want *affinity.Want) error {
	call, again := engine.OpenSession(want.EngineSession, want.TTL+engineGrace), t.held != ""
	waits, cancel := context.WithTimeout(req.Context(), openTimeout)
	defer cancel()
	if err := t.Pool.Closer.Await(waits, w, want.EngineSession); err != nil {
		return NotOpened(t.plan, http.StatusServiceUnavailable,
			errors.New("the engine is still closing the session of this id"))
	}
	var authorization []string
	if w.Settings().APIKey == "" {
		authorization = req.Header["Authorization"]
	}
	// The call goes on if the client leaves: a close could overtake it.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(req.Context()), openTimeout)
	defer cancel()
	send := func(c engine.Call) (int, []byte, error) {
		return t.Client.Fetch(ctx, w.Dial, http.MethodPost, c.Path, c.Body, authorization, maxOpened)
	}
	status, answer, err := send(call)
	if err == nil && status != http.StatusOK && !again && engine.Opened(status, answer) == nil {
		if t.heldForOther(want) {
			return NotOpened(t.plan, http.StatusConflict,
				fmt.Errorf("the engine of worker %d holds a session of this id with another model", w.ID))
		}
		// The session is open from before, for instance since a restart of the router. The
		// client sends a new conversation, so the engine must forget the old one.
		if _, _, err = send(engine.CloseSession(want.EngineSession)); err == nil {
			status, answer, err = send(call)
		}
	}
	if _, unconnected := errors.AsType[reverseproxy.DialError](err); unconnected || err != nil && worker.Refused(err) {
		return err
	}
	if err == nil {
		err = engine.Opened(status, answer)
	}
	outcome := "opened"
	if err != nil {
		outcome = "failed"
	}
	if !again {
		observe.EngineSession(t.Pool.Name, "open", outcome)
	}
	if err == nil {
		return nil
	}
	if !again && status/100 != 4 { // the engine may have opened it all the same
		t.Pool.Closer.Close(want)
	}
	if left := req.Context().Err(); left != nil {
		return left
	}
	err = fmt.Errorf("the engine of worker %d did not open the session: %w", w.ID, err)
	return NotOpened(t.plan, http.StatusBadGateway, err)
}

// heldForOther returns whether the engine holds a session of the id for another key: that of the
// same client with another model. It reads all bindings.
func (t *Turn) heldForOther(want *affinity.Want) (found bool) {
	t.Pool.Sessions.Dump(func(part []affinity.Saved) bool {
		for i := range part {
			b := &part[i]
			same := b.EngineSession == want.EngineSession && b.Target.Worker == want.Target.Worker
			found = found || same && b.Key != t.plan.Session.Key
		}
		return !found
	})
	return found
}

// RollBack unbinds and closes a session that was opened for a request that got no good answer.
func (t *Turn) RollBack() {
	if t.opened != 0 {
		t.unbind()
		t.held, t.opened, t.bound = "", 0, affinity.Binding{}
	}
}
