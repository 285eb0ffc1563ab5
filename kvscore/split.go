package kvscore

import "time"

// SplitRule is the rule by which a request is split. One worker then prefills its prompt. Another one
// gets the KV cache from it and decodes the answer. The zero value parts no request.
type SplitRule uint8

// The rules. The last three are those of Dynamo's conditional disaggregation
// (lib/kv-router/src/conditional_disagg.rs). With them a request stays whole on its decode worker
// if the condition holds and the KV cache there is not nearly full.
const (
	SplitNever SplitRule = iota
	// SplitAuto parts a request if its predicted time is lower then.
	SplitAuto
	SplitAlways
	// SplitISLBounding keeps a request whole if the decode worker lacks less than shortRest
	// tokens of the prompt, and less than shortShare of it.
	SplitISLBounding
	// SplitPrefillLoad keeps a request whole if more than busyPrefill tokens are booked on the
	// prefill target.
	SplitPrefillLoad
	// SplitISLOrLoad keeps a request whole if either of the two does.
	SplitISLOrLoad
)

const (
	shortRest, shortShare = 2048, 0.7
	// busyPrefill is the usual limit of the prompt tokens in one step of an engine. Dynamo's
	// own threshold has no default.
	busyPrefill = 8192
)

// PhasesNames are the names of the rules in the configuration.
var PhasesNames = [...]string{
	SplitNever: "never", SplitAuto: "auto", SplitAlways: "always",
	SplitISLBounding: "isl_bounding", SplitPrefillLoad: "prefill_load", SplitISLOrLoad: "isl_or_load",
}

func (l SplitRule) String() string { return PhasesNames[l] }

// Phase is the part of a request that an attempt does.
type Phase uint8

// The phases.
const (
	// PhaseWhole is all of it, or the decode phase if the choice parts the request.
	PhaseWhole Phase = iota
	// PhasePrefill computes the prompt and one token. The engine's answer is its first token: set
	// Request.Streamed, and call FirstToken when the answer comes.
	PhasePrefill
	// PhaseDecode is the decode phase of a request that is split already.
	PhaseDecode
)

// Way is how a candidate can serve a request.
type Way uint8

// The ways.
const (
	EitherWay Way = iota
	OnlyWhole     // its engine cannot share a request with that of the prefill target
	OnlySplit     // its engine cannot compute a prompt
)

// Split is what the choice of a decode target must know to part a request. The zero value does
// not part it. [Scheduler.Forecast] makes it.
type Split struct {
	Rule SplitRule
	// Prefill is the best target for the prefill phase, Position its position.
	Prefill  Target
	Position int
	// Time is the predicted time to the end of the prefill there, in milliseconds. Cost is the
	// policy's cost of it if that is a time, else Time: it includes the time that other requests
	// wait for this prefill.
	Time, Cost float64
	// Booked are the tokens booked on the prefill target and not yet computed.
	Booked int64
}

// Forecast asks the policy for the best of the targets that could prefill a request whose phases
// are split by a rule; r.Phase is PhasePrefill. It books and remembers nothing. Its result is
// r.Split of the choice of the decode target. If that parts the request, another choice books the
// prefill phase.
func (s *Scheduler) Forecast(now time.Time, r *Request, among []TargetRef, p Policy, phases SplitRule, sel *Selection) Split {
	if len(among) == 0 || phases == SplitNever {
		return Split{}
	}
	sel.Dry, sel.Drawn = true, sel.Drawn[:0]
	s.lookUp(now, r, sel)
	s.mu.Lock()
	defer s.mu.Unlock()
	defer sel.view.Drop()
	s.snapshot(now, r, among, sel)
	i := s.choose(now, r, among, p, sel)
	c := &sel.Candidates[i]
	a := Split{Rule: phases, Prefill: c.Target, Position: i, Time: c.TTFT(), Booked: c.PrefillTokens}
	if a.Cost = a.Time; c.Terms != (Terms{}) {
		a.Cost = max(a.Time, c.Cost-c.Terms.Decode) // the answer is generated elsewhere
	}
	return a
}

// part sets the terms of a split request for each candidate, and what the rule says. The lock
// is held.
func (s *Scheduler) part(now time.Time, r *Request, sel *Selection) {
	a := &sel.Split
	switch *a = r.Split; r.Phase {
	case PhasePrefill:
		a.Rule = SplitNever
	case PhaseDecode:
		a.Rule = SplitAlways
	case PhaseWhole:
	}
	if a.Rule == SplitNever {
		return
	}
	speed := s.transfer.factorAt(now)
	for i := range sel.Candidates {
		c := &sel.Candidates[i]
		c.TransferTime = speed * assumedTransfer(sel.Tokens-c.OverlapTokens)
		c.SplitTime = a.Time + c.TransferTime
		if left := c.WaitTime - c.SplitTime; left > 0 {
			// It comes before the prefills in the queue, but not before the one that runs: on
			// average, half of that is left.
			c.SplitTime += min(left, c.WaitTime/float64(2*max(1, c.Awaiting)))
		}
		if i < len(r.Ways) {
			c.way = r.Ways[i]
		}
		if c.way == EitherWay && r.Phase == PhaseWhole && c.Target.Worker == a.Prefill.Worker {
			c.way = OnlyWhole // it would hand the KV to itself
		}
		switch c.way {
		case EitherWay:
			c.Split = a.parts(sel, c)
		case OnlySplit:
			c.Split = true
		case OnlyWhole:
		}
	}
}

// parts says whether the rule parts the request if it is decoded on a candidate.
func (a *Split) parts(s *Selection, c *Candidate) bool {
	lacks := float64(s.Tokens - c.OverlapTokens)
	short := lacks < shortRest && lacks/max(1, float64(s.Tokens)) < shortShare
	busy := a.Booked > busyPrefill
	switch a.Rule {
	case SplitAlways:
		return true
	case SplitAuto:
		return c.SplitTime < c.WaitTime+c.PrefillTime+c.stall(s)
	case SplitISLBounding:
		return !short || c.MemoryUse > fullMemory
	case SplitPrefillLoad:
		return !busy || c.MemoryUse > fullMemory
	case SplitISLOrLoad:
		return !short && !busy || c.MemoryUse > fullMemory
	case SplitNever:
	}
	return false
}

// stall returns the weighted time that a prefill on the candidate delays the answers which it
// decodes, in milliseconds. The fixed cost of their steps is due without it, too.
func (c *Candidate) stall(s *Selection) float64 {
	return stallWorth * float64(max(0, c.Requests-c.Awaiting)) * max(0, c.PrefillTime-c.Slowness*s.Latency.Fixed)
}
