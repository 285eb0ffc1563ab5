// Package split serves a request with two workers: one computes its prompt, the other one its answer.
// The package says whether a request may be split, and over which pair of workers. It runs the prefill
// phase, and knows the state of the transfer. It makes no other attempt: the caller decides what follows.
package split

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/attempt"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// Request is whether one request is split over two workers, and over which.
type Request struct {
	Of     Router
	Pool   *pool.Pool
	Plan   *plan.Plan
	Policy kvscore.Policy
	Rule   kvscore.SplitRule // the operator's

	Client     *upstream.Client
	FirstToken time.Duration // the operator's limit; 0 is none
	Metrics    interface {
		PhaseEnded(phase string, err error, took time.Duration)
	}

	// of the last choice
	Prefill  *worker.Worker // that the choice counts on; nil if none
	Forecast kvscore.Split

	asked  bool             // for whole
	whole  string           // why the request goes whole; empty if it may be split
	pinned *worker.Worker   // the one worker for the prefill that the request names
	failed []*worker.Worker // whose prefill phases failed
	tries  int              // pairs of phases that failed

	refused bool              // a prefill worker refused the request, or transferred nothing
	blame   [2]*worker.Worker // a pair whose transfer failed, if it was not the request's own fault
	blamed  time.Time         // when the request began there
	silent  bool              // its decode phase was, and no more is known
}

// Router is the request that may be split.
type Router interface {
	Offers() pool.Offers
	// Wants returns the requirements on the next attempt's worker.
	Wants() pool.Wants
	// Holds returns whether an engine has what is before the request.
	Holds() bool
}

// maxPairsTried is how many pairs of workers a request tries before it goes whole.
const maxPairsTried = 2

// WhyWhole returns why the request is not split, whatever the workers; empty if it may be. After a
// failure, it goes whole for that.
func (s *Request) WhyWhole() string {
	if !s.asked {
		s.asked, s.whole = true, s.whyWhole()
	}
	return s.whole
}

// Again allows the request all pairs of workers once more.
func (s *Request) Again() { s.asked, s.failed, s.tries = false, nil, 0 }

// KeepWhole keeps the request from being split from now on.
func (s *Request) KeepWhole(why string) { s.asked, s.whole = true, why }

func (s *Request) whyWhole() string {
	p, req := s.Plan, s.Plan.Request
	switch {
	case s.Rule == kvscore.SplitNever:
		return "split is never"
	case req == nil || p.Once != nil || req.Kind == api.None:
		return "the router does not know the prompt"
	case p.API.Work() != api.Generate:
		return "the API has no answer to decode"
	case req.Choices > 1 || req.Batch() || req.Answers() > 1:
		return "it has several answers"
	case req.Echoes || req.SkipsCache:
		return "it asks for something of the prompt's tokens, which only the engine that computes them knows"
	case req.ServerTools:
		return "the engine itself may call tools, and hands over the first turn only"
	case req.Media > 0 && s.some(func(e *engine.Engine) bool { return e.Phases().TextOnly }):
		return "it has media, which the engines cannot hand over"
	case req.MaxTokens == 1 && s.some((*engine.Engine).ServesWhole):
		return "its answer is one token"
	case s.namesItself():
		return "it names its transfer itself"
	case s.Of.Holds() || p.Response != "":
		return "an engine holds what is before it"
	}
	if _, sole := p.PinsPrefill(); sole {
		return "it names one worker for both phases"
	}
	return ""
}

func (s *Request) some(is func(*engine.Engine) bool) bool {
	return slices.ContainsFunc(s.Of.Offers().Table.Rows, func(r pool.TableRow) bool {
		return is(r.Worker.Engine())
	})
}

