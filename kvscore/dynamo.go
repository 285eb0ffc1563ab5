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
	// How many blocks a cached block takes off the cost. Default: `1`.
	OverlapScoreCredit float64 `json:"overlap_score_credit"`

	// How fast the credit falls on workers with more booked prefill than the least busy
	// one. Default: `0`, it does not fall.
	CreditDecay float64 `json:"credit_decay,omitempty"`

	// The weight of blocks to be computed against active blocks. Default: `1`.
	PrefillLoadScale float64 `json:"prefill_load_scale"`

	// The cost of each active request, in blocks. Default: `0`.
	DecodeActiveRequestWeight float64 `json:"decode_active_request_weight,omitempty"`

	// How much chance decides. Above 0 the policy draws among the workers, by the softmax
	// of their cost, normalised to its range. Default: `0`, the lowest cost wins.
	Temperature float64 `json:"temperature,omitempty"`

	// Whether prefill counts. Default: `true`.
	TrackPrefillTokens bool `json:"track_prefill_tokens"`

	// Whether active blocks count. Default: `true`.
	TrackActiveBlocks bool `json:"track_active_blocks"`

	// Whether generated blocks count among the active blocks. Default: `false`.
	TrackOutputBlocks bool `json:"track_output_blocks,omitempty"`

	// Whether blocks that active requests share count once. Default: `true`.
	AssumeKVReuse bool `json:"assume_kv_reuse"`
}

// NewDynamo returns the policy with the defaults of Dynamo's router.
func NewDynamo() *Dynamo {
	return &Dynamo{
		OverlapScoreCredit: 1, PrefillLoadScale: 1,
		TrackPrefillTokens: true, TrackActiveBlocks: true, AssumeKVReuse: true,
	}
}

// Choose implements Policy.
func (d *Dynamo) Choose(s *Selection) int {
	by := *d
	by.decode(s.Split.Rule)
	s.Override.change(&by)
	by.score(s)
	if by.Temperature > 0 {
		return softmax(s, by.Temperature)
	}
	return s.Cheapest()
}

// decode makes the options those with which Dynamo chooses decode workers
// (lib/llm/src/kv_router/prefill_router). If the request may stay whole, what they hold counts.
func (d *Dynamo) decode(phases SplitRule) {
	if phases == SplitNever {
		return
	}
	d.TrackPrefillTokens, d.AssumeKVReuse = false, false
	if phases == SplitAlways {
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
	if !d.TrackPrefillTokens {
		return 0
	}
	cached := int64(c.OverlapBlocks*float64(s.BlockSize) + 0.5)
	return float64(c.PrefillTokens+max(s.Tokens, cached)) / float64(s.BlockSize)
}

func (d *Dynamo) decay(s *Selection, c *Candidate, least int64) float64 {
	if !d.TrackPrefillTokens || d.CreditDecay == 0 || s.Tokens <= 0 {
		return 1
	}
	blocks := (s.Tokens + int64(s.BlockSize) - 1) / int64(s.BlockSize)
	excess := float64(c.PrefillTokens-least) / float64(s.BlockSize)
	return 1 / (1 + d.CreditDecay*excess/float64(blocks))
}

// decodeBlocks returns the active blocks and those that this request adds.
func (d *Dynamo) decodeBlocks(c *Candidate) float64 {
	if !d.TrackActiveBlocks {
		return 0
	}
	active, added := c.PromptBlocks, c.RequestBlocks-c.SharedBlocks
	if !d.AssumeKVReuse {
		active, added = c.UnsharedBlocks, c.RequestBlocks
	}
	if d.TrackOutputBlocks {
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
