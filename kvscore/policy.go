package kvscore

// Policy chooses among the candidates of a selection.
type Policy interface {
	// Choose returns the position in s.Candidates of the chosen target, and
	// leaves in each candidate's Cost what it compared, where it compares
	// costs. s.Candidates is never empty. The policy must not reorder it, must
	// change nothing in it but Cost and Terms, and must not keep s nor what it points to.
	//
	// Choose is called once for each booking, or with s.Dry set. The scheduler
	// holds its lock meanwhile, so that no other request is booked between what
	// the policy sees and what it chooses. All of the pool waits for that lock, the
	// answers under way included: Choose must return at once, and must not use the
	// scheduler. It may be called by many goroutines at once, as several
	// schedulers may share a policy.
	Choose(s *Selection) int
}

// Rand is the source of randomness of a selection. Its methods are those of
// math/rand/v2.Rand; they must be safe for concurrent use where selections
// are concurrent.
type Rand interface {
	IntN(n int) int
	Float64() float64
}

// Selection is one choice to be made: what is asked, and for each candidate
// what it holds and how busy it is.
type Selection struct {
	// Tokens is the length of the prompt in tokens: as engines counted the part of
	// it that they have computed, the rest known or estimated. It is 0 where
	// nothing is known about the prompt.
	Tokens int64
	// Known is the prefix of the prompt that some target holds.
	Known Known
	// RequestBlocks are the complete KV blocks of the prompt, estimated where it
	// is text.
	RequestBlocks float64
	// Root identifies what prompts must have in common to share blocks at all:
	// model, LoRA, salt, kind of content.
	Root uint64
	// Blocks are the content hashes of the prompt's full blocks in order, none
	// where nothing is known about the prompt. They are the request's own and
	// must not be changed.
	Blocks []uint64
	// NominalBlockTokens is the number of tokens in one of Blocks, as it was
	// assumed before anything was learned: while prompts are compared by the
	// same blocks, it does not change.
	NominalBlockTokens float64
	// BlockSize is the number of tokens in one KV block, in which the
	// candidates' blocks are counted.
	BlockSize int
	// Candidates are the targets to choose from.
	Candidates []Candidate
	// Override changes the options of the policy for this choice; nil changes
	// nothing.
	Override *Override
	// Rand breaks ties and samples.
	Rand Rand
	// Dry says that nothing comes of the choice: it explains what would be
	// chosen. A policy that remembers its choices must not remember this one.
	Dry bool
	// Drawn is for a policy to fill in where Dry is set and chance decides: the
	// positions of the candidates that it decides among.
	Drawn []int
	// Fault says, after the choice, that the policy returned no position of a
	// candidate or changed the list of candidates, so that the candidate with the
	// least load was taken.
	Fault bool
	// Unknown is the number of candidates with Candidate.Unknown.
	Unknown int
	// Home is the position of the target that the request's session is bound to; -1
	// if there is none among the candidates.
	Home int
	// Priority is that of the request: above 0, its own time weighs more; below 0,
	// less. Only [PredictedLatency] heeds it.
	Priority int
	// SharedTokens is the length of a prefix that the prompt has in common with several
	// earlier ones, which went on differently, as behind a system prompt; 0 if there is
	// none. SharedArrivals is the number of such prompts, SharedHolders that of the
	// targets that hold it.
	SharedTokens                  float64
	SharedArrivals, SharedHolders int
	// Awaiting is the number of requests on all candidates whose prefill is not over.
	Awaiting int
	// ExpectedAnswer is the length of the answer to expect, in tokens.
	ExpectedAnswer float64
	// ExpectedTurns is how many further turns a new conversation has on average, and
	// TurnTime their predicted prefill time, in milliseconds.
	ExpectedTurns, TurnTime float64
	// Latency are the coefficients of the predictions.
	Latency Latency

	// continues says that the prompt goes on where an earlier prompt or its answer
	// ended, as the next turn of a conversation does.
	continues bool

	refs []TargetRef // of Select
	tied []int       // positions, while a policy chooses
}

// HomeHolds tells whether the target that the session is bound to is a candidate and
// holds at least half of what any candidate holds of the prompt. A session whose home does
// not has no reason to go back there.
func (s *Selection) HomeHolds() bool {
	if s.Home < 0 {
		return false
	}
	most := int64(0)
	for i := range s.Candidates {
		most = max(most, s.Candidates[i].OverlapTokens)
	}
	return most > 0 && 2*s.Candidates[s.Home].OverlapTokens >= most
}

// Known is a prefix of a prompt that some target holds: so many of its Blocks, and
// Past of another one.
type Known struct {
	Blocks  int
	Past    float64
	Tokens  float64
	Counted bool // an engine counted Tokens; else they are estimated
}

// Candidate is one target of a selection with the terms of its cost. Blocks
// are KV blocks of Selection.BlockSize tokens; where the prompt is known as
// text, they are estimates and may be fractions.
type Candidate struct {
	Target Target
	// OverlapBlocks counts the leading blocks of the prompt that the target
	// holds or is computing now.
	OverlapBlocks float64
	// HeldBlocks counts the same in the request's own Blocks.
	HeldBlocks int
	// OverlapTokens is what the engine will report as cached: the same in tokens,
	// in full blocks of the engine, and without the prompt's last token, which
	// engines always compute.
	OverlapTokens int64
	// PrefillTokens are booked on the target and not yet computed.
	PrefillTokens int64
	// PromptBlocks are the prompt blocks of active requests, those that
	// several requests share counted once.
	PromptBlocks float64
	// UnsharedBlocks are the same, counted once for each request.
	UnsharedBlocks float64
	// OutputBlocks are the blocks that active requests have generated. Where
	// the length of an answer is expected, its blocks count the less the nearer
	// it comes to that.
	OutputBlocks float64
	// RequestBlocks are the complete blocks of this prompt.
	RequestBlocks float64
	// SharedBlocks are the leading ones of RequestBlocks that an active
	// request on the target uses, too.
	SharedBlocks float64
	// Requests is the number of active requests.
	Requests int
	// Unknown says that the scheduler does not know the target. The terms of its
	// load, from PrefillTokens to OutputBlocks and Requests, are then the medians
	// of the known candidates, 0 if there are none.
	Unknown bool
	// Awaiting is the number of Requests whose prefill is not over.
	Awaiting int
	// WaitTime is how many milliseconds will pass until the booked prefills are over.
	WaitTime float64
	// PrefillTime is the time for what the target lacks of the prompt, in
	// milliseconds.
	PrefillTime float64
	// Slowness is the target's prefill time over the pool's prediction, from its own
	// samples; 1 while there are none.
	Slowness float64
	// RecentWork is the predicted prefill time of the requests of the last minutes, the
	// older the less, in milliseconds.
	RecentWork float64
	// Terms are what PredictedLatency has made of all this.
	Terms Terms
	// Factor is what the cost is multiplied with, for the sake of the client's
	// preferences. 0 stands for 1: it has none. [Dynamo] and [PredictedLatency] heed
	// it.
	Factor float64
	// Cost is what the policy compared, lower is better; 0 where the policy
	// does not compare costs or was not asked.
	Cost float64
}

// TTFT returns how many milliseconds the first token is predicted to take.
func (c *Candidate) TTFT() float64 { return c.WaitTime + c.PrefillTime }
