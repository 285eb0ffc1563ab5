package kvscore

// PredictedLatency takes the candidate with the lowest cost. The cost is the time that the
// request waits and makes other requests wait, in milliseconds; [Terms] lists its parts.
// Equal costs share evenly.
//
// It has no options. The scheduler learns prefill times from first tokens: see [Latency].
type PredictedLatency struct{ ties Ties }

// NewPredictedLatency returns the policy.
func NewPredictedLatency() *PredictedLatency { return new(PredictedLatency) }

// Terms are the parts of a candidate's cost, in milliseconds.
type Terms struct {
	// Wait is the time until the prefills booked on the target are over.
	Wait float64 `json:"wait"`
	// Prefill is the time for the part of the prompt that the target lacks.
	Prefill float64 `json:"prefill"`
	// Delay is the total time that other requests wait for that prefill. Their number is
	// estimated from the requests that now await their first token, on all targets and on
	// this one. If the target lacks a widely shared prefix, that part counts less, because
	// later requests reuse it.
	Delay float64 `json:"delay"`
	// Decode is the weighted time that this answer adds to the decode steps of the
	// target's active requests. Its weight grows where KV caches are full, and with the
	// share of decoding in the pool's work.
	Decode float64 `json:"decode"`
	// Turns is the expected prefill time of the conversation's further turns, scaled by two
	// factors. The first is the target's recent work above the least busy target's,
	// divided by the mean. The second is the share of the prompt that no target holds.
	Turns float64 `json:"turns"`
	// Leave is the price of leaving the session's home. It is 0 at home, without a
	// home, and if home holds nothing of the prompt.
	Leave float64 `json:"leave"`
	// Stall is the weighted total time that the target's active requests wait for that prefill.
	// It counts for requests that could be parted.
	Stall float64 `json:"stall,omitzero"`
	// Transfer is the time to get the KV cache from the prefill worker if the request is parted.
	// Wait, Prefill and Delay are then those of the prefill worker.
	Transfer float64 `json:"transfer,omitzero"`
}

const (
	// delayAlone is the number of later requests that a prefill delays while no
	// request waits now.
	delayAlone = 1
	// With m waiting requests per target, a prefill delays delayLoad·m·m/(m+delayFew) more
	// requests: more of them arrive before a long queue is empty. At m = delayFew the
	// factor is half of delayLoad.
	delayLoad, delayFew = 6, 3
	// delayQueue is the number of requests added for each one that waits on the target
	// itself. Long prompts then go where few requests wait, and short ones pass them.
	delayQueue = 0.5
	// copyUses is the number of prompts per holder at which a further copy of a shared
	// prefix is worth half of its prefill.
	copyUses = 4
	// decodeWorth weighs a millisecond of decoding against one before the first token.
	// decodeLoad adds to it for each waiting request per target. maxDecode bounds the sum.
	// Both count as far as decoding limits the pool, for else prefills do: then few running
	// requests are no reason to join a long queue. decodeLoad counts as far as memory is
	// full, because prompts then wait for the end of answers. decodeWorth also counts as far
	// as the requests' work is decoding.
	decodeWorth, decodeLoad, maxDecode = 0.1, 0.1, 1
	// nearlyFull is the share of a KV cache in use from which on it becomes full.
	nearlyFull = 0.8
	// stallWorth weighs a millisecond that an active request waits for a prefill.
	stallWorth = 0.4
	// urgent weighs wait and prefill of a request with a priority above 0; 1/urgent
	// those of one below 0.
	urgent = 2.0 // a float: 1/urgent must not be integer division
	// turnsWorth discounts the predicted work of further turns, which may never come.
	turnsWorth = 0.5
	// leavePrice is the cost of leaving the session's home, as a share of the prefill time
	// for the tokens that home holds.
	leavePrice = 0.2
)

// Choose implements Policy.
func (p *PredictedLatency) Choose(s *Selection) int {
	by := weigh(s)
	for i := range s.Candidates {
		by.cost(s, i)
	}
	if o := s.Override; o != nil && o.Temperature != nil && *o.Temperature > 0 {
		return softmax(s, *o.Temperature)
	}
	return p.ties.Cheapest(s)
}

// weights are the factors that all candidates of a choice share.
type weights struct {
	wait, prefill float64 // 1 without priority and overrides
	credit        float64 // the share of the cached tokens that counts
	delay, queue  float64
	shared        float64 // discount in delay for a missing token of the shared prefix, in ms
	added         float64 // by the answer to the steps of each active request, in ms
	full          float64 // how full the targets are, on average
	decode        float64 // weighted added, where a target is no fuller
	growth        float64 // of decode, from an empty target to a full one
	turns, leave  float64
	leastWork     float64
}

func weigh(s *Selection) weights {
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
	work, full, most := 0.0, 0.0, int64(0)
	for i := range s.Candidates {
		c := &s.Candidates[i]
		w.leastWork = min(w.leastWork, c.RecentWork)
		work += c.RecentWork
		full += fullness(c)
		most = max(most, c.OverlapTokens)
	}
	whole, answer := float64(s.Tokens), s.ExpectedAnswer
	w.added = answer * (s.Latency.Token + s.Latency.Context*(whole+answer/2))
	w.full, w.growth = full/n, decodeLoad*waiting*w.added
	w.decode = decodeWorth * w.added * max(w.full, w.added/max(w.added+s.MeanPrefill, 1e-9))
	w.decode = min(maxDecode*w.added, w.decode+w.growth*w.full)
	if work > 0 && s.Tokens > 0 {
		w.turns = turnsWorth * s.ExpectedTurns * s.TurnTime / (work / n) * (1 - float64(most)/whole)
	}
	if s.Home >= 0 {
		w.leave = leavePrice * (s.Latency.Prefill(s.Candidates[s.Home].OverlapTokens, 0, 0) - s.Latency.Fixed)
	}
	return w
}

// fullness says how far the memory of a target limits it, from 0 to 1.
func fullness(c *Candidate) float64 {
	if c.MemoryUse <= nearlyFull { // mostly
		return 0
	}
	return min((c.MemoryUse-nearlyFull)/(1-nearlyFull), 1)
}

// override applies the request's [Override] to the weights.
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
	if s.Apart.Legs != LegsNever {
		w.part(s, c)
	}
	t.Decode = w.decode
	if f := fullness(c); f > w.full {
		t.Decode = min(maxDecode*w.added, w.decode+(f-w.full)*w.growth)
	}
	t.Decode *= c.Slowness * float64(c.Requests)
	t.Turns = w.turns * (c.RecentWork - w.leastWork)
	t.Leave = 0
	if s.Home >= 0 && i != s.Home {
		t.Leave = w.leave
	}
	c.Cost = t.Wait + t.Prefill + t.Delay + t.Decode + t.Turns + t.Leave + t.Stall + t.Transfer
	if c.Factor != 0 {
		c.Cost *= c.Factor
	}
}

// part makes the terms those of a parted request if the rule says so, or if their sum is lower
// and the rule is LegsAuto.
func (w *weights) part(s *Selection, c *Candidate) {
	a, t := &s.Apart, &c.Terms
	t.Stall = w.prefill * c.stall(s)
	if a.Legs == LegsAuto && c.way == EitherWay {
		c.Parted = a.Cost+w.wait*(c.PartedTime-a.Time) < t.Wait+t.Prefill+t.Delay+t.Stall
	}
	if c.Parted {
		*t = Terms{Wait: w.wait * (c.PartedTime - c.TransferTime - a.Time), Prefill: a.Time, Delay: a.Cost - a.Time, Transfer: w.wait * c.TransferTime}
	}
}
