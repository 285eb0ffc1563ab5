package cache

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/approx"
)

// Ticket is one request's use of a target's cache. [Caches.Book] fills it in, and it must stay
// where it is until its End.
type Ticket struct {
	slot     *Slot
	losses   uint64 // of the slot
	ref      approx.Ref
	chain    approx.Chain // without its blocks
	blocks   int          // of the prompt
	tracked  int          // of these, blocks that there was room for
	held     int          // of these, blocks that the cache model held
	mediaEnd int
	estimate int64 // tokens of the prompt, from its text alone
	booked   uint64
	shared   int64   // tokens of what was held that active requests used
	lesson   *lesson // nil if there is nothing to learn
	// fed says that events name the blocks, and hitsLate that the engine reuses none before the first token.
	fed, hitsLate bool
}

// Book records that the prompt is sent to a target. The target counts as holding it from now on.
// v is a recent view of the prompt.
func (c *Caches) Book(now time.Time, t *Ticket, s *Slot, p *Prompt, v *View) {
	o := v.Of(s)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tell(now)
	*t = Ticket{
		slot: s, losses: s.losses, chain: p.chain(), blocks: len(p.Blocks), held: o.HeldBlocks,
		mediaEnd: p.MediaEnd, estimate: p.Tokens - p.OtherTokens, shared: int64(o.SharedBlocks * float64(c.blockSize)),
	}
	t.booked = c.sent.Now() + 1
	t.ref, t.tracked = c.sent.Acquire(s.number, &t.chain, v.sent.Blocks)
	t.chain.Blocks = nil // the request's own
	f := s.feed.Load()
	switch l, info := v.look(f); {
	case l == nil || t.blocks == 0:
	case l.isText:
		c.learner.begin(now, t, p, l, f, info)
	default:
		t.fed, t.hitsLate = true, !info.HitsInFlight
	}
}

// Untracked returns the share of the prompt's blocks for which there was no room. If active
// requests share them, the slot does not know it.
func (t *Ticket) Untracked() float64 {
	if t.tracked == t.blocks {
		return 0
	}
	return float64(t.blocks-t.tracked) / float64(t.blocks)
}

// Current returns whether the target has not lost its cache since the booking.
func (t *Ticket) Current() bool {
	t.slot.caches.mu.RLock()
	defer t.slot.caches.mu.RUnlock()
	return t.losses == t.slot.losses
}

// Booked returns when the ticket was booked, as a number that grows with each use of a block.
func (t *Ticket) Booked() uint64 { return t.booked }

// Shared returns the tokens of what the target held that active requests used when the ticket was booked.
func (t *Ticket) Shared() int64 { return t.shared }

// Last is when the target last used what it held of the prompt, before the ticket.
type Last struct {
	Used uint64 // as [Ticket.Booked]; 0 if it held nothing
	// Newer is how many tokens the target has used since, each once. An engine that still has what it
	// used then has room for more. One that has evicted it has no room for more.
	Newer int64
	// Lost says that the target has lost what it used then, and Recalled that an earlier run of the
	// router has recalled it.
	Lost, Recalled bool
}

// Last returns when the target last used what it held of the prompt.
func (t *Ticket) Last() Last {
	c, s, at := t.slot.caches, t.slot, t.ref.Last()
	c.mu.RLock()
	defer c.mu.RUnlock()
	return Last{Used: at.Touched, Newer: at.Newer, Lost: at.Touched < s.lost, Recalled: at.Touched < s.recalled}
}

// Computed records that the engine has computed the prompt.
func (t *Ticket) Computed(now time.Time) {
	if t.lesson != nil {
		t.lesson.first = now
	}
	if t.fed && t.hitsLate {
		c := t.slot.caches
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.tell(now); t.losses == t.slot.losses {
			c.awaitEvents(now, t, nil)
		}
	}
}

// Named says by which session the engine's events will name the prompt's blocks. It returns whether the
// ticket has a use for that.
func (t *Ticket) Named(session string) bool {
	if t.lesson != nil {
		t.lesson.session = SessionHash(session)
	}
	return t.lesson != nil
}

// End ends the ticket, and returns whether the target has computed the prompt and not lost its blocks since.
//   - last is the last sign of life of the ticket's request.
//   - computed says that the target has computed the prompt.
//   - answer is the full blocks of prompt and answer, as in [Prompt]; nil is unknown.
func (t *Ticket) End(last time.Time, computed bool, answer []uint64, n Counts) (kept bool) {
	s := t.slot
	c := s.caches
	c.mu.Lock()
	defer c.mu.Unlock()
	counted := n
	if kept = computed && t.losses == s.losses; kept {
		c.recordCounts(t, &n)
	}
	if t.lesson != nil {
		counted.Prompt = Believable(counted.Prompt, t.estimate)
		c.learn(t, kept, answer, &counted)
	}
	if t.fed && kept {
		c.awaitEvents(last, t, answer)
	}
	c.sent.Release(t.ref, kept)
	if kept && len(answer) > 0 {
		c.touch(t, answer, &n)
	}
	return kept
}

// Behind returns the blocks of an answer behind those of the prompt.
func (t *Ticket) Behind(answer []uint64) []uint64 { return answer[min(t.blocks, len(answer)):] }

// Counts are an engine's token counts of a prompt and its answer; 0 is unknown.
type Counts struct {
	// Prompt is the number of prompt tokens.
	Prompt int64
	// Cached is the number of prompt tokens that the engine had cached. CachedReported says
	// that the engine reported it, even if it is 0.
	Cached         int64
	CachedReported bool
	// Answer is the number of tokens that the engine holds at the end of the answer,
	// including the prompt. It excludes the last token, which the engine need not compute.
	Answer int64
	// AnswerPast is the part of prompt and answer after the last of the blocks that End
	// gets, in blocks.
	AnswerPast float32
}

// maxCount is the greatest believable factor between an engine's count and the estimate.
const maxCount = 8

// Believable returns a count of tokens, or 0 if it is too far from the estimate.
func Believable(count, estimate int64) int64 {
	if count > maxCount*estimate+64 || count < estimate/maxCount {
		return 0
	}
	return count
}

// recordCounts puts an engine's counts into the index. The index knows the length of a
// prompt of token ids. An image that ends after the last full block is not in the chain.
func (c *Caches) recordCounts(t *Ticket, n *Counts) {
	prompt := Believable(n.Prompt, t.estimate)
	if t.tracked != t.blocks || t.chain.Weights.Kinds == nil || prompt == 0 {
		n.Prompt, n.Answer = 0, 0
		return
	}
	if n.Cached > 0 && t.lesson == nil { // else other clients' requests may be part of it
		c.sent.RecordCached(t.ref, t.held, float64(n.Cached)+float64(t.slot.Page())/2)
	}
	if t.mediaEnd <= t.blocks {
		c.sent.RecordCount(t.ref, &t.chain, prompt)
	}
}

// touch records that the target holds prompt and answer.
func (c *Caches) touch(t *Ticket, answer []uint64, n *Counts) {
	t.chain.Blocks, t.chain.Past = answer, n.AnswerPast
	tokens := int64(0)
	if t.mediaEnd <= len(answer) && n.Answer > 0 {
		more := t.chain.Weights.Sum(answer[min(t.blocks, len(answer)):]) / 1000
		tokens = Believable(n.Answer, t.estimate+more)
	}
	c.sent.Touch(t.slot.number, &t.chain, tokens, -1)
	t.chain.Blocks = nil
}
