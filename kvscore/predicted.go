package kvscore

// PredictedLatency takes the candidate with the lowest cost, where costs are
// milliseconds: those that the request itself will wait, and those that it makes others
// wait. [Terms] says what they consist of. Equal costs share evenly.
//
// Nothing is configured: what engines are like is learned from the times of first
// tokens, see [Scheduler].
type PredictedLatency struct {
	without Term
	ties    Ties
}

// NewPredictedLatency returns the policy.
func NewPredictedLatency() *PredictedLatency { return new(PredictedLatency) }

// Without returns the policy without some terms, to see what they are worth.
func (p *PredictedLatency) Without(terms Term) *PredictedLatency {
	return &PredictedLatency{without: terms}
}

// Terms are the parts of a candidate's cost, in milliseconds.
type Terms struct {
	// Wait is the time until the prefills that are booked there are over.
	Wait float64
	// Prefill is the time for what the target lacks of the prompt.
	Prefill float64
	// Delay is how long others will wait for that prefill, summed up over them. It
	// counts the requests to come with those that await their first token now, on
	// all targets and on this one. What the target lacks of a prefix that many
	// prompts share counts less: those to come will find it there.
	Delay float64
	// Decode is the time that generating the answer adds to the steps of the requests
	// there.
	Decode float64
	// Turns is what further turns of the conversation will cost there, as far as the
	// target has more work than the one with the least. It counts for the share of the
	// prompt that no target holds: the rest speaks for where it is.
	Turns float64
	// Leave is the price of leaving the target that the session is bound to, while that
	// holds a part of the prompt.
	Leave float64
}

// Term is a set of terms of a cost.
type Term uint8

// The terms that can be left out of a cost.
const (
	TermWait Term = 1 << iota
	TermDelay
	TermQueue // the part of Delay that counts who waits on the same target
	TermDecode
	TermTurns
	TermLeave
)

const (
	// delayAlone is how many others wait for a prefill though nobody waits now.
	delayAlone = 1
	// delayLoad is how many others wait for a prefill for each request that awaits its
	// first token on a target on average, where many wait: behind a long queue, more
	// come before it is empty. Where fewer than delayFew wait, it is less.
	delayLoad, delayFew = 6, 3
	// delayQueue is the same for each request that waits on the target itself. So
	// long prompts gather where few wait, and short ones go past them.
	delayQueue = 0.5
	// copyUses is how many prompts for each holder make a copy of a prefix that they share
	// worth half of its prefill.
	copyUses = 4
	// decodeWorth is what a millisecond of generating is worth, against one before the
	// first token; decodeLoad is how much more, for each request that awaits its
	// first token on a target on average, as steps that take longer delay it, too.
	// maxDecode bounds both.
	decodeWorth, decodeLoad, maxDecode = 0.1, 0.1, 1
	// urgent is how much more the own time of a request with a higher priority weighs.
	urgent = 2.0 // not an integer: the inverse counts, too
	// turnsWorth is what the predicted work of further turns is worth: it may never
	// come.
	turnsWorth = 0.5
	// leavePrice is the share of the prefill time of what the session's home holds that
	// it costs to leave it.
	leavePrice = 0.2
)

// Choose implements Policy.
func (p *PredictedLatency) Choose(s *Selection) int {
	by := p.weigh(s)
	lowest := 0.0
	for i := range s.Candidates {
		c := &s.Candidates[i]
		if by.cost(s, i); i == 0 || c.Cost < lowest {
			lowest = c.Cost
		}
	}
	if o := s.Override; o != nil && o.Temperature != nil && *o.Temperature > 0 {
		return softmax(s, *o.Temperature)
	}
	best := s.tied[:0]
	for i := range s.Candidates {
		if s.Candidates[i].Cost <= lowest {
			best = append(best, i)
		}
	}
	s.tied = best
	return p.ties.Pick(s, best)
}

// weights are what is the same for all candidates of a choice.
type weights struct {
	wait, prefill float64 // 1, but for overrides
	credit        float64 // the share of the cached tokens that counts
	delay, queue  float64
	shared        float64 // what a token of the shared prefix counts less, in ms
	decode        float64
	turns, leave  float64
	leastWork     float64
}

