package kvscore

// PredictedLatency takes the candidate with the lowest cost. That is the time to the first token
// and the weighted time between tokens that this choice adds, over all requests, in milliseconds.
// [Terms] lists its parts. A draw decides between equal costs.
//
// The scheduler learns prefill times from first tokens: see [Latency].
type PredictedLatency struct {
	// Weight is how many milliseconds of time to the first token a millisecond between the tokens of
	// an answer is worth. Answers of fewer tokens count with their time to the end. 0 counts first
	// tokens only. Default: 10.
	Weight float64 `json:"weight"`
}

// DefaultWeight is the default of PredictedLatency.Weight.
const DefaultWeight = 10

// NewPredictedLatency returns the policy with its defaults.
func NewPredictedLatency() *PredictedLatency { return &PredictedLatency{Weight: DefaultWeight} }

// Terms are the parts of a candidate's cost, in milliseconds. Wait, Prefill and Transfer are times of this request.
// Decode is also a time of those on the target, and Stall only of those. Delay and Spread are of those to come.
type Terms struct {
	// Wait is the time until the prefills booked on the target are over.
	Wait float64 `json:"wait"`
	// Prefill is the time for the part of the prompt that the target lacks.
	Prefill float64 `json:"prefill"`
	// Delay is the total time that later requests wait for that prefill, without the fixed cost of a
	// step. It includes their wait for the memory that the prompt takes. These requests come
	// meanwhile, or while others wait on this target.
	Delay float64 `json:"delay"`
	// Decode is the weighted time that the answer takes on the target, and that it adds to the
	// answers of the target's other requests.
	Decode float64 `json:"decode"`
	// Stall is the weighted total time that the answers of the target's requests wait for that
	// prefill. Its weight is higher if the request could be split.
	Stall float64 `json:"stall"`
	// Spread is what later requests gain if the target gets a copy of a widely shared prefix. It also makes an
	// idle target, or one whose turn it is, as cheap as the cheapest one. It is negative or 0.
	Spread float64 `json:"spread"`
	// Leave is the price of leaving the target that the session is bound to. It is 0 there, and without one.
	Leave float64 `json:"leave"`
	// Others is the price of a target that other routers prefer, where requests come to several
	// routers at the same moments.
	Others float64 `json:"others,omitzero"`
	// Transfer is the time to get the KV cache from the prefill worker if the request is split.
	// Wait, Prefill and Delay are then those of the prefill worker.
	Transfer float64 `json:"transfer,omitzero"`
}

// Term is a term of the cost by its name.
type Term struct {
	Name string
	Time float64 // ms
}

// Each returns the terms in their order.
func (t *Terms) Each() [9]Term {
	return [...]Term{
		{"wait", t.Wait},
		{"prefill", t.Prefill},
		{"delay", t.Delay},
		{"decode", t.Decode},
		{"stall", t.Stall},
		{"spread", t.Spread},
		{"leave", t.Leave},
		{"others", t.Others},
		{"transfer", t.Transfer},
	}
}

func (t *Terms) sum() float64 {
	return t.Wait + t.Prefill + t.Delay + t.Decode + t.Stall + t.Spread + t.Leave + t.Others + t.Transfer
}

const (
	// delayQueue is the number of later requests that a prefill delays, for each request that
	// waits on the target now.
	delayQueue = 1.5
	// stallWorth weighs a millisecond that an active request waits for a prefill, where it
	// could be split.
	stallWorth = 0.4
	// noise is the factor by which equal engines may differ in their learned slowness.
	noise = 1.25
	// urgent weighs wait and prefill of a request with a priority above 0; 1/urgent
	// those of one below 0.
	urgent = 2.0 // a float: 1/urgent must not be integer division
	// alikeSteps is by how many steps of an engine the costs of targets that take turns may differ.
	alikeSteps = 4
	// freeMemory is the share of its memory that a target which takes turns will use at most.
	freeMemory = 0.7
	// leavePrice is the cost of leaving the bound target, as a share of the prefill time
	// for the tokens that only that one holds. It includes the fixed cost of a step.
	leavePrice = 0.2
)

