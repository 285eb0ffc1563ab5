package turn

import (
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"
)

// With several routers, an engine's session is claimed in the server that they share: its claim says
// which engine holds it. A lock beside it keeps turns through other routers out.
//
// Bindings that routers share do not replace claims, as TestEngineSessionsOverRouters shows. Two routers that
// open a session at once open it in two engines, and a turn that overtakes the binding loses its context.

const (
	// claimWithin bounds each question to the server.
	claimWithin = time.Second
	// claimedWithin bounds the question that may also concern an ordinary session.
	claimedWithin = 200 * time.Millisecond
	// lockFor is how long a lock outlives its router. It is renewed each renewEvery.
	lockFor, renewEvery = 15 * time.Second, time.Second
	// lockPause is the time between two tries to get a lock.
	lockPause = 10 * time.Millisecond
)

// claim is the value of a claim.
type claim struct {
	Dial    string        `json:"dial"`
	Rank    uint32        `json:"rank"`
	Session string        `json:"session"` // the engine's id
	TTL     time.Duration `json:"ttl"`
	Number  uint64        `json:"number"` // no two claims are equal
}

func claimName(key affinity.Key) string { return "session:" + key.String() }

var errNoClaims = errors.New("there is no connection")

// ask asks the server that routers share, if they do. f is not called without a connection.
func ask(ctx context.Context, p *pool.Pool, f func(context.Context, journal.Claims) error) error {
	c, shares := p.Claims()
	if !shares {
		return nil
	}
	if c == nil {
		return errNoClaims
	}
	ctx, end := context.WithTimeout(ctx, claimWithin)
	defer end()
	return f(ctx, c)
}

// uncertain returns the refusal of a turn while the server cannot be asked.
func (t *Turn) uncertain(err error) error {
	t.Pool.Logger().Debug("the server of share cannot be asked", zap.Error(err)) // the client must not see its address
	return NotOpened(t.plan, http.StatusServiceUnavailable,
		errors.New("other routers may use the session of the engine, and the router cannot ask them now"))
}

// lock keeps turns of a session through other routers out.
type lock struct {
	name, value string
	end         context.CancelFunc
}

// lockOut keeps turns of other routers out. It returns false if one of them is still under way when
// the time is up.
func (t *Turn) lockOut(ctx context.Context) (alone bool, err error) {
	if _, shares := t.Pool.Claims(); !shares || t.lock != nil {
		return true, nil
	}
	l := newLock(t.plan.Session.Key)
	for end := time.Now().Add(time.Duration(t.Pool.Settings.Load().MaxWait)); ; {
		err = ask(ctx, t.Pool, func(ctx context.Context, c journal.Claims) (err error) {
			alone, err = c.Claim(ctx, l.name, l.value, lockFor)
			return err
		})
		switch {
		case err != nil:
			go l.release(t.Pool) //nolint:gosec // the server may have locked it all the same, also for a client that has left
			if ctx.Err() != nil {
				return false, ctx.Err()
			}
			return false, t.uncertain(err)
		case alone:
			t.lock = l
			var renews context.Context
			renews, l.end = context.WithCancel(context.Background())
			go l.renew(renews, t.Pool)
			return true, nil
		case time.Now().After(end):
			return false, nil
		}
		if !pool.Sleep(ctx, lockPause) {
			return false, ctx.Err()
		}
	}
}

// renew renews the lock until it ends. If the server has lost it, renew locks it again.
func (l *lock) renew(ctx context.Context, p *pool.Pool) {
	ticker := time.NewTicker(renewEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			_ = ask(ctx, p, func(ctx context.Context, c journal.Claims) error {
				ok, err := c.Renew(ctx, l.name, l.value, lockFor)
				if err == nil && !ok {
					_, err = c.Claim(ctx, l.name, l.value, lockFor)
				}
				return err
			})
		}
	}
}

// extend gives a claim of the value a new time; 0 ends it. Without the server, the claim ends by itself.
func extend(p *pool.Pool, name, value string, ttl time.Duration) {
	_ = ask(context.Background(), p, func(ctx context.Context, c journal.Claims) error {
		_, err := c.Renew(ctx, name, value, ttl)
		return err
	})
}

func (l *lock) release(p *pool.Pool) { extend(p, l.name, l.value, 0) }

// leaveClaims renews the claim of a turn that was computed, and ends the lock: after the engine has
// closed the session, if it is to. A close must not meet the next opening.
func (t *Turn) leaveClaims(computed bool, held *affinity.Want) {
	if t.lock == nil {
		return
	}
	l := t.lock
	t.lock = nil
	if computed && t.claim != "" {
		extend(t.Pool, claimName(t.plan.Session.Key), t.claim, t.ttl()+engineGrace)
	}
	l.endAfter(t.Pool, held)
}

// endAfter ends the lock when the closing of a session is over, if there is one.
func (l *lock) endAfter(p *pool.Pool, held *affinity.Want) {
	end := func() {
		l.end()
		l.release(p)
	}
	w := p.ByID(held.Target.Worker)
	if w == nil || !p.Closer.Closes(w, held.EngineSession) {
		end()
		return
	}
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), openTimeout)
		defer cancel()
		_ = p.Closer.Await(ctx, w, held.EngineSession)
		end()
	}()
}