func (p *PredictedLatency) weigh(s *Selection) weights {
	n := float64(len(s.Candidates))
	waiting := float64(s.Awaiting) / n
	w := weights{
		wait: 1, prefill: 1, credit: 1,
		delay: delayAlone + delayLoad*waiting*waiting/(waiting+delayFew), queue: delayQueue,
	}
	switch {
	case s.Priority > 0:
		w.wait, w.prefill = urgent, urgent
	case s.Priority < 0:
		w.wait, w.prefill = 1/urgent, 1/urgent
	}
	w.override(s)
	if s.SharedTokens > 0 {
		w.shared = s.Latency.Token * float64(s.SharedArrivals) / float64(s.SharedArrivals+copyUses*s.SharedHolders)
	}
	w.leastWork = s.Candidates[0].RecentWork
	work, most := 0.0, int64(0)
	for i := range s.Candidates {
		c := &s.Candidates[i]
		w.leastWork = min(w.leastWork, c.RecentWork)
		work += c.RecentWork
		most = max(most, c.OverlapTokens)
	}
	whole, answer := float64(s.Tokens), s.ExpectedAnswer
	w.decode = min(maxDecode, decodeWorth+decodeLoad*waiting) *
		answer * (s.Latency.Token + s.Latency.Context*(whole+answer/2))
	if work > 0 && s.Tokens > 0 {
		w.turns = turnsWorth * s.ExpectedTurns * s.TurnTime / (work / n) * (1 - float64(most)/whole)
	}
	if s.Home >= 0 {
		held := float64(s.Candidates[s.Home].OverlapTokens)
		w.leave = leavePrice * held * (s.Latency.Token + s.Latency.Attention*held/2)
	}
	if p.without != 0 {
		p.leaveOut(&w)
	}
	return w
}

// leaveOut takes terms out.
func (p *PredictedLatency) leaveOut(w *weights) {
	out := func(t Term, weights ...*float64) {
		if p.without&t != 0 {
			for _, f := range weights {
				*f = 0
			}
		}
	}
	out(TermWait, &w.wait)
	out(TermDelay, &w.delay, &w.queue)
	out(TermQueue, &w.queue)
	out(TermDecode, &w.decode)
	out(TermTurns, &w.turns)
	out(TermLeave, &w.leave)
}

// override changes the weights as the request wishes: see [Override].
func (w *weights) override(s *Selection) {
	o := s.Override
	if o == nil {
		return
	}
	put(&w.credit, o.OverlapScoreCredit)
	w.credit = min(w.credit, 1)
	if o.PrefillLoadScale != nil {
		scale := *o.PrefillLoadScale
		w.wait, w.prefill, w.delay, w.queue = scale*w.wait, scale*w.prefill, scale*w.delay, scale*w.queue
	}
	if o.TrackPrefillTokens != nil && !*o.TrackPrefillTokens {
		w.wait = 0
	}
}

// cost sets the terms and the cost of candidate i.
func (w *weights) cost(s *Selection, i int) {
	c := &s.Candidates[i]
	prefill := c.PrefillTime
	if w.credit < 1 {
		prefill += (1 - w.credit) * c.Slowness * s.Latency.Token * float64(c.OverlapTokens)
	}
	t := &c.Terms
	t.Wait = w.wait * c.WaitTime
	t.Prefill = w.prefill * prefill
	t.Delay = w.delay*(prefill-c.Slowness*w.shared*max(0, s.SharedTokens-float64(c.OverlapTokens))) +
		w.queue*float64(c.Awaiting)*prefill
	t.Decode = w.decode * c.Slowness * float64(c.Requests)
	t.Turns = w.turns * (c.RecentWork - w.leastWork)
	t.Leave = 0
	if s.Home >= 0 && i != s.Home {
		t.Leave = w.leave
	}
	c.Cost = t.Wait + t.Prefill + t.Delay + t.Decode + t.Turns + t.Leave
	if c.Factor != 0 {
		c.Cost *= c.Factor
	}
}
