package observe

import (
	"slices"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

const (
	// keptChoices is how many choices a pool remembers: at most 13 MB of them.
	keptChoices = 4096
	// keptCandidates is how many candidates of a choice it remembers.
	keptCandidates = 8
)

// PastChoice is a choice as it was made, without the prompt and the session's key.
type PastChoice struct {
	N              uint64        `json:"n"` // its number in the pool, from 1
	At             time.Time     `json:"-"`
	Request        string        `json:"request_id,omitzero"` // it may be the client's
	Model          string        `json:"model"`               // as the request names it
	Reason         string        `json:"reason"`
	Tokens         int64         `json:"prompt_tokens"` // as estimated; 0 is unknown
	Attempt        int           `json:"attempt"`       // of the request, from 1
	Rest           string        `json:"rest,omitzero"` // how the rest of a stream is asked for that broke off
	CandidateCount int           `json:"candidates_in_all"`
	Waited         time.Duration `json:"-"`
	Why            string        `json:"queued_because,omitzero"` // it waited last
	Class          string        `json:"class,omitzero"`
	Tenant         string        `json:"tenant,omitzero"`
	Unit           string        `json:"cost_unit,omitzero"` // of the costs; empty if no policy compared any

	Candidates []PastCandidate `json:"-"` // the chosen one, then the best others
}

// PastCandidate is a candidate of a past choice.
type PastCandidate struct {
	Dial string
	kvscore.Candidate
}

// Choices are the last choices of a pool.
type Choices struct {
	mu   sync.Mutex
	ring [keptChoices]*PastChoice // by number; those that were not needed yet are nil
	n    uint64
}

// Remember remembers a copy of a choice.
func (r *Choices) Remember(c *PastChoice) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.n++
	c.N = r.n
	kept := &r.ring[r.n%keptChoices]
	if *kept == nil {
		*kept = new(PastChoice)
	}
	list := append((*kept).Candidates[:0], c.Candidates...)
	**kept = *c
	(*kept).Candidates = list
}

// Past returns the newest choices, the newest first, at most most. If request is not empty, they are
// those for that request; if number is not 0, it is the one with that number.
func (r *Choices) Past(most int, request string, number uint64) (list []PastChoice) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for n := r.n; n > 0 && n+keptChoices > r.n && len(list) < most; n-- {
		if c := *r.ring[n%keptChoices]; (request == "" || c.Request == request) && (number == 0 || c.N == number) {
			c.Candidates = slices.Clone(c.Candidates)
			list = append(list, c)
		}
	}
	return list
}

// Note adds the kept candidates of a selection: the chosen one, and those with the lowest cost. dial
// returns a candidate's address.
func (c *PastChoice) Note(sel []kvscore.Candidate, dial func(i int) string, chosen int) {
	rank := func(i int) float64 {
		if c.Unit == "" {
			return sel[i].TTFT()
		}
		return sel[i].Cost
	}
	var best [keptCandidates]int
	n := 1
	best[0] = chosen
	for i := range sel {
		if i == chosen {
			continue
		}
		at := n
		for at > 1 && rank(i) < rank(best[at-1]) {
			at--
		}
		if at == keptCandidates {
			continue
		}
		n = min(n+1, keptCandidates)
		copy(best[at+1:n], best[at:])
		best[at] = i
	}
	for _, i := range best[:n] {
		c.Candidates = append(c.Candidates, PastCandidate{dial(i), sel[i]})
	}
	c.CandidateCount = len(sel)
}