// Pin finds the worker that the request names for its prefill. The error says why it cannot have it.
func (s *Request) Pin() error {
	pin, offers := &s.Plan.Pin, s.Of.Offers()
	field := "nvext.prefill_worker_id"
	if !pin.Prefill.Set {
		field = "nvext.prefill_dp_rank"
	}
	if why := s.WhyWhole(); why != "" {
		return fmt.Errorf("%s: the request cannot be split: %s", field, why)
	}
	if !pin.Prefill.Set {
		want := s.wants(s.Of.Wants())
		fits := len(offers.Ups) == 0 || slices.ContainsFunc(offers.Table.Rows, func(r pool.TableRow) bool {
			return s.Pool.Meets(&want, r.Worker) == pool.Fits
		})
		if !fits || !offers.Table.Split {
			return fmt.Errorf("%s: rank %d is not one of a worker for prefills", field, pin.PrefillRank.Value)
		}
		return nil
	}
	w := offers.Worker(pin.Prefill.Value)
	switch {
	case w == nil:
		return fmt.Errorf("%s: no worker of this pool has the id %d", field, pin.Prefill.Value)
	case !w.IsPrefill():
		return fmt.Errorf("%s: worker %d is not for prefills, its role is %s", field, w.ID, w.Engine().Role())
	case pin.PrefillRank.Set && int64(pin.PrefillRank.Value) >= int64(w.Ranks()):
		return fmt.Errorf("nvext.prefill_dp_rank: worker %d has no rank %d, its ranks are 0 to %d",
			w.ID, pin.PrefillRank.Value, w.Ranks()-1)
	}
	s.pinned = w
	return nil
}

// namesItself returns whether a trusted client splits the request itself.
func (s *Request) namesItself() bool {
	p := s.Plan
	return p.Request != nil && p.Request.NamesPhases && p.Grants&nvext.Pins != 0
}

// Part returns which part of the request its worker must serve, by all other requirements.
func (s *Request) Part(want *pool.Wants) worker.Part {
	switch {
	case s.Plan.API == nil || !s.Plan.ShowsHealth, s.namesItself():
		return worker.Any
	case s.hasPrefill(want):
		return worker.Answer
	}
	return worker.Whole
}

// hasPrefill returns whether the request may be split now.
func (s *Request) hasPrefill(of *pool.Wants) bool {
	offers := s.Of.Offers()
	t := offers.Table
	if t == nil || !t.Split || s.WhyWhole() != "" {
		return false
	}
	want := s.wants(*of)
	return s.Pool.Some(&want, offers, func(w *worker.Worker, v pool.Verdict) bool { return v.Possible() && w.Engine().Splits(s.Plan.Name) })
}

// wants turns the requirements on a worker of the request into those on a worker for its prefill.
func (s *Request) wants(want pool.Wants) pool.Wants {
	want.Part, want.Only, want.Rank, want.Tried = worker.Prefill, s.pinned, pool.AnyRank, s.failed
	if r := s.Plan.Pin.PrefillRank; r.Set {
		want.Rank = int64(r.Value)
	}
	if want.Only != nil && slices.Contains(want.Tried, want.Only) {
		want.Tried = nil // there is no other
	}
	want.Kind = worker.KindPlain
	return want
}

func (s *Request) rule() kvscore.SplitRule {
	if pins, _ := s.Plan.PinsPrefill(); pins {
		return kvscore.SplitAlways
	}
	return s.Rule
}

// Ways returns whether and how the candidates may be split, for the scheduler.
func (s *Request) Ways(c *pool.Candidates) (kvscore.Split, []kvscore.Way) {
	s.Prefill, s.Forecast = nil, kvscore.Split{}
	offers := s.Of.Offers()
	if offers.Table == nil || !offers.Table.Split || s.WhyWhole() != "" {
		return s.Forecast, nil
	}
	full := s.forecast(offers, c.At)
	// even the best one may be marked down or drain; a request that names it goes there nevertheless
	pins, _ := s.Plan.PinsPrefill()
	lacks := s.Prefill != nil && !pins && !s.Prefill.TakesRequests(c.At)
	if lacks || s.Prefill == nil && !full {
		s.Pool.Raise(c.At, "no prefill worker is available, and requests go whole to others")
	}
	switch {
	case s.Prefill == nil && !full:
		return s.Forecast, nil
	case full:
		s.Forecast.Rule = s.rule()
	}
	c.Ways = slices.Grow(c.Ways[:0], len(c.Workers))[:len(c.Workers)]
	for i, w := range c.Workers {
		c.Ways[i] = s.way(w, lacks, c.At)
	}
	return s.Forecast, c.Ways
}

