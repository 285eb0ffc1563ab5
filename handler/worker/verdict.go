package worker

import (
	"cmp"
	"errors"
	"iter"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// OutcomeKind is what an attempt has shown of its worker. It may mark the worker down, see Health:
//
//	outcome                                     | enough for a mark                             | the worker gets no requests
//	--------------------------------------------|-----------------------------------------------|----------------------------
//	OutcomeRefused, OutcomeUnreachable          | one                                           | until the router connects
//	a question of the router's own, unanswered  | fewUnanswered in a row, and no output         | until it answers
//	OutcomeBroken                               | one                                           | for 0.5 to 3 s
//	OutcomeBusy                                 | one                                           | for 0.5 to 3 s, or as it asks
//	OutcomeErrored                              | most answers, unlike those of other workers   | for 0.5 to 3 s
//	no output of its streams                    | hungAfter, or longer if its work explains that| until it makes progress
//
// Other signs mark no worker down. Package kvscore raises the cost of outliers and of slow workers. A restart clears
// the cache model, and contradictions end the use of KV events. After a failed transfer, requests avoid the pair of workers.
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
	Peers      iter.Seq[*Worker] // to compare the worker with
	ServerSide bool              // the client hardly caused the error
	CulpritKey uint64            // of the session or the prompt
}

// Verdict is what a sign has changed.
type Verdict struct {
	Well       bool          // the worker is healthy again
	Down       bool          // it was healthy, and is marked down
	Hung       bool          // it is found hung
	Progresses bool          // it is not hung any more
	Ended      bool          // nothing listens at its address since: its process has ended
	Limited    bool          // the router's own system is at a limit
	Why        string        // it is marked down, or the limit
	For        time.Duration // it was silent, or hung
	Streams    int           // that wait for output of a hung worker
}

const (
	// fewUnanswered is how many requests of the router's own in a row must stay unanswered
	// to mark a worker down.
	fewUnanswered = 2
	// hungChecks is how many checks in a row must find a worker hung. A byte may arrive
	// just after one of them.
	hungChecks = 3
	// HungCheck is the time between two checks for hung workers.
	HungCheck = time.Second
	// hungAfter is the least silence of a hung worker, endedAfter that of one at whose address nothing
	// listens: its process shuts down.
	hungAfter, endedAfter = 15 * time.Second, 5 * time.Second
	// quietTimes lengthens the limit for streams that stall while the worker answers the router's own
	// questions and no other worker has output. It also lengthens it for streams that cannot move.
	quietTimes = 4
	// hungPrefills is how many times the predicted time a first token may take.
	hungPrefills = 4
	// leastRate is the assumed prefill rate of a worker without timings, in tokens a second.
	leastRate = 500.0
)

// Record records the outcome of an attempt on the worker.
func (w *Worker) Record(t time.Time, o *Outcome) (v Verdict) {
	switch o.Kind {
	case OutcomeNone:
		return v
	case OutcomeLimited:
		return Verdict{Limited: true, Why: o.Why}
	case OutcomeRefused:
		return w.away(t, Refusing, o.Why)
	case OutcomeUnreachable:
		return w.away(t, Unreachable, o.Why)
	case OutcomeBroken:
		w.AskAgain()
	case OutcomeAnswered, OutcomeGood, OutcomeBusy, OutcomeErrored:
		v.Well = w.answered()
	}
	if o.Kind == OutcomeAnswered {
		return v
	}
	if o.Kind == OutcomeGood {
		if !w.IsHung() && w.Health.Succeed(t, o.Begun) { // a header alone is no progress
			v.Well = true
		}
		return v
	}
	why := o.Why
	if o.Kind == OutcomeErrored {
		if !w.isWorse(t, o) {
			return v
		}
		why = "most answers are errors, unlike those of other workers: " + why
	}
	if w.IsBackup() && o.Wait > 0 {
		w.Health.Rest(t.Add(o.Wait))
	}
	if v.Down = w.Health.Fail(t, o.Begun, o.Wait, o.Kind == OutcomeBusy); v.Down {
		v.Why = why
	}
	return v
}

// RecordOwn records how a request of the router's own ended. status is 0 if the worker did not answer. A
// worker that sends tokens may be too busy to answer.
func (w *Worker) RecordOwn(t time.Time, status int, err error) (v Verdict) {
	if status != 0 {
		w.progress.lastAnswer.Store(ticks(t))
		return Verdict{Well: w.answered()}
	}
	if o := Unanswered(err); o.Kind != OutcomeBroken {
		return w.Record(t, &o)
	}
	w.AskAgain()
	if w.outputSince(t.Add(-ProbeEvery)) || !w.Health.Unanswered() {
		return v
	}
	return w.away(t, Unresponsive, err.Error())
}

// away records that the worker is away, and marks it down.
func (w *Worker) away(t time.Time, r Reach, why string) Verdict {
	previous, wasWell := w.Health.RecordAway(t, r)
	v := Verdict{Down: wasWell, Ended: r == Refusing && previous != Refusing}
	if wasWell {
		v.Why = why
	}
	return v
}

// answered records that the worker answered, and returns whether that ends a mark of absence.
func (w *Worker) answered() (wasAbsent bool) {
	previous, wasAbsent := w.Health.Answered()
	if previous.Away() {
		w.AskSoon()
	}
	return wasAbsent
}

