// Package batch is continuous batching in virtual time. It has a queue of
// waiting requests, a set of running ones, and steps that each compute at most a
// budget of tokens. It follows vLLM's scheduler, but for one thing: blocks are
// reserved for prompt and answer when a request is admitted, so none is ever
// preempted. It has no goroutine and no clock, and is not safe for concurrent
// use.
package batch

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine/cache"
)

// Request is one prompt with the answer that it will get.
type Request struct {
	// ID is the caller's, and not that of any other request that is under way.
	ID     uint64
	Prompt *cache.Prompt
	// Answer is the tokens that will be generated, at least one.
	Answer []uint32
	// Drag makes each step that this request takes part in last so many times
	// longer. Less than 1 counts as 1.
	Drag float64
	// Slot keeps the request's KV when it ends, for a longer prompt. One request at
	// a time has it. The prompt begins with what the slot holds. nil: none.
	Slot *Slot
	// Loaded is for how many of the prompt's tokens the KV came from another engine. The last
	// one is computed in any case.
	Loaded int
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

// Kind is what an Event tells.
type Kind int

const (
	// Admitted is that a request left the queue and its prefill begins.
	Admitted Kind = iota
	// Token is that a token of the answer was generated.
	Token
)

// Event is something that happened to a request.
type Event struct {
	Kind    Kind
	Request *Request
	// At is when, on the caller's clock.
	At time.Duration
	// Cached is the prompt's cached tokens, with Admitted.
	Cached int
	// Index is which token of the answer it was, with Token.
	Index int
	// Last says that the answer is complete; nothing follows for this request.
	Last bool
}

// Config is a batcher's limits.
type Config struct {
	// TokenBudget is the most tokens that a step computes.
	TokenBudget int
	// MaxRunning is the most requests that run at once, at most TokenBudget.
	MaxRunning int
	Step       StepModel
	// Late has others find a prompt's blocks when its prefill has ended, and those of
	// the answer when it has ended, as in SGLang. Default: while they are computed.
	Late bool
}

// Errors that Submit returns.
var (
	ErrTooLarge  = errors.New("request needs more blocks than there are")
	ErrEmpty     = errors.New("request without a prompt or an answer")
	ErrDuplicate = errors.New("request with this id is under way")
)

// entry is a request in the batcher.
type entry struct {
	*Request
	seq       *cache.Seq // nil while waiting
	kept      bool       // seq was in the slot: nobody else finds its blocks
	computed  int        // tokens whose KV is there when the current step has ended
	generated int        // tokens of the answer
	inStep    bool
}

// Batcher runs requests on one cache.
type Batcher struct {
	cfg     Config
	cache   *cache.Cache
	waiting []*entry // first in, first out
	running []*entry // in order of admission
	byID    map[uint64]*entry
	events  []Event
	// The step under way; 0 if there is none.
	stepTime time.Duration
	// The cache's version when it had no room for the first in the queue.
	full    bool
	version uint64
}

// New returns a batcher without requests.
func New(cfg Config, c *cache.Cache) (*Batcher, error) {
	if cfg.MaxRunning < 1 || cfg.TokenBudget < cfg.MaxRunning {
		return nil, fmt.Errorf("token budget %d is less than the %d requests that may run", cfg.TokenBudget, cfg.MaxRunning)
	}
	return &Batcher{cfg: cfg, cache: c, byID: make(map[uint64]*entry)}, nil
}

// Submit puts a request at the end of the queue. It is looked at when the next
// step begins.
func (b *Batcher) Submit(r *Request) error {
	switch {
	case len(r.Prompt.Tokens) == 0 || len(r.Answer) == 0:
		return ErrEmpty
	case b.cache.BlocksFor(r.blockTokens()) > b.cache.Blocks():
		return ErrTooLarge
	case b.byID[r.ID] != nil:
		return ErrDuplicate
	}
	e := &entry{Request: r}
	b.byID[r.ID] = e
	b.waiting = append(b.waiting, e)
	return nil
}

// Abort ends a request, whether it waits or runs, and says whether it was there.
// Its blocks are free at once, and those that the step under way computes stay
// cached; the step itself is not cut short.
func (b *Batcher) Abort(id uint64) bool {
	e := b.byID[id]
	if e == nil {
		return false
	}
	delete(b.byID, id)
	if e.seq == nil {
		i := slices.Index(b.waiting, e)
		b.waiting = slices.Delete(b.waiting, i, i+1)
		b.full = b.full && i > 0
		return true
	}
	if b.cfg.Late {
		e.extend()
	}
	e.seq.Close()
	if e.Slot != nil {
		*e.Slot = Slot{}
	}
	i := slices.Index(b.running, e)
	b.running = slices.Delete(b.running, i, i+1)
	return true
}

// Running returns how many requests were admitted and have not ended.
func (b *Batcher) Running() int { return len(b.running) }

// Waiting returns how many requests are in the queue.
func (b *Batcher) Waiting() int { return len(b.waiting) }

// NextStepDuration returns how long the step that is under way takes from its
// begin to its end; 0 when there is none.
func (b *Batcher) NextStepDuration() time.Duration { return b.stepTime }

// Step ends the step that is under way, if there is one, and begins the next. It
// returns what happened, in order; the slice is valid until the next call.
func (b *Batcher) Step(now time.Duration) []Event {
	b.events = b.events[:0]
	b.end(now)
	b.begin(now)
	return b.events
}

// end gives each request of the step whose prompt is computed a token.
func (b *Batcher) end(now time.Duration) {
	kept := b.running[:0]
	for _, e := range b.running {
		if e.inStep && e.computed >= len(e.Prompt.Tokens) {
			e.generated++
			if b.cfg.Late {
				e.bookLate()
			}
			last := e.generated == len(e.Answer)
			b.events = append(b.events, Event{Kind: Token, Request: e.Request, At: now, Index: e.generated - 1, Last: last})
			if last {
				e.leave()
				delete(b.byID, e.ID)
				continue
			}
		}
		e.inStep = false
		kept = append(kept, e)
	}
	clear(b.running[len(kept):])
	b.running = kept
	b.stepTime = 0
}

// begin fills the budget: first with the running requests, then with waiting
// ones as long as there is room for them.
func (b *Batcher) begin(now time.Duration) {
	var w work
	for _, e := range b.running {
		b.schedule(e, &w)
	}
	for len(b.waiting) > 0 && len(b.running) < b.cfg.MaxRunning && w.tokens < b.cfg.TokenBudget {
		if b.full && b.version == b.cache.Version() {
			break
		}
		e := b.waiting[0]
		ok := e.enter(b.cache)
		if b.full, b.version = !ok, b.cache.Version(); !ok {
			break
		}
		b.waiting[0] = nil
		b.waiting = b.waiting[1:]
		b.running = append(b.running, e)
		b.events = append(b.events, Event{Kind: Admitted, Request: e.Request, At: now, Cached: e.computed})
		b.schedule(e, &w)
	}
	b.stepTime = b.cfg.Step.duration(w)
}

// schedule gives a request what is left of the budget, as much as it can use.
func (b *Batcher) schedule(e *entry, w *work) {
	left := b.cfg.TokenBudget - w.tokens
	if left == 0 {
		return
	}
	e.inStep = true
	w.drag = max(w.drag, e.Drag)
	if e.generated > 0 {
		if e.Slot == nil && !b.cfg.Late {
			e.seq.Append(e.Answer[e.generated-1])
		}
		w.decode(e.computed)
		e.computed++
		return
	}
	n := min(left, len(e.Prompt.Tokens)-e.computed)
	w.prefill(e.computed, n)
	e.computed += n
	if !e.kept && !b.cfg.Late {
		e.seq.Book(e.computed)
	}
}

// bookLate books the prompt with the first token, and the answer with the last.
func (e *entry) bookLate() {
	if e.generated == 1 && !e.kept {
		e.seq.Book(len(e.Prompt.Tokens))
	}
	if e.generated == len(e.Answer) {
		e.extend()
	}
}

// extend books what was generated of the answer, but for the last token.
func (e *entry) extend() {
	if e.generated > 1 && e.Slot == nil {
		e.seq.Extend(e.Answer[:e.generated-1])
	}
}