// findClaim returns the session's claim, empty if there is none.
func (t *Turn) findClaim(ctx context.Context) (value string, err error) {
	err = ask(ctx, t.Pool, func(ctx context.Context, c journal.Claims) (err error) {
		value, _, err = c.Find(ctx, claimName(t.plan.Session.Key))
		return err
	})
	return value, err
}

// claimed asks once whether an engine holds a session that this router does not know: another may
// have opened it just now. If so, it is bound as such.
func (t *Turn) claimed(ctx context.Context) (b affinity.Binding) {
	holds := func(w *worker.Worker) bool {
		e := w.Engine()
		return e.HoldsSessions(t.plan.Name)
	}
	if _, shares := t.Pool.Claims(); !shares || !slices.ContainsFunc(t.Pool.All(), holds) {
		return b
	}
	within, end := context.WithTimeout(ctx, claimedWithin)
	defer end()
	if value, err := t.findClaim(within); err == nil && value != "" {
		t.bindClaim(value, affinity.Binding{})
	}
	return t.peek(t.plan.Session.Key)
}

// followClaim binds the session to where its claim says. The turn has the lock. Without a claim, what
// this router knows is claimed: the server may have lost it.
func (t *Turn) followClaim(ctx context.Context) error {
	if t.lock == nil {
		return nil
	}
	var err error
	switch t.claim, err = t.findClaim(ctx); {
	case err != nil:
		return t.uncertain(err)
	case t.claim != "":
		t.bindClaim(t.claim, t.bound)
		t.find(ctx)
	case t.bound.Kind == affinity.EngineBacked && !isLost(&t.bound):
		return t.makeClaim()
	}
	return nil
}

// bindClaim binds the session to where a claim says, in place of what this router has seen.
func (t *Turn) bindClaim(value string, seen affinity.Binding) {
	var one claim
	if json.Unmarshal([]byte(value), &one) != nil || one.Session == "" || one.TTL <= 0 {
		return // of another version
	}
	w := t.Pool.Upstream(one.Dial)
	if w == nil {
		return
	}
	want := affinity.Want{
		Target: kvscore.Target{Worker: w.ID, Rank: one.Rank}, TTL: one.TTL, Scope: t.plan.Session.Scope,
		Kind: affinity.EngineBacked, EngineSession: one.Session,
	}
	if seen.Target == want.Target && seen.EngineSession == want.EngineSession && seen.Kind == want.Kind {
		return
	}
	if _, _, err := t.Pool.Sessions.Bind(t.plan.Session.Key, seen.Version, want); err != nil {
		t.Failed()
	}
}

// makeClaim claims the session that an engine holds. The turn has the lock.
func (t *Turn) makeClaim() error {
	w := t.Pool.ByID(t.bound.Target.Worker)
	if t.lock == nil || t.claim != "" || w == nil {
		return nil
	}
	value, err := json.Marshal(claim{w.Dial, t.bound.Target.Rank, t.bound.EngineSession, t.bound.TTL, rand.Uint64()}) //nolint:gosec // only differs
	if err != nil {
		return err
	}
	err = ask(context.Background(), t.Pool, func(ctx context.Context, c journal.Claims) error {
		mine, err := c.Claim(ctx, claimName(t.plan.Session.Key), string(value), t.bound.TTL+engineGrace)
		if err == nil && !mine {
			err = errors.New("another router has claimed it meanwhile")
		}
		return err
	})
	if err != nil {
		return t.uncertain(err)
	}
	t.claim = string(value)
	return nil
}

func (t *Turn) dropClaim() {
	if t.claim != "" {
		endClaim(t.Pool, t.plan.Session.Key)
		t.claim = ""
	}
}

// endClaim ends a session's claim, and returns whether the session is to be closed: not if another
// router has ended the claim.
func endClaim(p *pool.Pool, key affinity.Key) (closes bool) {
	ended := true
	err := ask(context.Background(), p, func(ctx context.Context, c journal.Claims) error {
		value, _, err := c.Find(ctx, claimName(key))
		if err == nil {
			ended, err = c.Renew(ctx, claimName(key), value, 0)
		}
		return err
	})
	return ended || err != nil
}

// endUnused ends the claim of a session that has expired here, unless another router has used it since,
// or uses it now. It returns the lock, which ends after the closing; nil if the session is not to be
// closed. Without the server, the engine's own timeout decides.
func endUnused(p *pool.Pool, key affinity.Key) *lock {
	l := newLock(key)
	ended := false
	_ = ask(context.Background(), p, func(ctx context.Context, c journal.Claims) error {
		mine, err := c.Claim(ctx, l.name, l.value, lockFor)
		if err != nil || !mine {
			return err
		}
		value, left, err := c.Find(ctx, claimName(key))
		if err == nil && value != "" && left <= engineGrace+claimWithin {
			ended, err = c.Renew(ctx, claimName(key), value, 0)
		}
		return err
	})
	if !ended {
		l.release(p)
		return nil
	}
	return l
}

func newLock(key affinity.Key) *lock {
	value := strconv.FormatUint(rand.Uint64(), 36) //nolint:gosec // only differs
	return &lock{name: "turn:" + key.String(), value: value, end: func() {}}
}
