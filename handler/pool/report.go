package pool

import (
	"context"
	"errors"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// OutcomeKind is what an attempt has shown of its worker.
type OutcomeKind uint8

// The kinds of an Outcome. OutcomeNone is the zero value.
const (
	OutcomeNone        OutcomeKind = iota // nothing: the client left
	OutcomeAnswered                       // an answer that shows nothing else yet
	OutcomeGood                           // a first token, or a whole good answer
	OutcomeRefused                        // nothing listens at the worker's address
	OutcomeUnreachable                    // the router cannot connect for another reason
	OutcomeBroken                         // no answer, or an answer that broke off or came too late
	OutcomeBusy                           // the worker answered that it takes no requests now
	OutcomeErrored                        // an error that may be the worker's fault
	OutcomeLimited                        // the router's own system has no room for a connection
)

// Outcome is the result of an attempt.
type Outcome struct {
	Kind  OutcomeKind
	Begun time.Time     // of the attempt
	Why   string        // for the log
	Wait  time.Duration // the worker's Retry-After; 0 if it sent none

	// of OutcomeErrored only
	Peers []TableRow // the workers to compare with
	Own   bool       // the client hardly caused the error
	Blame uint64     // identifies the session or the prompt
}

// Report records the outcome of an attempt on a worker.
func (p *Pool) Report(w *worker.Worker, o Outcome) {
	t := time.Now()
	switch o.Kind {
	case OutcomeNone:
	case OutcomeAnswered:
		p.answered(w)
	case OutcomeGood:
		p.answered(w)
		if !w.IsHung() && w.Health.Succeed(t, o.Begun) { // a header alone is no progress
			p.logWell(w)
		}
	case OutcomeRefused:
		p.away(w, worker.Refusing, o.Why)
	case OutcomeUnreachable:
		p.away(w, worker.Unreachable, o.Why)
	case OutcomeBroken:
		w.AskAgain()
		p.markDown(w, t, &o)
	case OutcomeBusy:
		p.answered(w)
		p.markDown(w, t, &o)
	case OutcomeErrored:
		p.answered(w)
		if isWorse(w, t, &o) {
			o.Why = "most answers are errors, unlike those of other workers: " + o.Why
			p.markDown(w, t, &o)
		}
	case OutcomeLimited:
		p.Raise(t, "the router's own system has no room for a connection", errors.New(o.Why))
	}
}

func (p *Pool) markDown(w *worker.Worker, t time.Time, o *Outcome) {
	if w.IsBackup() && o.Wait > 0 {
		w.Health.Rest(t.Add(o.Wait))
	}
	if w.Health.Fail(t, o.Begun, o.Wait, o.Kind == OutcomeBusy) {
		p.logMark(w, o.Why)
	}
}

func (r *registry) logMark(w *worker.Worker, why string) {
	w.Past.MarkedDown(why)
	r.Logger().Warn("worker is marked down", zap.String("upstream", w.Dial), zap.String("why", why))
}

func (r *registry) logWell(w *worker.Worker) {
	r.Logger().Info("worker is healthy again", zap.String("upstream", w.Dial))
}

// isWorse records an error, and returns whether the worker answers with far more errors
// than its peers do. Errors that clients cause come from all workers.
func isWorse(w *worker.Worker, t time.Time, o *Outcome) bool {
	errs, share := w.Health.RecordError(t, o.Own, o.Blame)
	if errs < worker.FewErrors {
		return false
	}
	var answers, theirs float64
	for _, row := range o.Peers {
		if row.Worker != w && !row.Repeated {
			n, e := row.Worker.Health.Lately(t)
			answers, theirs = answers+n, theirs+e
		}
	}
	return worker.Worse(errs, share, theirs/max(answers, 1))
}

// SetInfo records what a worker's engine reports. It returns false if the pool has replaced
// the worker.
func (p *Pool) SetInfo(w *worker.Worker, info engine.Info) bool {
	other := info.Type != w.Engine().Type
	known := p.describe(w, info)
	if other {
		p.findAliases()
	}
	p.queue.reviewAll() // the worker's limit may have changed
	return known
}

func (r *registry) describe(w *worker.Worker, info engine.Info) (known bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.workers[w.Dial] != w {
		return false
	}
	if w.Learn(info) {
		r.layout.Add(1)
	}
	r.declareRanks(w)
	if w.Settings().MaxRunning == worker.LimitAuto {
		w.LimitSlots(worker.LimitAuto)
	}
	return true
}

// recallBootID records the start that a worker's engine reported to an earlier run. It returns
// false if the engine has reported another one since.
func (r *registry) recallBootID(w *worker.Worker, bootID string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	info := w.Engine().Info
	if info.BootID == "" {
		info.BootID = bootID
		w.Learn(info)
	}
	return bootID == "" || info.BootID == bootID
}

// awake records that a worker's engine does not sleep, before it says so itself.
func (p *Pool) awake(w *worker.Worker) {
	if info := w.Engine().Info; info.Asleep {
		info.Asleep, info.Discarded = false, false
		p.SetInfo(w, info)
	}
}

// ClearCache clears the cache models of all ranks of a worker that has lost its KV cache.
// Sessions stay bound to the worker: no other worker is better for them.
func (p *Pool) ClearCache(w *worker.Worker, why string) {
	t := time.Now()
	cached := p.Load(t, w).CachedTokens
	for rank := range w.Ranks() {
		p.Scheduler.Clear(w.Target(rank))
	}
	p.kept.journal.LostCache(w.ID)
	if why != observe.ClearedReset {
		w.Restarted()
		p.Pairs.forget(w.ID)
	}
	if why == observe.ClearedRefused || why == observe.ClearedRestarted {
		w.EndHung() // the process that hung has ended
	}
	if cached > 0 { // else there was nothing to lose
		p.countCleared(w, why, cached)
	}
}

// countCleared counts that a worker has lost its KV cache, of some tokens.
func (r *registry) countCleared(w *worker.Worker, why string, cached int64) {
	w.Past.Cleared(why)
	r.Logger().Warn("worker lost its KV cache, and the router cleared its cache model", zap.String("upstream", w.Dial),
		zap.String("why", why), zap.Int64("tokens", cached))
}

// away records that a worker is away, and marks it down. If nothing listens at its
// address, the engine's process has ended, and its KV cache with it.
func (p *Pool) away(w *worker.Worker, r worker.Reach, why string) {
	previous, wasWell := w.Health.RecordAway(time.Now(), r)
	if r == worker.Refusing && previous != worker.Refusing {
		p.awake(w)
		p.ClearCache(w, observe.ClearedRefused)
	}
	if wasWell {
		p.logMark(w, why)
	}
}

// answered records that a worker answered.
func (p *Pool) answered(w *worker.Worker) {
	if wasAbsent := w.Answered(); wasAbsent {
		p.logWell(w)
	}
}

// RecordOwnRequest records how a request of the router's own ended, and returns whether
// the worker answered. status is 0 if it did not. A worker that sends tokens may be too busy to answer.
func (p *Pool) RecordOwnRequest(ctx context.Context, w *worker.Worker, status int, err error) bool {
	if status != 0 {
		w.AnsweredRouter(time.Now())
		p.answered(w)
		return true
	}
	if errors.Is(ctx.Err(), context.Canceled) { // the configuration has ended
		return false
	}
	if o := Unanswered(err); o.Kind != OutcomeBroken {
		p.Report(w, o)
		return false
	}
	w.AskAgain()
	if !w.OutputSince(time.Now().Add(-worker.ProbeEvery)) && w.Health.Unanswered() {
		p.away(w, worker.Unresponsive, err.Error())
	}
	return false
}

// Unanswered returns the outcome of an attempt that ended with an error.
func Unanswered(err error) Outcome {
	o := Outcome{Kind: OutcomeBroken, Why: err.Error()}
	if slices.ContainsFunc(ownLimits, func(limit syscall.Errno) bool { return strings.Contains(o.Why, limit.Error()) }) {
		o.Kind = OutcomeLimited
	} else if Refused(err) {
		o.Kind = OutcomeRefused
	} else if _, unconnected := errors.AsType[reverseproxy.DialError](err); unconnected {
		o.Kind = OutcomeUnreachable
	}
	return o
}

// ownLimits are errors that say nothing of a worker. See Refused for why their text is read.
var ownLimits = []syscall.Errno{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.EADDRNOTAVAIL}

// Refused returns whether nothing listens at the worker's address. Caddy's dial error
// keeps only the text of the system's error. A name server or forward proxy that refuses
// connections says nothing of the worker.
func Refused(err error) bool {
	text := err.Error()
	return strings.Contains(text, syscall.ECONNREFUSED.Error()) &&
		!strings.Contains(text, "lookup ") && !strings.Contains(text, "proxyconnect ")
}

// noteOutliers raises a condition while errors set a worker apart from its peers.
func (r *registry) noteOutliers(t time.Time) {
	for _, w := range r.All() {
		if load := r.Load(t, w); load.ErrorsApart() {
			r.Raise(t, "a worker answers with errors or nothing, unlike the others", w.Past.LastFailure())
		}
	}
}
