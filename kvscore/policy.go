package kvscore

import (
	"math"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// Policy chooses among the candidates of a selection.
type Policy interface {
	// Choose returns the position of the chosen target in s.Candidates, which is never
	// empty. A policy that compares costs sets each candidate's Cost. It may change only
	// Cost and Terms, must not reorder the candidates, and must not keep s or anything
	// that s points to.
	//
	// The scheduler calls Choose once for each booking, or with s.Dry set. It holds its
	// lock, so that no other booking comes between the snapshot and the choice. The whole
	// pool waits for that lock, active answers too: Choose must return at once, and must
	// not use the scheduler. Several schedulers may share a policy, so Choose must be
	// safe for concurrent use.
	Choose(s *Selection) int
}

// Rand is a source of randomness with the methods of math/rand/v2.Rand. Concurrent
// selections need one that is safe for concurrent use.
type Rand interface {
	IntN(n int) int
	Float64() float64
}

// Selection is one choice: the request, and what each candidate holds and how busy it is.
// It has many fields because it is all that a policy sees.
type Selection struct {
	Findings
	// Root identifies the model, LoRA, salt and kind of content. Only prompts with the
	// same root share blocks.
	Root uint64
	// Blocks are the content hashes of the prompt's full blocks in order, none if the
	// prompt is unknown. They belong to the request: a policy must not change or keep them.
	Blocks []uint64
	// These are as in [Request].
	NominalBlockTokens float64
	Override           *Override
	Session            uint64
	Priority           int
	// BlockSize is the number of tokens in one KV block. Candidates' blocks have this size.
	BlockSize int
	// Candidates are the targets to choose from.
	Candidates []Candidate
	// Rand breaks ties and samples.
	Rand Rand
	// Dry says that the choice is only explained and not made. A policy that remembers
	// its choices must not remember this one.
	Dry bool
	// Drawn are the positions of the candidates among which chance decides. The policy
	// sets it if Dry is set.
	Drawn []int
	// Needs says that nothing is booked while no target has this room: see [Scheduler.Room]. The caller
	// then waits until one has. With Clear, a prompt of which the chosen target lacks much needs more: see
	// [RoomForSurplus].
	Needs Room
	// Quiet says that a target is not booked on which the request delays others: see [Scheduler.IsQuiet].
	Quiet bool
	// Within, in milliseconds, is how soon the first token must come; 0 stands for any time. If no
	// candidate is predicted to keep it, nothing is booked: see [Selection.Soonest].
	Within float64
	// Fault says, after the choice, that the policy returned an invalid position or
	// changed the list of candidates. The scheduler then chose the least loaded one.
	Fault bool
	// Unknown is the number of candidates with Candidate.Unknown.
	Unknown int
	// BoundTarget is the position of the target that the request's session is bound to, -1 if it
	// is not a candidate.
	BoundTarget int
	// Split is how the request may be split: see Candidate.Split.
	Split Split
	// ExpectedAnswer is the expected length of the answer, MeanAnswer that of recent answers, in tokens.
	ExpectedAnswer, MeanAnswer float64
	// ArrivalRate is how many requests per millisecond come to a target, on average of all targets
	// and recent minutes.
	ArrivalRate float64
	// Met is the share of recent leases that did not know of one that another router began at the
	// same moment.
	Met float64
	// Latency are the coefficients of the predictions.
	Latency Latency

	prompt cache.Prompt
	view   cache.View // of the prompt
	tied   []int      // positions, while a policy chooses
	paces  mean       // sums of those of the candidates
	paced  float64    // how many candidates have one
}

// BoundTargetHolds reports whether the session's target is a candidate that holds at least half
// as much of the prompt as any candidate. If it does not, the session has no reason to go back
// there.
func (s *Selection) BoundTargetHolds() bool {
	if s.BoundTarget < 0 {
		return false
	}
	most := int64(0)
	for i := range s.Candidates {
		most = max(most, s.Candidates[i].OverlapTokens)
	}
	return most > 0 && 2*s.Candidates[s.BoundTarget].OverlapTokens >= most
}

// Findings is what the cache models say of a prompt, over all targets.
type Findings = cache.Findings

// Known is a prefix of a prompt that some target holds: the first Blocks of its blocks, and
// the share Past of the next one.
type Known = cache.Known

// Knowledge is where an overlap comes from.
type Knowledge = cache.Knowledge

// The kinds of knowledge.
const (
	Approximate = cache.Approximate // the router's own requests
	Partial     = cache.Partial     // also events that name a part of what the target holds
	Exact       = cache.Exact       // events that name all that the target holds
)

// Overlap is the leading part of a prompt that a target holds, or is computing now.
type Overlap = cache.Overlap

// Candidate is one target of a selection with all terms of its cost. Blocks are KV blocks
// of Selection.BlockSize tokens. For a prompt of text they are estimates and may be
// fractions.
type Candidate struct {
	Target Target `json:"-"`
	Overlap
	// PrefillTokens are booked on the target and not yet computed. They include those of
	// waiting requests of other clients.
	PrefillTokens int64 `json:"prefill_tokens"`
	// PromptBlocks are the prompt blocks of active requests. Shared blocks count once.
	PromptBlocks float64 `json:"prompt_blocks"`
	// UnsharedBlocks are the same, counted once for each request.
	UnsharedBlocks float64 `json:"unshared_blocks"`
	// OutputBlocks are the blocks that active requests have generated. If the length of an
	// answer is expected, its blocks count less as it comes near to that length.
	OutputBlocks float64 `json:"output_blocks"`
	// RequestBlocks are the complete blocks of this prompt.
	RequestBlocks float64 `json:"request_blocks"`
	// Requests is the number of active requests. External are those of them that other clients
	// than the router have, as the engine reports.
	Requests int `json:"requests"`
	External int `json:"other_clients_requests"`
	// Remote are those of Requests that other routers have sent.
	Remote int `json:"other_routers_requests"`
	// Others says that another router prefers the target.
	Others bool `json:"-"`
	// Unknown says that the scheduler does not know the target. The terms of its load are
	// then the medians of the known candidates, 0 if there are none.
	Unknown bool `json:"load_unknown"`
	// Outlier says that errors, empty answers, or first tokens much too soon are most of the
	// worker's recent answers, unlike those of the other candidates. They cost it nothing, so it
	// would look idle. The terms of its load are then at least the medians of the others, and
	// a policy can treat it as any other candidate.
	Outlier bool    `json:"outlier,omitzero"`
	excess  float64 // of an outlier: how many times more answers it has had than its peers
	// Awaiting is the number of Requests whose prefill is not over.
	Awaiting int `json:"awaiting_requests"`
	// WaitTime is the predicted time until the booked prefills are over, in milliseconds.
	WaitTime float64 `json:"wait_ms"`
	// PrefillTime is the predicted time for the part of the prompt that the target lacks,
	// in milliseconds.
	PrefillTime float64 `json:"prefill_ms"`
	// Split says that the request is split if it is decoded on this target. SplitTime is the
	// predicted time to its first token then, in milliseconds. TransferTime is the part of it for
	// the transfer of the KV cache.
	Split        bool    `json:"split,omitzero"`
	SplitTime    float64 `json:"split_ms,omitzero"`
	TransferTime float64 `json:"transfer_ms,omitzero"`
	way          Way
	// Slowness is the target's prefill time divided by the pool's prediction, 1 while the
	// target has no samples.
	Slowness float64 `json:"slowness"`
	// MemoryUse is the share of the target's KV cache that active requests use. It can be
	// above 1, for the engine's memory is not known exactly.
	MemoryUse float64       `json:"memory_use"`
	full      float64       // the share of its KV cache that will be used, with what the answers will take
	memory    float64       // milliseconds for which the prompt takes the whole cache
	step      float64       // milliseconds that its steps take
	crowded   bool          // the prompt may wait for memory
	rested    time.Duration // since a request came to the target
	// RecentWork is the predicted prefill time of recent requests, in milliseconds. It
	// decays with a time constant of two minutes.
	RecentWork float64 `json:"recent_work_ms"`
	// Terms are the parts of the cost, if the policy is PredictedLatency.
	Terms Terms `json:"terms_ms,omitzero"`
	// Factor multiplies the cost, by the client's preferences. 0 stands for 1. [Dynamo]
	// and [PredictedLatency] use it.
	Factor float64 `json:"factor,omitzero"`
	// Cost is the value that the policy compared; lower is better. 0 if the policy compares
	// no costs or did not run.
	Cost float64 `json:"cost"`
}

// The part of a computed token's time that a token saves if the engine loads it from a slower
// tier. They are Dynamo's defaults, host_cache_hit_weight and so on.
const (
	hostCredit, diskCredit, externalCredit = 0.75, 0.25, 0.5
)

// loading returns the time to load a candidate's tokens from slower tiers, as a number of
// tokens that take as long to compute.
func (c *Candidate) loading() float64 {
	return (1-hostCredit)*float64(c.HostTokens) + (1-diskCredit)*float64(c.DiskTokens) + (1-externalCredit)*float64(c.ExternalTokens)
}

// Soonest returns the least predicted time to the first token, in milliseconds. A bound of 0 or more is
// the position of the only candidate that counts.
func (s *Selection) Soonest(bound int) float64 {
	if bound >= 0 && bound < len(s.Candidates) {
		return s.Candidates[bound].TTFT()
	}
	least := math.Inf(1)
	for i := range s.Candidates {
		least = min(least, s.Candidates[i].TTFT())
	}
	return least
}

// TTFT returns how many milliseconds the first token is predicted to take.
func (c *Candidate) TTFT() float64 {
	if c.Split {
		return c.SplitTime
	}
	return c.WaitTime + c.PrefillTime
}
