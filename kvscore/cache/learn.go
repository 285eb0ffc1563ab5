package cache

import (
	"slices"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/exact"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/textmap"
)

// learner finds out which token blocks engines make of texts. An engine's events name the blocks that
// it stores while it works on a prompt, and its counts say how many these must be. If exactly one chain
// of stored blocks fits, it is the prompt's: with all events, the right one is always among them.
type learner struct {
	exact *exact.Index
	texts *textmap.Map

	mu      sync.Mutex // guards what follows, and what feeds log
	now     time.Time  // the latest that tell has noted
	waiting []*lesson  // in the order of their times
	learned Lessons
}

// Lessons counts finished prompts of text, by what the router has learned of their token blocks.
type Lessons struct {
	// Whole counts prompts that were learned with their answers, Prompts those without.
	Whole   uint64 `json:"with_answer"`
	Prompts uint64 `json:"prompt_only"`
	// Uncounted counts prompts whose length the engine has not reported. Unseen counts those for which
	// no event fits, as of prompts that were cached, and Ambiguous those for which several do.
	Uncounted uint64 `json:"uncounted"`
	Unseen    uint64 `json:"unseen"`
	Ambiguous uint64 `json:"ambiguous"`
	// Contradictions counts prompts whose tokens were not those that the router took for certain.
	Contradictions uint64 `json:"contradictions"`
}

// lesson is what a prompt of text can teach.
type lesson struct {
	feed           *Feed
	root           uint64 // of the identity
	size           int    // of a token block
	hitsInFlight   bool
	session        uint64 // that the events name; 0 is unknown
	booked, first  time.Time
	text           textmap.Text
	head           Head
	prompt         int // blocks of the text that are the prompt's
	past           float64
	counts         Counts
	again          time.Time
	last, answered bool
}

const (
	// settled is how long the router waits for events after the first token, and after the end.
	settled = 100 * time.Millisecond
	// eventsLate is how late events may be.
	eventsLate = time.Second
	// maxLessons bounds the prompts that wait for events. maxMarks and maxBlocks bound what a feed logs for
	// these.
	maxLessons, maxMarks, maxBlocks = 1024, 16 << 10, 512 << 10
)

// growth is a chain of blocks that an engine has stored, event by event.
type growth struct {
	tip     uint64 // the engine's name of the last block
	root    uint64
	session uint64
	blocks  []uint64 // the whole chain; the engine may evict it soon
	marks   []mark   // where events begin and end
	claimed int      // a lesson has learned the blocks before
}

// mark is a border between the events of a growth.
type mark struct {
	depth int // blocks before
	at    time.Time
}

// growths are what a feed has stored while prompts of text were under way.
type growths struct {
	open   int // lessons
	ends   map[uint64]*growth
	list   []*growth // by age
	size   int       // marks in all
	blocks int       // in all
	lost   time.Time // when some were last forgotten: prompts from before may miss their own
}

func (g *growths) clear() { g.ends, g.list, g.size, g.blocks = nil, nil, 0, 0 }

// size returns what was learned, and the memory that it takes.
func (l *learner) size() (Lessons, int64) {
	texts := l.texts.Size()
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.learned
	n.Contradictions = texts.Contradictions
	return n, texts.Bytes
}

// mark returns the position of the mark at a depth, or -1.
func (g *growth) mark(depth int) int {
	return slices.IndexFunc(g.marks, func(m mark) bool { return m.depth == depth })
}