// isWorse records an error, and returns whether the worker answers with far more errors than its peers do. An
// engine whose core has died, or that lacks the model, answers errors at once, and looks like the least busy
// one. Errors that clients cause come from all workers.
func (w *Worker) isWorse(t time.Time, o *Outcome) bool {
	errs, share := w.Health.RecordError(t, o.ServerSide, o.CulpritKey)
	if errs < fewErrors || share <= 0.5 {
		return false
	}
	var answers, theirs float64
	for peer := range o.Peers {
		if peer != w {
			n, e := peer.Health.Lately(t)
			answers, theirs = answers+n, theirs+e
		}
	}
	return share > 2*theirs/max(answers, 1)+0.2
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

// Loads returns the load of a target; that of an unknown one is zero.
type Loads func(kvscore.Target) kvscore.Load

// patience returns how long an attempt's target may be silent.
func (a *Attempt) patience(loads Loads) time.Duration {
	load := loads(a.Worker.Target(int(a.Rank)))
	rate := cmp.Or(load.PrefillRate, leastRate)
	if !load.RateLearned {
		rate = min(rate, leastRate)
	}
	least := hungAfter
	if a.Worker.Health.Reach() == Refusing {
		least = endedAfter
	}
	return max(least, time.Duration(hungPrefills*float64(a.Ahead)/rate*float64(time.Second)))
}

// CheckSilence finds out whether the worker is hung. None of its active streams has then produced output for longer
// than prefills explain, while other workers make progress. Call it every HungCheck. A hung worker gets one
// request at a time, until one shows progress.
func (w *Worker) CheckSilence(t time.Time, all []*Worker, loads Loads) (v Verdict) {
	f := &w.progress
	if w.IsHung() {
		if since := w.hungSince(); w.outputSince(since) {
			w.EndHung()
			w.Health.Succeed(t, t)
			return Verdict{Progresses: true, For: t.Sub(since)}
		}
		return v
	}
	s := w.silence()
	if s.waiting == 0 || !w.isTooLong(t, &s, all, loads) {
		f.suspected = 0
		return v
	}
	if f.suspected++; f.suspected < hungChecks {
		return v
	}
	f.suspected = 0
	w.Health.MarkHung(t)
	return Verdict{Hung: true, For: t.Sub(s.since), Streams: s.waiting}
}

// isTooLong returns whether the worker's silence is longer than its work explains, while
// another worker made progress. If there is no other work, that is another worker's answer to a
// question of the router's own. This worker must then answer none itself, or its streams must
// stall for much longer: a server may answer while its engine's core hangs.
func (w *Worker) isTooLong(t time.Time, s *silence, all []*Worker, loads Loads) bool {
	silent := t.Sub(s.since)
	if silent < endedAfter {
		return false
	}
	limit := s.longest.patience(loads)
	if silent < limit {
		return false
	}
	since := s.since.Add(limit / 2)
	quiet := w.Health.Reach().Away() || s.stalled && silent >= quietTimes*limit
	return slices.ContainsFunc(all, func(o *Worker) bool {
		return o != w && (o.outputSince(since) || quiet && o.progress.lastAnswer.Load() > ticks(since))
	})
}

// IsStuck returns whether an attempt has waited for a hung worker for much longer than its limit. One
// without a token is not stuck while the worker answers the router's own questions, because the engine may
// be loading the model.
func (a *Attempt) IsStuck(t time.Time, loads Loads) bool {
	w, limit := a.Worker, quietTimes*a.patience(loads)
	return t.Sub(w.hungSince()) >= limit && t.Sub(a.Begun) >= limit && (w.Health.Reach().Away() || w.outputSince(a.Begun))
}

// MustMove returns whether an attempt must leave its hung worker. One that was sent after the worker hung
// shows whether it still does, so it stays for a while. Without a first token so far, the engine may send each
// answer whole, and is then silent while it works.
func (a *Attempt) MustMove(t time.Time, loads Loads) bool {
	if !a.Begun.Before(a.Worker.hungSince()) && t.Sub(a.Begun) < a.patience(loads) {
		return false
	}
	return loads(a.Worker.Target(int(a.Rank))).Predictions > 0 || a.IsStuck(t, loads)
}

// silence is how long a worker has been silent, and what waits for it.
type silence struct {
	since   time.Time
	stalled bool     // output came after the first of the streams had begun
	longest *Attempt // the stream with the most prefill ahead
	waiting int      // number of streams that wait for output
}

func (w *Worker) silence() (s silence) {
	f := &w.progress
	f.mu.Lock()
	defer f.mu.Unlock()
	for a := range f.attempts {
		if a.Kind == KindStream && a.waiting.Load() {
			if s.waiting == 0 || a.Begun.Before(s.since) {
				s.since = a.Begun
			}
			s.waiting++
		}
	}
	if last := tickTime(f.lastOutput.Load()); s.since.Before(last) {
		s.since, s.stalled = last, true
	}
	for a := range f.attempts {
		// an attempt that begins later does not explain the silence
		if a.Kind == KindStream && (s.longest == nil || a.Ahead >= s.longest.Ahead) && a.Begun.Before(s.since.Add(HungCheck)) {
			s.longest = a
		}
	}
	return s
}