// forecast predicts how long the prefill phase would take on the best worker for it, without a booking.
// full: all workers for it are full.
func (s *Request) forecast(offers pool.Offers, t time.Time) (full bool) {
	want := s.wants(s.Of.Wants())
	c := s.Pool.Candidates(&want, offers, nil, t)
	defer s.Pool.Return(c)
	if len(c.Targets) == 0 {
		return len(c.Full) > 0
	}
	scored := s.Plan.Score
	scored.Phase, scored.Split = kvscore.PhasePrefill, kvscore.Split{}
	s.Forecast = s.Pool.Scheduler.Forecast(t, &scored, c.Targets, s.Policy, s.rule(), &c.Sel)
	s.Prefill = c.Workers[s.Forecast.Position]
	return false
}

// way returns how a worker can serve the request. If all prefill workers are full, only a
// request that must be split waits for them.
func (s *Request) way(w *worker.Worker, lacks bool, t time.Time) kvscore.Way {
	switch {
	case !w.ServesWhole():
		return kvscore.OnlySplit
	case !w.IsDecode(), lacks:
		return kvscore.OnlyWhole
	case s.Prefill == nil:
		if s.rule() == kvscore.SplitAlways {
			return kvscore.EitherWay
		}
		return kvscore.OnlyWhole
	case !s.Prefill.Engine().Pairs(w.Engine(), s.Plan.Name) || s.Pool.Pairs.Avoid(s.Prefill, w, t):
		return kvscore.OnlyWhole
	}
	return kvscore.EitherWay
}

// ErrWhole is the error of a request that only engines for one phase could serve.
func (s *Request) ErrWhole() error {
	why := s.WhyWhole()
	if why == "" {
		why = "no prefill worker is available, with a decode worker of its version, whose engine can split requests of the API " + s.Plan.Name
	}
	return fmt.Errorf("the engines of the available workers serve only one phase of requests, and this request is not split: %s", why)
}

// Failed records that a pair of workers failed. The next attempt uses another pair, or serves the request
// whole; the decode worker has not failed.
func (s *Request) Failed(l *Phases, e *Error) {
	s.tries++
	prefill := l.Prefill
	if prefill != nil {
		prefill.CountOutcome(observe.AttemptRetried, true) // if it was not counted
		s.failed = append(s.failed, prefill.Worker)
		s.refused = s.refused || e.whole
	}
	if e.Reason == phaseTransfer && prefill != nil {
		s.blame, s.blamed = [2]*worker.Worker{prefill.Worker, l.Decode.Worker}, l.Decode.Begun
		s.silent = errors.Is(e, attempt.ErrFirstToken)
		prefill.Worker.AskAgain()
	}
	if s.tries >= maxPairsTried || e.whole || e.Reason == phaseTransfer && l.Decode.Worker.ServesWhole() {
		s.KeepWhole("its phases failed: " + e.Error())
	}
}

// Answered reports why the phases failed, once a good answer to the same request has shown that the
// request was not to blame. Requests avoid a pair whose transfer failed. l are the phases of that answer,
// nil if it came whole.
func (s *Request) Answered(l *Phases, good bool) {
	if !good {
		return
	}
	of := s.Pool
	if l != nil {
		of.Pairs.Work(l.Prefill.Worker, l.Decode.Worker)
	}
	if s.refused {
		of.Raise(time.Now(), "prefill workers do not hand over their prompts, and requests go whole to others")
		s.refused = false
	}
	if s.blame[0] != nil && (l == nil || s.blame != [2]*worker.Worker{l.Prefill.Worker, l.Decode.Worker}) {
		if of.Pairs.Failed(s.blame[0], s.blame[1], s.silent, s.blamed, time.Now()) {
			of.Raise(time.Now(), "transfers between a prefill and a decode worker fail, and requests avoid the pair")
		}
		s.blame = [2]*worker.Worker{}
	}
}
