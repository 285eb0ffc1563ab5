package kvscore

import "time"

// Legs is the rule by which a request is parted. One worker then prefills its prompt. Another one
// gets the KV cache from it and decodes the answer. The zero value parts no request.
type Legs uint8

// The rules. The last three are those of Dynamo's conditional disaggregation
// (lib/kv-router/src/conditional_disagg.rs). With them a request stays whole on its decode worker
// if the condition holds and the KV cache there is not nearly full.
const (
	LegsNever Legs = iota
	// LegsAuto parts a request if its predicted time is lower then.
	LegsAuto
	LegsAlways
	// LegsISLBounding keeps a request whole if the decode worker lacks less than shortRest
	// tokens of the prompt, and less than shortShare of it.
	LegsISLBounding
	// LegsPrefillLoad keeps a request whole if more than busyPrefill tokens are booked on the
	// prefill target.
	LegsPrefillLoad
	// LegsISLOrLoad keeps a request whole if either of the two does.
	LegsISLOrLoad
)

const (
	shortRest, shortShare = 2048, 0.7
	// busyPrefill is the usual limit of the prompt tokens in one step of an engine. Dynamo's
	// own threshold has no default.
	busyPrefill = 8192
)

// LegsNames are the names of the rules in the configuration.
var LegsNames = [...]string{
	LegsNever: "never", LegsAuto: "auto", LegsAlways: "always",
	LegsISLBounding: "isl_bounding", LegsPrefillLoad: "prefill_load", LegsISLOrLoad: "isl_or_load",
}

func (l Legs) String() string { return LegsNames[l] }

// Leg is the part of a request that an attempt does.
type Leg uint8

// The legs.
const (
	// LegWhole is all of it, or the decode leg if the choice parts the request.
	LegWhole Leg = iota
	// LegPrefill computes the prompt and one token. The engine's answer is its first token: set
	// Request.Streamed, and call FirstToken when the answer comes.
	LegPrefill
	// LegDecode is the decode leg of a request that is parted already.
	LegDecode
)

// Way is how a candidate can serve a request.
type Way uint8

// The ways.
const (
	EitherWay  Way = iota
	OnlyWhole      // its engine cannot share a request with that of the prefill target
	OnlyParted     // its engine cannot compute a prompt
)

// Apart is what the choice of a decode target must know to part a request. The zero value does
// not part it. [Scheduler.Forecast] makes it.
type Apart struct {
	Legs Legs
	// Prefill is the best target for the prefill leg, Position its position.
	Prefill  Target
	Position int
	// Time is the predicted time to the end of the prefill there, in milliseconds. Cost is the
	// policy's cost of it if that is a time, else Time: it includes the time that other requests
	// wait for this prefill.
	Time, Cost float64
	// Booked are the tokens booked on the prefill target and not yet computed.
	Booked int64
}

// Forecast asks the policy for the best of the targets that could prefill a request whose legs
// are parted by a rule; r.Leg is LegPrefill. It books and remembers nothing. Its result is
// r.Apart of the choice of the decode target. If that parts the request, another choice books the
// prefill leg.
func (s *Scheduler) Forecast(now time.Time, r *Request, among []TargetRef, p Policy, legs Legs, sel *Selection) Apart {
	if len(among) == 0 || legs == LegsNever {
		return Apart{}
	}
	sel.Dry, sel.Drawn = true, sel.Drawn[:0]
	s.lookUp(now, r, sel)
	s.mu.Lock()
	defer s.mu.Unlock()
	defer sel.view.Drop()
	s.snapshot(now, r, among, sel)
	i := s.choose(now, r, among, p, sel)
	c := &sel.Candidates[i]
	a := Apart{Legs: legs, Prefill: c.Target, Position: i, Time: c.TTFT(), Booked: c.PrefillTokens}
	if a.Cost = a.Time; c.Terms != (Terms{}) {
		a.Cost = max(a.Time, c.Cost-c.Terms.Decode) // the answer is generated elsewhere
	}
	return a
}

// part sets the terms of a parted request for each candidate, and what the rule says. The lock
// is held.
func (s *Scheduler) part(now time.Time, r *Request, sel *Selection) {
	a := &sel.Apart
	switch *a = r.Apart; r.Leg {
	case LegPrefill:
		a.Legs = LegsNever
	case LegDecode:
		a.Legs = LegsAlways
	case LegWhole:
	}
	if a.Legs == LegsNever {
		return
	}
	speed := s.transfer.factorAt(now)
	for i := range sel.Candidates {
		c := &sel.Candidates[i]
		c.TransferTime = speed * assumedTransfer(sel.Tokens-c.OverlapTokens)
		c.PartedTime = a.Time + c.TransferTime
		if left := c.WaitTime - c.PartedTime; left > 0 {
			// It comes before the prefills in the queue, but not before the one that runs: on
			// average, half of that is left.
			c.PartedTime += min(left, c.WaitTime/float64(2*max(1, c.Awaiting)))
		}
		if i < len(r.Ways) {
			c.way = r.Ways[i]
		}
		if c.way == EitherWay && r.Leg == LegWhole && c.Target.Worker == a.Prefill.Worker {
			c.way = OnlyWhole // it would hand the KV to itself
		}
		switch c.way {
		case EitherWay:
			c.Parted = a.parts(sel, c)
		case OnlyParted:
			c.Parted = true
		case OnlyWhole:
		}
	}
}

// parts says whether the rule parts the request if it is decoded on a candidate.
func (a *Apart) parts(s *Selection, c *Candidate) bool {
	lacks := float64(s.Tokens - c.OverlapTokens)
	short := lacks < shortRest && lacks/max(1, float64(s.Tokens)) < shortShare
	busy := a.Booked > busyPrefill
	switch a.Legs {
	case LegsAlways:
		return true
	case LegsAuto:
		return c.PartedTime < c.WaitTime+c.PrefillTime+c.stall(s)
	case LegsISLBounding:
		return !short || c.MemoryUse > fullMemory
	case LegsPrefillLoad:
		return !busy || c.MemoryUse > fullMemory
	case LegsISLOrLoad:
		return !short && !busy || c.MemoryUse > fullMemory
	case LegsNever:
	}
	return false
}

// stall returns the weighted time that a prefill on the candidate delays the answers which it
// decodes, in milliseconds. The fixed cost of their steps is due without it, too.
func (c *Candidate) stall(s *Selection) float64 {
	return stallWorth * float64(max(0, c.Requests-c.Awaiting)) * max(0, c.PrefillTime-c.Slowness*s.Latency.Fixed)
}