// Choose implements Policy.
func (p *PredictedLatency) Choose(s *Selection) int {
	by := p.weigh(s)
	for i := range s.Candidates {
		by.cost(s, i)
	}
	if s.Split.Rule == SplitNever {
		s.spread()
	}
	if o := s.Override; o != nil && o.Temperature != nil && *o.Temperature > 0 {
		return softmax(s, *o.Temperature)
	}
	return s.insteadOf(s.Cheapest())
}

// weights are the factors that all candidates of a choice share.
type weights struct {
	wait, prefill, delay float64 // 1 without priority and overrides
	credit               float64 // the share of the cached tokens that counts
	between              float64 // weight of a time by which an active answer is delayed
	own                  float64 // weighted time of the answer on an idle target of usual speed, in ms
	added                float64 // weighted time that the answer adds to each active one, in ms
}

func (p *PredictedLatency) weigh(s *Selection) weights {
	w := weights{wait: 1, prefill: 1, delay: 1, credit: 1, between: p.share(s.MeanAnswer)}
	switch {
	case s.Priority > 0:
		w.wait, w.prefill = urgent, urgent
	case s.Priority < 0:
		w.wait, w.prefill = 1/urgent, 1/urgent
	}
	w.override(s.Override)
	answer := s.ExpectedAnswer
	w.own = p.share(answer) * answer * (s.Latency.Fixed + s.Latency.Token)
	w.added = w.between * answer * (s.Latency.Token + s.Latency.Context*(float64(s.Tokens)+answer/2))
	return w
}

// share returns the weight of a time by which an answer is delayed. That time adds as much between its
// tokens, divided by their number.
func (p *PredictedLatency) share(answer float64) float64 { return min(1, p.Weight/max(1, answer)) }

// override applies the request's [Override] to the weights.
func (w *weights) override(o *Override) {
	if o == nil {
		return
	}
	put(&w.credit, o.OverlapScoreCredit)
	w.credit = min(w.credit, 1)
	if scale := o.PrefillLoadScale; scale != nil {
		w.wait, w.prefill, w.delay = *scale*w.wait, *scale*w.prefill, *scale
	}
	if o.TrackPrefillTokens != nil && !*o.TrackPrefillTokens {
		w.wait = 0
	}
}

// cost sets the cost of candidate i and its terms, but spread.
func (w *weights) cost(s *Selection, i int) {
	c := &s.Candidates[i]
	t, requests := &c.Terms, float64(c.Requests)
	prefill := c.PrefillTime + (1-w.credit)*c.Slowness*s.Latency.Token*float64(c.OverlapTokens)
	// The fixed part of a step is due without this prefill, too.
	work := max(0, prefill-c.Slowness*s.Latency.Fixed)
	taken := work + c.memory
	*t = Terms{
		Wait: w.wait * c.WaitTime, Prefill: w.prefill * prefill,
		Delay:  w.delay * taken * (s.ArrivalRate*taken + delayQueue*float64(c.Awaiting)),
		Decode: c.certainSlowness() * (w.own + requests*w.added),
		Stall:  w.between * requests * work, // requests that wait here now will generate meanwhile
	}
	if s.Split.Rule != SplitNever {
		w.split(s, c)
	}
	if s.BoundTarget >= 0 && i != s.BoundTarget {
		t.Leave = leavePrice * s.Latency.Prefill(s.Candidates[s.BoundTarget].OverlapTokens-c.OverlapTokens, c.OverlapTokens, 0)
	}
	if c.Others {
		t.Others = sharePrice * s.Met * prefill
	}
	c.add()
}

// certainSlowness returns the slowness without what may be noise. Else the noise would decide among
// workers that are alike, because an answer takes far longer than the prefill of a short prompt.
func (c *Candidate) certainSlowness() float64 {
	return c.Slowness / min(max(c.Slowness, 1/noise), noise)
}

// add adds the terms up to the cost.
func (c *Candidate) add() {
	if c.Cost = c.Terms.sum(); c.Factor != 0 {
		c.Cost *= c.Factor
	}
}

