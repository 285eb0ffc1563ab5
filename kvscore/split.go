package kvscore

import "time"

// SplitRule is the rule by which a request is split. One worker then prefills its prompt. Another one
// gets the KV cache from it and decodes the answer. The zero value splits no request.
type SplitRule uint8

// The rules.
const (
	SplitNever SplitRule = iota
	// SplitAuto splits a request if its predicted time is lower then.
	SplitAuto
	SplitAlways
)

// SplitNames are the names of the rules in the configuration.
var SplitNames = [...]string{SplitNever: "never", SplitAuto: "auto", SplitAlways: "always"}

func (r SplitRule) String() string { return SplitNames[r] }

// Phase is the part of a request that an attempt does.
type Phase uint8

// The phases.
const (
	// PhaseWhole is all of it, or the decode phase if the choice splits the request.
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

// Split is what the choice of a decode target must know to split a request. The zero value does
// not split it. [Scheduler.Forecast] makes it.
type Split struct {
	Rule SplitRule
	// Prefill is the best target for the prefill phase, Position its position.
	Prefill  Target
	Position int
	// Time is the predicted time to the end of the prefill there, in milliseconds. Cost is the
	// policy's cost of it if that is a time, else Time: it includes the time that other requests
	// wait for this prefill.
	Time, Cost float64
}

// Forecast asks the policy for the best of the targets that could prefill a request whose phases
// are split by a rule; r.Phase is PhasePrefill. It books and remembers nothing. Its result is
// r.Split of the choice of the decode target. If that splits the request, another choice books the
// prefill phase.
func (s *Scheduler) Forecast(now time.Time, r *Request, among []TargetRef, p Policy, phases SplitRule, sel *Selection) Split {
	if len(among) == 0 || phases == SplitNever {
		return Split{}
	}
	i := s.dry(now, r, among, p, sel)
	c := &sel.Candidates[i]
	a := Split{Rule: phases, Prefill: c.Target, Position: i, Time: c.TTFT()}
	if a.Cost = a.Time; c.Terms != (Terms{}) {
		a.Cost = max(a.Time, c.Cost-c.Terms.Decode) // the answer is generated elsewhere
	}
	return a
}

// split sets the terms of a split request for each candidate, and what the rule says. The lock
// is held.
func (s *Scheduler) split(now time.Time, r *Request, sel *Selection) {
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
	speed := s.transfer.factor(now)
	for i := range sel.Candidates {
		c := &sel.Candidates[i]
		c.memory = 0 // split or not, the prompt takes it
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
			c.Split = a.Rule == SplitAlways || c.SplitTime < c.WaitTime+c.PrefillTime+c.stall(sel)
		case OnlySplit:
			c.Split = true
		case OnlyWhole:
		}
	}
}

// stall returns the weighted time that a prefill on the candidate delays the answers which it
// decodes, in milliseconds. The fixed cost of their steps is due without it, too.
func (c *Candidate) stall(s *Selection) float64 {
	return stallWorth * float64(max(0, c.Requests-c.Awaiting)) * max(0, c.PrefillTime-c.Slowness*s.Latency.Fixed)
}