// begin opens a lesson if there is something to learn of a prompt on a target with a feed.
func (l *learner) begin(now time.Time, t *Ticket, p *Prompt, of *look, f *Feed, info *FeedInfo) {
	t.lesson = &lesson{
		feed: f, root: of.id.Root, size: info.BlockTokens, hitsInFlight: info.HitsInFlight, booked: now, prompt: len(p.Blocks), head: p.Head, past: float64(p.Past),
		text: textmap.Text{Root: textRoot(p.Root, info.BlockTokens), Weights: p.Weights, BlockTokens: info.BlockTokens},
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	f.growths.open++
	f.learns.Store(true)
}

func textRoot(root uint64, blockTokens int) uint64 {
	return root ^ Mix(uint64(blockTokens)) //nolint:gosec // not negative
}

// log notes what an engine has stored, while prompts of text are under way.
func (l *learner) log(f *Feed, b *Stored, n int) {
	if n == 0 || b.Tier != Device || b.Blocks == nil || !f.learns.Load() {
		return
	}
	session := SessionHash(b.Session)
	l.mu.Lock()
	defer l.mu.Unlock()
	s := &f.growths
	var from *growth
	if b.HasParent {
		from = s.ends[b.Parent]
	}
	g, depth := from, 0
	if g != nil && g.tip == b.Parent && g.session == session {
		depth = len(g.blocks)
	} else {
		g = &growth{root: b.Root, session: session}
		if b.HasParent {
			g.root, g.blocks = l.exact.Chain(nil, b.Parent)
			if depth = len(g.blocks); depth == 0 {
				return
			}
		}
		if from == nil || from.mark(depth) < 0 {
			g.marks = append(g.marks, mark{depth, l.now})
		} else { // others may have gone on from there: each of the two may be any of them
			g.marks = append(g.marks, from.marks[:from.mark(depth)+1]...)
		}
		s.list = append(s.list, g)
		s.size += len(g.marks)
		s.blocks += depth
	}
	g.blocks = append(g.blocks, b.Blocks[:n]...)
	s.blocks += n
	g.tip = b.Names[n-1]
	g.marks = append(g.marks, mark{depth + n, l.now})
	if s.size++; s.ends == nil {
		s.ends = make(map[uint64]*growth)
	}
	s.ends[g.tip] = g
	for (s.size > maxMarks || s.blocks > maxBlocks) && len(s.list) > 1 {
		s.lost = l.now
		s.size -= len(s.list[0].marks)
		s.blocks -= len(s.list[0].blocks)
		s.list = slices.Delete(s.list, 0, 1)
	}
	if len(s.ends) > 2*maxMarks {
		s.ends = map[uint64]*growth{g.tip: g}
	}
}

// learn ends a ticket's lesson.
func (c *Caches) learn(t *Ticket, kept bool, answer []uint64, n *Counts) {
	switch l := &c.learner; {
	case !kept || t.lesson.feed.closed:
		l.drop(t.lesson)
	case len(answer) >= t.blocks:
		l.end(t, answer, n, true)
	case t.tracked != t.blocks: // its text is not known any more
		l.drop(t.lesson)
	default:
		l.end(t, t.ref.Blocks(nil, t.blocks), n, false)
	}
}

// end takes what a prompt that has been computed can teach. blocks are its text, with the answer if that
// is known.
func (l *learner) end(t *Ticket, blocks []uint64, n *Counts, answered bool) {
	o := t.lesson
	t.lesson = nil
	l.mu.Lock()
	defer l.mu.Unlock()
	if o.first.IsZero() {
		o.first = l.now
	}
	o.text.Blocks, o.counts, o.answered = o.head.out(blocks, new([]uint64)), *n, answered
	if o.counts.Prompt == 0 {
		l.learned.Uncounted++
	}
	if o.counts.Prompt < int64(o.size) {
		o.close()
		return
	}
	if l.now.Sub(o.first) >= settled && l.try(o) {
		return
	}
	o.text.Blocks = slices.Clone(o.text.Blocks) // the caller's own
	o.again = l.now.Add(settled)
	l.wait(o)
}

// reset forgets what a feed has stored.
func (l *learner) reset(f *Feed) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f.growths.clear()
	f.growths.lost = l.now
}

// drop forgets a lesson.
func (l *learner) drop(o *lesson) {
	l.mu.Lock()
	defer l.mu.Unlock()
	o.close()
}

// close ends a lesson. The lock is held, as in all functions below.
func (o *lesson) close() {
	g := &o.feed.growths
	if g.open--; g.open == 0 {
		g.clear()
		o.feed.learns.Store(false)
	}
}

