package kvscore

import "math"

// Dynamo is the cost function of NVIDIA Dynamo's KV router
// (lib/kv-router/src/scheduling/selector/default.rs), with its option names.
// The cost of a candidate is, in blocks:
//
//	PrefillLoadScale × max(0, (prefill tokens booked + prompt tokens)/BlockSize − credit)
//	  + active blocks + blocks that this request adds
//	  + DecodeActiveRequestWeight × active requests
//	credit = OverlapScoreCredit × decay × overlap blocks
//	decay  = 1 / (1 + CreditDecay × (prefill booked here beyond the least booked)/BlockSize / prompt blocks)
//
// Overlap blocks in host memory count 0.75, on disk 0.25, in external storage 0.5.
//
// The sum is multiplied by the candidate's factor. The lowest cost wins; equal costs share
// evenly.
type Dynamo struct {
	// OverlapScoreCredit is the credit for each overlap block, in blocks.
	OverlapScoreCredit float64
	// CreditDecay reduces the credit on targets with more booked prefill than the least
	// busy one.
	CreditDecay float64
	// PrefillLoadScale weighs the blocks to be computed against active blocks.
	PrefillLoadScale float64
	// DecodeActiveRequestWeight is a cost in blocks for each active request.
	DecodeActiveRequestWeight float64
	// Temperature samples from softmax(−cost/temperature), the costs
	// normalised to their range; 0 takes the lowest.
	Temperature float64
	// IgnorePrefillTokens counts no prefill tokens, as Dynamo's
	// track_prefill_tokens=false does.
	IgnorePrefillTokens bool
	// IgnoreActiveBlocks counts neither active nor added blocks, as
	// track_active_blocks=false does.
	IgnoreActiveBlocks bool
	// IgnoreOutputBlocks counts prompt blocks only, as
	// track_output_blocks=false does.
	IgnoreOutputBlocks bool
	// NoKVReuse counts shared blocks once for each request, as assume_kv_reuse=false
	// does.
	NoKVReuse bool
	ties      Ties
}

// NewDynamo returns the policy with Dynamo's own defaults.
func NewDynamo() *Dynamo {
	return &Dynamo{OverlapScoreCredit: 1, PrefillLoadScale: 1, IgnoreOutputBlocks: true}
}

// Choose implements Policy.
func (d *Dynamo) Choose(s *Selection) int {
	by := d
	var changed Dynamo
	if s.Apart.Legs != LegsNever || s.Override != nil {
		by = &changed
		by.like(d)
		by.decode(s.Apart.Legs)
		s.Override.change(by)
	}
	by.score(s)
	if by.Temperature > 0 {
		return softmax(s, by.Temperature)
	}
	return d.ties.Cheapest(s)
}

// like copies the options of another policy.
func (d *Dynamo) like(o *Dynamo) {
	d.OverlapScoreCredit, d.CreditDecay, d.PrefillLoadScale = o.OverlapScoreCredit, o.CreditDecay, o.PrefillLoadScale
	d.DecodeActiveRequestWeight, d.Temperature, d.IgnorePrefillTokens = o.DecodeActiveRequestWeight, o.Temperature, o.IgnorePrefillTokens
	d.IgnoreActiveBlocks, d.IgnoreOutputBlocks, d.NoKVReuse = o.IgnoreActiveBlocks, o.IgnoreOutputBlocks, o.NoKVReuse
}

// decode makes the options those with which Dynamo chooses decode workers
// (lib/llm/src/kv_router/prefill_router). If the request may stay whole, what they hold counts.
func (d *Dynamo) decode(legs Legs) {
	if legs == LegsNever {
		return
	}
	d.IgnorePrefillTokens, d.NoKVReuse = true, true
	if legs == LegsAlways {
		d.OverlapScoreCredit = 0
	}
}

// score sets each candidate's cost.
func (d *Dynamo) score(s *Selection) {
	least := s.Candidates[0].PrefillTokens
	for i := range s.Candidates {
		least = min(least, s.Candidates[i].PrefillTokens)
	}
	for i := range s.Candidates {
		c := &s.Candidates[i]
		overlap := c.OverlapBlocks - c.loading()/float64(s.BlockSize)
		credit := d.OverlapScoreCredit * d.decay(s, c, least) * overlap
		c.Cost = d.PrefillLoadScale*max(0, d.prefillBlocks(s, c)-credit) +
			d.decodeBlocks(c) + d.DecodeActiveRequestWeight*float64(c.Requests)
		if c.Factor != 0 {
			c.Cost *= c.Factor
		}
	}
}

// prefillBlocks returns the booked prefill and the whole prompt, before the credit.
func (d *Dynamo) prefillBlocks(s *Selection, c *Candidate) float64 {
	if d.IgnorePrefillTokens {
		return 0
	}
	cached := int64(c.OverlapBlocks*float64(s.BlockSize) + 0.5)
	return float64(c.PrefillTokens+max(s.Tokens, cached)) / float64(s.BlockSize)
}

func (d *Dynamo) decay(s *Selection, c *Candidate, least int64) float64 {
	if d.IgnorePrefillTokens || d.CreditDecay == 0 || s.Tokens <= 0 {
		return 1
	}
	blocks := (s.Tokens + int64(s.BlockSize) - 1) / int64(s.BlockSize)
	excess := float64(c.PrefillTokens-least) / float64(s.BlockSize)
	return 1 / (1 + d.CreditDecay*excess/float64(blocks))
}

// decodeBlocks returns the active blocks and those that this request adds.
func (d *Dynamo) decodeBlocks(c *Candidate) float64 {
	if d.IgnoreActiveBlocks {
		return 0
	}
	active, added := c.PromptBlocks, c.RequestBlocks-c.SharedBlocks
	if d.NoKVReuse {
		active, added = c.UnsharedBlocks, c.RequestBlocks
	}
	if !d.IgnoreOutputBlocks {
		active += c.OutputBlocks
	}
	return math.Floor(active+0.5) + added
}

// softmax draws a candidate with probability ∝ exp(−(cost−min)/(range×temperature)).
func softmax(s *Selection, temperature float64) int {
	s.drawAny()
	lo, hi := math.Inf(1), math.Inf(-1)
	for i := range s.Candidates {
		lo, hi = min(lo, s.Candidates[i].Cost), max(hi, s.Candidates[i].Cost)
	}
	if lo == hi {
		return s.Rand.IntN(len(s.Candidates))
	}
	weight := func(i int) float64 {
		return math.Exp(-(s.Candidates[i].Cost - lo) / ((hi - lo) * temperature))
	}
	sum := 0.0
	for i := range s.Candidates {
		sum += weight(i)
	}
	draw := s.Rand.Float64() * sum
	for i := range s.Candidates {
		if draw -= weight(i); draw < 0 {
			return i
		}
	}
	return len(s.Candidates) - 1
}
