// Package speculative prefills the beginning of a session's next turn, if the client asks
// for it and the worker has time.
package speculative

import (
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
)

// The outcomes of speculative prefills.
const (
	outcomeOK       = "ok"        // it was computed
	outcomeFailed   = "failed"    // the worker did not answer, or with an error
	outcomeTimeout  = "timeout"   // it took too long
	outcomeNextTurn = "next_turn" // the session's next turn came first
	outcomeYielded  = "yielded"   // a client's request needed the worker
	outcomeStopped  = "stopped"   // the configuration ended
	outcomeBusy     = "busy"      // the worker had too much to do
	outcomeLimit    = "limit"     // the bound on their number was reached
	outcomeMemory   = "memory"    // there was no memory for the body
	outcomeUnfit    = "unfit"     // the turn did not end well, or its answer is not all text
	outcomeOff      = "off"       // the operator does not allow it
)

const incidentNoSuccess = "speculative prefills fail"

// Runner makes the speculative prefills of a configuration.
type Runner struct {
	*dispatch.Dispatcher
	allowed bool // by the operator

	open atomic.Int32 // expected or running; read without the lock

	mu       sync.Mutex
	sessions map[affinity.Key]*speculation // the latest of each session
	running  []*speculation
}

// NewRunner returns the runner of a dispatcher. allowed is whether the operator allows
// speculative prefills.
func NewRunner(d *dispatch.Dispatcher, allowed bool) *Runner {
	r := &Runner{Dispatcher: d, allowed: allowed}
	d.Metrics.Speculative.WithLabelValues(d.Pool.Name, outcomeOK) // shows 0
	return r
}

// Answering implements dispatch's followUps. It expects a speculative prefill if the
// client asked for one. An engine that gets the hint prefills by itself.
func (r *Runner) Answering(t dispatch.Turn, resp *http.Response) dispatch.FollowUp {
	p := t.Plan
	if !p.Ext.AgentHints.SpeculativePrefill.Value {
		return nil
	}
	if e := r.Pool.EngineOf(t.Worker); e.ReadsNVExt() {
		return nil
	}
	switch {
	case !r.allowed:
		r.count(outcomeOff)
		return nil
	case p.Request == nil || !p.Request.Continues() || p.Session.Final || t.Held || p.Ext.TokenCount > 0 || resp.StatusCode != http.StatusOK || body.Compressed(resp.Header) || t.Size < 0:
		r.count(outcomeUnfit)
		return nil
	}
	s := &speculation{r: r, session: p.Session.Key, turn: t, size: dispatch.MaxKeptText + t.Size, done: make(chan struct{})}
	if !r.expect(s) {
		r.count(outcomeMemory)
		return nil
	}
	return s.begin
}

// expect records a prefill before its turn has ended. It returns false if there is no memory
// for it.
func (r *Runner) expect(s *speculation) bool {
	if !r.Pool.Backgrounds.Keep(s.size) {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open.Add(1)
	if !s.session.IsZero() {
		if r.sessions == nil {
			r.sessions = make(map[affinity.Key]*speculation)
		}
		r.sessions[s.session] = s
	}
	return true
}

// start records that a prefill begins. It returns false if it must not.
func (r *Runner) start(s *speculation) bool {
	leave, ok := r.Pool.Background(s.turn.Worker, func() { r.callOff(s, outcomeYielded) })
	if !ok {
		r.end(s, outcomeLimit)
		return false
	}
	r.mu.Lock()
	s.leave = leave
	begins := s.outcome == ""
	if begins {
		r.running = append(r.running, s)
	}
	r.mu.Unlock()
	if !begins {
		r.end(s, s.outcome)
	}
	return begins
}

// end removes a prefill, and records its outcome unless that was set before.
func (r *Runner) end(s *speculation, outcome string) {
	r.mu.Lock()
	if s.outcome == "" {
		s.outcome = outcome
	}
	outcome = s.outcome
	if r.sessions[s.session] == s {
		delete(r.sessions, s.session)
	}
	if i := slices.Index(r.running, s); i >= 0 {
		r.running = slices.Delete(r.running, i, i+1)
	}
	r.mu.Unlock()
	if s.leave != nil {
		s.leave()
	}
	r.Pool.Backgrounds.Drop(s.size)
	r.open.Add(-1)
	close(s.done)
	r.count(outcome)
	if outcome == outcomeFailed || outcome == outcomeTimeout {
		r.Pool.Incidents.Raise(time.Now(), incidentNoSuccess, r.Pool.Logger)
	}
}

func (r *Runner) count(outcome string) {
	r.Metrics.Speculative.WithLabelValues(r.Pool.Name, outcome).Inc()
}

// callOff ends a prefill that has begun, and returns when the worker's slot is free.
func (r *Runner) callOff(s *speculation, outcome string) {
	r.mu.Lock()
	if s.outcome == "" {
		s.outcome = outcome
	}
	r.mu.Unlock()
	s.cancel()
	<-s.done
}

// Arrived implements dispatch's followUps. A turn ends the prefill that was made for it.
func (r *Runner) Arrived(p *plan.Plan) {
	if r.open.Load() == 0 || !p.Computes || p.Request == nil {
		return
	}
	var list []*speculation
	r.mu.Lock()
	if s := r.sessions[p.Session.Key]; s != nil && s.outcome == "" && !slices.Contains(r.running, s) && s.precedes(p) {
		s.outcome = outcomeNextTurn // it has not begun, and will not
	}
	for _, s := range r.running {
		if s.outcome == "" && s.precedes(p) {
			list = append(list, s)
		}
	}
	r.mu.Unlock()
	for _, s := range list {
		r.callOff(s, outcomeNextTurn)
	}
}