func (l *learner) wait(o *lesson) {
	at, _ := slices.BinarySearchFunc(l.waiting, o, func(a, b *lesson) int { return a.again.Compare(b.again) })
	l.waiting = slices.Insert(l.waiting, at, o)
	if len(l.waiting) > maxLessons {
		l.waiting[0].last = true
		l.try(l.waiting[0])
		l.waiting = slices.Delete(l.waiting, 0, 1)
	}
}

// tell notes the time, and tries the lessons again for which events should have come by now.
func (l *learner) tell(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.After(l.now) {
		l.now = now
	}
	for len(l.waiting) > 0 && !l.waiting[0].again.After(l.now) {
		o := l.waiting[0]
		l.waiting = slices.Delete(l.waiting, 0, 1)
		if !l.try(o) {
			o.again, o.last = l.now.Add(eventsLate), true
			l.wait(o)
		}
	}
}

// try tries a lesson. It returns false if it should be tried again.
func (l *learner) try(o *lesson) (over bool) {
	if !l.teach(o) {
		return false
	}
	o.close()
	return true
}

// teach learns what a lesson teaches. It returns false if events may be missing.
func (l *learner) teach(o *lesson) (over bool) {
	prompt, whole := int(o.counts.Prompt)/o.size, int(o.counts.Answer)/o.size
	answered := o.answered && o.counts.Answer >= o.counts.Prompt
	if !o.booked.After(o.feed.growths.lost) {
		l.learned.Unseen++
		return true
	}
	fit := l.fitting(o, prompt)
	if at := func(g *growth) bool { return g.mark(whole) >= 0 }; answered && len(fit) > 1 && slices.ContainsFunc(fit, at) {
		fit = slices.DeleteFunc(fit, func(g *growth) bool { return !at(g) })
	}
	chain := common(fit, prompt)
	answered = answered && len(fit) == 1 && fit[0].mark(whole) >= 0 && len(chain) >= whole
	switch {
	case !o.last && (chain == nil || o.answered && !answered):
		return false
	case len(fit) == 0:
		l.learned.Unseen++
		return true
	case chain == nil:
		l.learned.Ambiguous++
		return true
	}
	text := o.text
	text.Blocks = o.text.Blocks[:o.prompt]
	l.texts.Learn(&text, o.past, chain[:prompt], o.counts.Prompt)
	fit[0].claimed = prompt
	if !answered {
		l.learned.Prompts++
		return true
	}
	l.learned.Whole++
	fit[0].claimed = whole
	l.texts.Learn(&o.text, float64(o.counts.AnswerPast), chain[:whole], o.counts.Answer)
	return true
}

// common returns the blocks of growths that are equal for as long as a prompt; nil if they differ.
func common(of []*growth, prompt int) (chain []uint64) {
	for _, g := range of {
		if chain != nil && !slices.Equal(chain[:prompt], g.blocks[:prompt]) {
			return nil
		}
		chain = g.blocks
	}
	return chain
}

// fitting returns what a feed's target has stored that may be the prompt's, which has some full blocks.
func (l *learner) fitting(o *lesson, prompt int) (fit []*growth) {
	cached := -1
	if o.counts.CachedReported {
		cached = int(o.counts.Cached) / o.size
	}
	named := false
	for _, g := range o.feed.growths.list {
		i := g.mark(prompt)
		if i < 0 || g.root != o.root || g.claimed >= prompt || g.session != 0 && o.session != 0 && g.session != o.session {
			continue
		}
		switch next := i + 1; {
		case cached == prompt && (next == len(g.marks) || g.marks[next].at.Before(o.booked)):
		case cached != prompt && (g.marks[i].at.Before(o.booked) || i > 0 && g.marks[i].at.Sub(o.first) > eventsLate):
		case o.hitsInFlight && cached >= 0 && g.mark(cached) < 0: // others store less than they compute
		default:
			fit = append(fit, g)
			named = named || g.session != 0 && g.session == o.session
		}
	}
	if named {
		fit = slices.DeleteFunc(fit, func(g *growth) bool { return g.session != o.session })
	}
	return fit
}