// spread credits candidates that lack a widely shared prefix with what a copy there is worth to
// later requests. Each of those that come to it saves half of the difference in load, as far as
// that lasts. The credit is at most what the copy costs. Without it, requests would pile up on the
// targets with the prefix until another one's prefill costs less than waiting.
func (s *Selection) spread() {
	if s.SharedTokens == 0 {
		return
	}
	block, held := float64(s.BlockSize), int64(0)
	for i := range s.Candidates {
		held = max(held, s.Candidates[i].OverlapTokens)
	}
	shared := min(s.SharedTokens, float64(held)) // of text it is estimated
	var holder *Candidate
	for i := range s.Candidates {
		if c := &s.Candidates[i]; float64(c.OverlapTokens)+block >= shared && (holder == nil || c.Cost < holder.Cost) {
			holder = c
		}
	}
	load := func(c *Candidate) float64 { return c.Terms.Wait + c.Terms.Decode + c.Terms.Stall }
	later := float64(s.SharedArrivals) / float64(s.SharedHolders+1) // as many as so far
	for i := range s.Candidates {
		c := &s.Candidates[i]
		lacks := shared - float64(c.OverlapTokens)
		if lacks <= block || c.RecentWork >= holder.RecentWork {
			continue
		}
		t := &c.Terms
		gain := later * (load(holder) - load(c)) / 2 * (1 - c.RecentWork/holder.RecentWork)
		most := (t.Prefill + t.Delay + t.Stall) * lacks / float64(s.Tokens-c.OverlapTokens)
		if credit := min(gain, most); credit > 0 {
			t.Spread = -credit
			c.add()
		}
	}
}

// insteadOf returns the target that gets the request in place of the cheapest one, as its spread then says.
// If the prefill takes less on an idle target than the wait at the cheapest one, an idle one gets it. What is
// computed in idle time delays nobody. Else targets that are as good take turns, as do idle ones of equal cost. A
// load tells little of when an engine begins its next step, and all that comes before that shares the step.
// Requests that come at even times share fewer steps.
func (s *Selection) insteadOf(cheapest int) int {
	b, at := &s.Candidates[cheapest], cheapest
	if b.Factor != 0 || s.Split.Rule != SplitNever {
		return at // a client prefers it, or the prefill may be elsewhere
	}
	for i := range s.Candidates {
		c, taken := &s.Candidates[i], &s.Candidates[at]
		switch idle := taken.Requests == 0; {
		case c.Factor != 0:
		case c.Requests == 0 && c.PrefillTime < b.WaitTime:
			if !idle || c.Cost < taken.Cost || c.Cost == taken.Cost && c.rested > taken.rested {
				at = i
			}
		case !idle && c.rested > taken.rested && c.isAsGoodAs(b):
			at = i
		}
	}
	if c := &s.Candidates[at]; at != cheapest {
		c.Terms.Spread -= max(0, c.Cost-b.Cost)
		c.add()
		s.Drawn = s.Drawn[:0]
	}
	return at
}

// isAsGoodAs returns whether a target costs only some steps more than the best one, and is no worse
// otherwise.
func (c *Candidate) isAsGoodAs(best *Candidate) bool {
	return best.Requests > 0 && float64(c.Requests) <= 1+1.1*float64(best.Requests) &&
		c.Cost <= best.Cost+alikeSteps*best.step && c.WaitTime <= best.WaitTime &&
		c.OverlapTokens >= best.OverlapTokens && c.Slowness <= noise*best.Slowness && c.full <= freeMemory &&
		c.Others == best.Others && !c.assumed()
}

// split makes the terms those of a split request if the rule says so, or if their sum is lower
// and the rule is SplitAuto.
func (w *weights) split(s *Selection, c *Candidate) {
	a, t := &s.Split, &c.Terms
	t.Stall = w.prefill * c.stall(s)
	if a.Rule == SplitAuto && c.way == EitherWay {
		c.Split = a.Cost+w.wait*(c.SplitTime-a.Time) < t.Wait+t.Prefill+t.Delay+t.Stall
	}
	if c.Split {
		t.Wait, t.Prefill, t.Delay, t.Stall = w.wait*(c.SplitTime-c.TransferTime-a.Time), a.Time, a.Cost-a.Time, 0
		t.Transfer = w.wait * c.TransferTime
	}
}
