// Package batch is continuous batching in virtual time. It has a queue of
// waiting requests, a set of running ones, and steps that each compute at most a
// budget of tokens. It follows vLLM's scheduler, but for one thing: blocks are
// reserved for prompt and answer when a request is admitted, so none is ever
// preempted. It has no goroutine and no clock, and is not safe for concurrent
// use.
package batch

import (
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine/cache"
)

// Request is one prompt with the answer that it will get. The cache must have room for both.
type Request struct {
	Prompt *cache.Prompt
	// Answer is the tokens that will be generated, at least one.
	Answer []uint32
	// Arrived is when the request came, on the caller's clock. No earlier step has it.
	Arrived time.Duration
	// Drag makes each step that this request takes part in last so many times
	// longer. Less than 1 counts as 1.
	Drag float64
	// Slot keeps the request's KV when it ends, for a longer prompt. One request at
	// a time has it. The prompt begins with what the slot holds. nil: none.
	Slot *Slot
	// Loaded is for how many of the prompt's tokens the KV came from another engine. The last
	// one is computed in any case.
	Loaded int
	// Owner is what the caller has the request for.
	Owner any

	seq       *cache.Seq // nil while waiting
	kept      bool       // seq was in the slot: nobody else finds its blocks
	computed  int        // tokens whose KV is there when the current step has ended
	generated int        // tokens of the answer
	inStep    bool
}

// blockTokens returns for how many tokens a request needs KV. The last one
// generated needs none, unless a session goes on behind it.
func (r *Request) blockTokens() int {
	n := len(r.Prompt.Tokens) + len(r.Answer)
	if r.Slot == nil {
		n--
	}
	return n
}

// Event is something that happened to a request.
type Event struct {
	Request *Request
	// Tokens is how many tokens of the answer there are. If it is 0, the request left the queue and
	// its prefill begins; Cached is then the prompt's cached tokens.
	Tokens, Cached int
}

// Last returns whether the answer is complete: nothing follows for this request.
func (e *Event) Last() bool { return e.Tokens == len(e.Request.Answer) }

// Config is a batcher's limits.
type Config struct {
	// TokenBudget is the most tokens that a step computes.
	TokenBudget int
	// MaxRunning is the most requests that run at once.
	MaxRunning int
	Step       StepModel
	// Late has others find a prompt's blocks when its prefill has ended, and those of
	// the answer when it has ended, as in SGLang. Default: while they are computed.
	Late bool
}

// Batcher runs requests on one cache.
type Batcher struct {
	cfg     Config
	cache   *cache.Cache
	waiting []*Request // first in, first out
	running []*Request // in order of admission
	events  []Event
	// The step under way; 0 if there is none.
	stepTime time.Duration
}

// New returns a batcher without requests.
func New(cfg Config, c *cache.Cache) *Batcher { return &Batcher{cfg: cfg, cache: c} }

// Submit puts a request at the end of the queue. Requests are submitted in the order in which
// they arrived.
func (b *Batcher) Submit(r *Request) { b.waiting = append(b.waiting, r) }

// Abort ends a request, whether it waits or runs, and says whether it was there.
// Its blocks are free at once, and those that the step under way computes stay
// cached; the step itself is not cut short.
func (b *Batcher) Abort(r *Request) bool {
	if i := slices.Index(b.waiting, r); i >= 0 {
		b.waiting = slices.Delete(b.waiting, i, i+1)
		return true
	}
	i := slices.Index(b.running, r)
	if i < 0 {
		return false
	}
	b.running = slices.Delete(b.running, i, i+1)
	if b.cfg.Late {
		r.extend()
	}
	r.seq.Close()
	if r.Slot != nil {
		*r.Slot = Slot{}
	}
	return true
}

// Running returns how many requests were admitted and have not ended.
func (b *Batcher) Running() int { return len(b.running) }

// Waiting returns how many requests are in the queue, and the tokens of their prompts.
func (b *Batcher) Waiting() (requests, tokens int) {
	for _, r := range b.waiting {
		tokens += len(r.Prompt.Tokens)
	}
	return len(b.waiting), tokens
}

// Next returns when the first of the queue arrived; false if the queue is empty.
func (b *Batcher) Next() (time.Duration, bool) {
	if len(b.waiting) == 0 {
		return 0, false
	}
	return b.waiting[0].Arrived, true
}

// NextStepDuration returns how long the step that is under way takes from its
// begin to its end; 0 when there is none.
func (b *Batcher) NextStepDuration() time.Duration { return b.stepTime }

// Step ends the step that is under way, if there is one, and begins the next. It
// returns what happened, in order; the slice is valid until the next call.
func (b *Batcher) Step(now time.Duration) []Event {
	b.events = b.events[:0]
	b.running = slices.DeleteFunc(b.running, b.end)
	b.begin(now)
	return b.events
}

// end gives a request of the step a token if its prompt is computed. It returns whether that was the
// last one.
func (b *Batcher) end(r *Request) bool {
	had := r.inStep
	r.inStep = false
	if !had || r.computed < len(r.Prompt.Tokens) {
		return false
	}
	r.generated++
	if b.cfg.Late && r.generated == 1 && !r.kept {
		r.seq.Book(len(r.Prompt.Tokens))
	}
	ev := Event{Request: r, Tokens: r.generated}
	b.events = append(b.events, ev)
	if !ev.Last() {
		return false
	}
	if b.cfg.Late {
		r.extend()
	}
	r.leave()
	return true
}

// begin fills the budget: first with the running requests, then with waiting
// ones as long as there is room for them.
func (b *Batcher) begin(now time.Duration) {
	var w work
	for _, r := range b.running {
		b.schedule(r, &w)
	}
	for len(b.running) < b.cfg.MaxRunning && w.tokens < b.cfg.TokenBudget {
		at, ok := b.Next()
		if !ok || at > now || !b.waiting[0].enter(b.cache) {
			break
		}
		r := b.waiting[0]
		b.waiting[0] = nil
		b.waiting = b.waiting[1:]
		b.running = append(b.running, r)
		b.events = append(b.events, Event{Request: r, Cached: r.computed})
		b.schedule(r, &w)
	}
	b.stepTime = b.cfg.Step.duration(w)
}

// schedule gives a request what is left of the budget, as much as it can use.
func (b *Batcher) schedule(r *Request, w *work) {
	left := b.cfg.TokenBudget - w.tokens
	if left == 0 {
		return
	}
	r.inStep = true
	w.drag = max(w.drag, r.Drag)
	if r.generated > 0 {
		if r.Slot == nil && !b.cfg.Late {
			r.seq.Append(r.Answer[r.generated-1])
		}
		w.decode(r.computed)
		r.computed++
		return
	}
	n := min(left, len(r.Prompt.Tokens)-r.computed)
	w.prefill(r.computed, n)
	r.computed += n
	if !r.kept && !b.cfg.Late {
		r.seq.Book(r.computed)
	}
}

// extend books what was generated of the answer, but for the last token.
func (r *Request) extend() {
	if r.generated > 1 && r.Slot == nil {
		r.seq.Append(r.Answer[:r.generated-1]...)
	}
}
