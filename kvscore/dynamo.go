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
// and all of it times the candidate's factor. The lowest cost wins; equal ones
// share evenly.
type Dynamo struct {
	// OverlapScoreCredit is what a block that need not be computed counts.
	OverlapScoreCredit float64
	// CreditDecay lets the credit fall on targets with more booked prefill
	// than the least busy one.
	CreditDecay float64
	// PrefillLoadScale weighs the blocks to be computed against active blocks.
	PrefillLoadScale float64
	// DecodeActiveRequestWeight is a cost in blocks for each active request.
	DecodeActiveRequestWeight float64
	// Temperature samples from softmax(−cost/temperature), the costs
	// normalised to their range; 0 takes the lowest.
	Temperature float64
	// IgnorePrefillTokens leaves the prefill term at the credit alone, as
	// Dynamo's track_prefill_tokens=false does.
	IgnorePrefillTokens bool
	// IgnoreActiveBlocks leaves active blocks and those added out, as
	// track_active_blocks=false does.
	IgnoreActiveBlocks bool
	// IgnoreOutputBlocks counts prompt blocks only, as
	// track_output_blocks=false does.
	IgnoreOutputBlocks bool
	// NoKVReuse counts blocks that requests share once for each of them, as
	// assume_kv_reuse=false does.
	NoKVReuse bool
	// SpreadStems is not Dynamo's: the number of arrivals for each holder from
	// which on a stem gives no credit. Such a prefix, a system prompt for
	// example, is worth having on every target; with the credit given, all
	// conversations that begin with it would pile up on the one target that
	// had it first. 0 gives the credit always, as Dynamo does.
	SpreadStems int
	// StayBlocks is not Dynamo's: on the target that holds most of a prompt,
	// and more than a stem, so many blocks of prefill booked by others cost
	// nothing. An engine computes that much in a step that it needs anyway, so
	// that leaving for less would give the overlap away. 0 charges every
	// block, as Dynamo does.
	StayBlocks float64
	// EvenBlocks is not Dynamo's: targets whose cost is at most so many blocks
	// above the lowest, and which hold as much of the prompt beyond stems,
	// count as equal. Whoever has a request less at this moment would
	// otherwise draw all conversations that begin now, to keep them. 0 tells
	// all costs apart, as Dynamo does.
	EvenBlocks float64

	ties Ties
}

// NewDynamo returns the policy with this project's defaults: Dynamo's, but
// PrefillLoadScale 16, SpreadStems 2, StayBlocks 32 and EvenBlocks 128, and
// with output blocks counted. Scale 1 lets the active blocks of long prompts
// override any overlap.
func NewDynamo() *Dynamo {
	return &Dynamo{OverlapScoreCredit: 1, PrefillLoadScale: 16, SpreadStems: 2, StayBlocks: 32, EvenBlocks: 128}
}

// Choose implements Policy.
func (d *Dynamo) Choose(s *Selection) int {
	by := d
	if s.Override != nil {
		by = s.Override.of(d)
	}
	stem := d.stem(s)
	best := by.score(s, stem)
	if by.Temperature > 0 {
		return softmax(s, by.Temperature)
	}
	return d.asGood(s, best, stem)
}

// asGood returns the candidate at best, or one that is as good.
func (d *Dynamo) asGood(s *Selection, at int, stem float64) int {
	best, equal := &s.Candidates[at], s.tied[:0]
	own := max(stem, best.OverlapBlocks)
	for i := range s.Candidates {
		c := &s.Candidates[i]
		if c.Cost == best.Cost || c.Cost <= best.Cost+d.EvenBlocks && c.Factor == best.Factor && max(stem, c.OverlapBlocks) == own {
			equal = append(equal, i)
		}
	}
	s.tied = equal
	return d.ties.Pick(s, equal)
}

// score sets each candidate's cost, and returns the position of the lowest.
func (d *Dynamo) score(s *Selection, stem float64) (best int) {
	least, most := s.Candidates[0].PrefillTokens, 0.0
	for i := range s.Candidates {
		c := &s.Candidates[i]
		least = min(least, c.PrefillTokens)
		if c.OverlapBlocks > most {
			most = c.OverlapBlocks
		}
	}
	for i := range s.Candidates {
		c := &s.Candidates[i]
		credit := 0.0
		if own := c.OverlapBlocks - stem; own > 0 {
			credit = d.OverlapScoreCredit * d.decay(s, c, least) * own
			if c.OverlapBlocks == most {
				credit += min(d.StayBlocks, float64(c.PrefillTokens)/float64(s.BlockSize))
			}
		}
		c.Cost = d.PrefillLoadScale*max(0, d.prefillBlocks(s, c)-credit) +
			d.decodeBlocks(c) + d.DecodeActiveRequestWeight*float64(c.Requests)
		if c.Factor != 0 {
			c.Cost *= c.Factor
		}
		if c.Cost < s.Candidates[best].Cost {
			best = i
		}
	}
	return best
}

// stem returns the length of the longest stem that gives no credit.
func (d *Dynamo) stem(s *Selection) (blocks float64) {
	if d.SpreadStems <= 0 {
		return 0
	}
	for _, stem := range s.Stems {
		if stem.Arrivals >= d.SpreadStems*max(stem.Holders, 1) {
			blocks = stem.Blocks
		}
	}
	return blocks
}

// prefillBlocks is the booked prefill with the whole prompt added, which the
// credit is taken from.
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

// decodeBlocks is the number of active blocks with this request's own.
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
