package cache

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/zeebo/xxh3"
)

const tokenBlock, textBlock = 16, 64

// words returns the token ids of a text. What follows a text may change its last token, as with real
// tokenizers.
func words(text []byte) (ids []uint32) {
	from := 0
	for i := 1; i <= len(text); i++ {
		if i == len(text) || (uint(text[i-1])*31+uint(text[i])*17)%4 == 0 {
			ids = append(ids, uint32(xxh3.Hash(text[from:i])))
			from = i
		}
	}
	return ids
}

// texts makes prompts of text.
type texts struct {
	hash  TokenHash
	kinds [Kinds]int32
	head  int // blocks of each text
}

func newTexts() *texts {
	s := &texts{hash: TokenHash(1)}
	for i := range s.kinds {
		s.kinds[i] = 13_000
	}
	return s
}

func (s *texts) blocks(text []byte) (blocks []uint64, past float32) {
	for ; len(text) >= textBlock; text = text[textBlock:] {
		blocks = append(blocks, xxh3.Hash(text[:textBlock])&^KindMask)
	}
	head := s.headOf(blocks)
	for i := range head.Blocks {
		blocks[i] ^= head.Key
	}
	return blocks, float32(len(text)) / textBlock
}

func (s *texts) headOf(blocks []uint64) (h Head) {
	for _, b := range blocks[:s.head] {
		h.Key = Mix(h.Key ^ b)
	}
	return Head{h.Key &^ KindMask, s.head}
}

func (s *texts) prompt(text []byte, salt string) *Prompt {
	p := &Prompt{
		Root: 5 + xxh3.HashString(salt), Weights: Weights{Kinds: &s.kinds}, BlockTokens: 13, Tokens: int64(len(text)) * 13 / textBlock,
		Identities: []Identity{{BlockTokens: tokenBlock, Root: IdentityRoot(1, tokenBlock, "", salt), Salted: salt != ""}},
	}
	p.Blocks, p.Past = s.blocks(text)
	for n := NextPrefix(0); n <= len(p.Blocks); n = NextPrefix(n) {
		p.Prefixes = append(p.Prefixes, Prefix{n, xxh3.Hash(text[:n*textBlock])})
	}
	if s.head > 0 {
		plain := texts{}
		blocks, _ := plain.blocks(text)
		p.Head = s.headOf(blocks)
	}
	return p
}

func letters(rnd *rand.Rand, n int) []byte {
	text := make([]byte, n)
	for i := range text {
		text[i] = byte(' ' + rnd.IntN(64))
	}
	return text
}

// engine is an engine's prefix cache, whose events come late.
type engine struct {
	t       *testing.T
	feed    *Feed
	slot    *Slot
	room    int
	held    []uint64 // names, the last used last
	content map[uint64]uint64
	parent  map[uint64]uint64
	used    map[uint64]int
	late    []func()
}

func (e *engine) names(root uint64, blocks []uint64) (names []uint64) {
	for _, b := range blocks {
		root = xxh3.Hash(binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, root), b))
		names = append(names, root)
	}
	return names
}

// holds returns how many leading blocks the engine holds.
func (e *engine) holds(names []uint64) (n int) {
	for n < len(names) && slices.Contains(e.held, names[n]) {
		n++
	}
	return n
}

// compute has the engine hold a chain, whose first blocks it holds, and publishes that.
func (e *engine) compute(root uint64, blocks []uint64, session string) {
	names := e.names(root, blocks)
	from := e.holds(names)
	for _, name := range names {
		e.used[name]++
	}
	for len(e.held)+len(names)-from > e.room {
		i := slices.IndexFunc(e.held, func(name uint64) bool { return e.used[name] == 0 })
		if i < 0 {
			e.t.Fatal("there is no room")
		}
		gone := e.held[i]
		e.held = slices.Delete(e.held, i, i+1)
		e.late = append(e.late, func() { e.feed.Removed(Device, []uint64{gone}) })
	}
	e.held = append(e.held, names[from:]...)
	s := &Stored{Root: root, Names: names[from:], Blocks: slices.Clone(blocks[from:]), Session: []byte(session)}
	for i, name := range names {
		e.content[name] = blocks[i]
		if i > 0 {
			e.parent[name] = names[i-1]
		}
	}
	if from > 0 {
		s.Parent, s.HasParent = names[from-1], true
	}
	if from < len(names) {
		e.late = append(e.late, func() { e.feed.Stored(s) })
	}
}

// release ends the use of a chain. Its beginning is evicted last.
func (e *engine) release(names []uint64) {
	for _, name := range slices.Backward(names) {
		e.used[name]--
		if i := slices.Index(e.held, name); i >= 0 {
			e.held = append(slices.Delete(e.held, i, i+1), name)
		}
	}
}

func (e *engine) publish() {
	for _, event := range e.late {
		event()
	}
	e.late = nil
}

// replay has the feed forget what it knows, and repeats what the engine holds.
func (e *engine) replay(root uint64) {
	e.late = nil
	e.feed.Reset()
	var store func(name uint64)
	done := make(map[uint64]bool)
	store = func(name uint64) {
		if done[name] {
			return
		}
		done[name] = true
		s := &Stored{Root: root, Names: []uint64{name}, Blocks: []uint64{e.content[name]}}
		if s.Parent, s.HasParent = e.parent[name]; s.HasParent {
			store(s.Parent)
		}
		if slices.Contains(e.held, name) {
			e.feed.Stored(s)
		}
	}
	for _, name := range e.held {
		store(name)
	}
}

var exactly = FeedInfo{Knowledge: Exact, BlockTokens: tokenBlock, HitsInFlight: true, Salts: true}

// fleet is engines with the caches that know them.
type fleet struct {
	*texts
	t       *testing.T
	caches  *Caches
	engines []*engine
	now     time.Time
}

func newFleet(t *testing.T, room ...int) *fleet {
	f := &fleet{texts: newTexts(), t: t, caches: New(64<<20, tokenBlock), now: time.Unix(1000, 0)}
	for i, n := range room {
		target := Target{Worker: uint64(i)}
		e := &engine{
			t: t, slot: f.caches.Open(target, int64(n*tokenBlock)), feed: f.caches.Feed(target), room: n,
			content: make(map[uint64]uint64), parent: make(map[uint64]uint64), used: make(map[uint64]int),
		}
		e.feed.Describe(exactly)
		f.engines = append(f.engines, e)
	}
	return f
}

// look returns what the caches say of a text on an engine.
func (f *fleet) look(e *engine, text []byte, salt string) Overlap {
	var v View
	f.caches.Look(f.now, f.prompt(text, salt), &v)
	return v.Of(e.slot)
}

// call is a request under way.
type call struct {
	f            *fleet
	e            *engine
	prompt, text []byte
	salt         string
	ticket       *Ticket
	root         uint64
	ids          []uint32
	cached       int
	session      string
}

func (f *fleet) send(e *engine, text []byte, salt string) *call {
	c := &call{f: f, e: e, prompt: text, salt: salt, ticket: new(Ticket), root: IdentityRoot(1, tokenBlock, "", salt), ids: words(text)}
	p, v := f.prompt(text, salt), new(View)
	f.caches.Look(f.now, p, v)
	f.caches.Book(f.now, c.ticket, e.slot, p, v)
	return c
}

// prefill has the engine compute the prompt.
func (c *call) prefill() {
	blocks := c.f.hash.AppendBlocks(nil, c.ids, tokenBlock)
	c.cached = min(c.e.holds(c.e.names(c.root, blocks)), (len(c.ids)-1)/tokenBlock) * tokenBlock
	c.e.compute(c.root, blocks, c.session)
	c.ticket.Computed(c.f.now)
}

// end has the engine answer.
func (c *call) end(answer []byte) {
	c.text = append(slices.Clip(c.prompt), answer...)
	ids := words(c.text)
	blocks := c.f.hash.AppendBlocks(nil, ids, tokenBlock)
	c.e.compute(c.root, blocks, c.session)
	c.e.release(c.e.names(c.root, blocks))
	c.e.release(c.e.names(c.root, c.f.hash.AppendBlocks(nil, c.ids, tokenBlock)))
	n := Counts{Prompt: int64(len(c.ids)), Cached: int64(c.cached), CachedReported: true, Answer: int64(len(ids))}
	text, past := c.f.blocks(c.text)
	n.AnswerPast = past
	c.ticket.End(time.Time{}, true, text, n)
}

// later lets the events come, and the time pass in which the router waits for them.
func (f *fleet) later() {
	for _, e := range f.engines {
		e.publish()
	}
	for range 3 {
		f.now = f.now.Add(eventsLate)
		f.caches.Expire(f.now)
	}
}

// learn sends a text to an engine, and lets the router learn it from the events.
func (f *fleet) learn(e *engine, text []byte) *call {
	c := f.send(e, text, "")
	c.prefill()
	c.end(nil)
	f.later()
	return c
}

func (f *fleet) wants(e *engine, text []byte, salt string, tokens int64, k Knowledge) {
	f.t.Helper()
	if o := f.look(e, text, salt); o.OverlapTokens > tokens || o.OverlapTokens < tokens-2*tokenBlock || o.Knowledge != k {
		f.t.Errorf("overlap is %d tokens (%s), want about %d (%s)", o.OverlapTokens, o.Knowledge, tokens, k)
	}
}

func full(text []byte) int64 { return int64(len(words(text)) / tokenBlock * tokenBlock) }

// TestTextLearnsItsBlocks follows a conversation whose prompts are text.
func TestTextLearnsItsBlocks(t *testing.T) {
	f := newFleet(t, 1000, 1000)
	a, b := f.engines[0], f.engines[1]
	rnd := rand.New(rand.NewPCG(1, 1))
	c := f.send(a, letters(rnd, 4000), "")
	c.prefill()
	c.end(letters(rnd, 1000))
	next := append(slices.Clip(c.text), letters(rnd, 500)...)
	f.wants(a, next, "", full(c.text), Approximate) // no event so far
	f.later()
	f.wants(a, next, "", full(c.text), Learned)
	f.wants(b, next, "", 0, Learned)
	f.wants(a, append(slices.Clip(c.text[:2000]), letters(rnd, 500)...), "", full(c.text[:2000]), Learned)
	f.wants(a, next, "salt", 0, Approximate)

	b.compute(c.root, f.hash.AppendBlocks(nil, words(c.text), tokenBlock), "") // for another router
	f.later()
	f.wants(b, next, "", full(c.text), Learned)

	a.feed.Cleared()
	f.wants(a, next, "", 0, Learned)
	a.held = nil
	again := f.send(a, next, "")
	f.wants(a, next, "", full(c.text), Learned) // it is on its way
	again.ticket.End(f.now, false, nil, Counts{})
	f.wants(a, next, "", 0, Learned)
}

// TestHeads has prompts whose heads have a beginning in common. What the router knows of its own
// requests counts only if the whole head is equal. The tokens say how much of it is shared.
func TestHeads(t *testing.T) {
	f := newFleet(t, 4096)
	f.head = 30
	e, rnd := f.engines[0], rand.New(rand.NewPCG(4, 4))
	system := letters(rnd, 20*textBlock)
	for range 2 {
		c := f.send(e, slices.Concat(system, letters(rnd, 20*textBlock)), "")
		c.prefill()
		c.end(letters(rnd, 100))
		f.later()
	}
	f.wants(e, slices.Concat(system, letters(rnd, 20*textBlock)), "", full(system), Learned)
	f.wants(e, letters(rnd, 40*textBlock), "", 0, Approximate)
}

// TestPromptsAtOnce has several prompts under way on one engine.
func TestPromptsAtOnce(t *testing.T) {
	rnd := rand.New(rand.NewPCG(2, 2))
	stem := letters(rnd, 2000)
	ask := func(n int) []byte { return append(slices.Clip(stem), letters(rnd, n)...) }
	both := func(f *fleet, x, y *call, answers ...int) {
		x.prefill()
		y.prefill()
		x.end(letters(rnd, answers[0]))
		y.end(letters(rnd, answers[1]))
		f.later()
	}
	t.Run("of different lengths", func(t *testing.T) {
		f := newFleet(t, 1000)
		x, y := f.send(f.engines[0], ask(1000), ""), f.send(f.engines[0], ask(1500), "")
		both(f, x, y, 100, 100)
		f.wants(f.engines[0], ask(10), "", full(stem), Learned)
		f.wants(f.engines[0], x.prompt, "", full(x.prompt), Learned)
		f.wants(f.engines[0], y.prompt, "", full(y.prompt), Learned)
	})
	t.Run("of one length", func(t *testing.T) {
		f := newFleet(t, 1000)
		f.engines[0].compute(IdentityRoot(1, tokenBlock, "", ""), f.hash.AppendBlocks(nil, words(stem), tokenBlock), "")
		x := f.send(f.engines[0], ask(1000), "")
		other := ask(1000)
		for len(words(other))/tokenBlock != len(x.ids)/tokenBlock {
			other = ask(1000)
		}
		both(f, x, f.send(f.engines[0], other, ""), 0, 0)
		if l := f.caches.learner.learned; l.Ambiguous == 0 {
			t.Errorf("learned %+v", l)
		}
		f.wants(f.engines[0], x.prompt, "", full(x.prompt), Approximate)
	})
	t.Run("of one length, named by the events", func(t *testing.T) {
		f := newFleet(t, 1000)
		x := f.send(f.engines[0], ask(1000), "")
		y := f.send(f.engines[0], x.prompt[:len(x.prompt)-1], "")
		y.session, x.session = "y", "x"
		x.ticket.Named("x")
		y.ticket.Named("y")
		both(f, x, y, 64, 65)
		f.wants(f.engines[0], x.text, "", full(x.text), Learned)
		f.wants(f.engines[0], y.text, "", full(y.text), Learned)
	})
	t.Run("of a client that bypasses the router", func(t *testing.T) {
		f := newFleet(t, 1000)
		x := f.send(f.engines[0], ask(1000), "")
		foreign := f.hash.AppendBlocks(nil, words(ask(1800)), tokenBlock)
		f.engines[0].compute(x.root, foreign, "")
		x.prefill()
		x.end(nil)
		f.later()
		f.wants(f.engines[0], x.prompt, "", full(x.prompt), Learned)
	})
}

// TestLearnedTextIsTheTruth holds many conversations on engines that evict, whose events come late and
// get lost, while other clients use the engines, too. The router never believes in much more than an
// engine holds, and knows most of it.
func TestLearnedTextIsTheTruth(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 3))
	f := newFleet(t, 300, 500, 800)
	root := IdentityRoot(1, tokenBlock, "", "")
	var past [][]byte
	prompt := func() []byte {
		var text []byte
		if len(past) > 0 && rnd.IntN(5) > 0 {
			text = past[max(0, len(past)-1-rnd.IntN(40))]
			if rnd.IntN(3) == 0 {
				text = text[:rnd.IntN(len(text)+1)]
			}
		}
		text = append(slices.Clip(text), letters(rnd, 50+rnd.IntN(1500))...)
		return text[:min(len(text), 6000)]
	}
	var held, known, above, looks int
	for range 1500 {
		e := f.engines[rnd.IntN(len(f.engines))]
		text := prompt()
		blocks := f.hash.AppendBlocks(nil, words(text), tokenBlock)
		truth := int64(e.holds(e.names(root, blocks)) * tokenBlock)
		o := f.look(e, text, "")
		if o.Knowledge == Learned && o.OverlapTokens > truth+2*tokenBlock {
			t.Fatalf("%d tokens are taken for cached, and %d are", o.OverlapTokens, truth)
		}
		looks++
		held += int(truth)
		known += int(min(o.OverlapTokens, truth))
		above += int(max(0, o.OverlapTokens-truth))

		switch rnd.IntN(20) {
		case 0: // past the router
			e.compute(root, blocks, "")
			e.release(e.names(root, blocks))
		case 1: // a connection is lost, and all is repeated
			e.feed.Describe(FeedInfo{})
			e.late = nil
			f.one(e, text, rnd)
			e.replay(root)
			e.feed.Describe(exactly)
		default:
			x := f.send(e, text, "")
			if rnd.IntN(3) == 0 {
				other := f.send(e, prompt(), "")
				other.prefill()
				x.prefill()
				e.publish()
				other.end(letters(rnd, rnd.IntN(300)))
				past = append(past, other.text)
			} else {
				x.prefill()
			}
			f.now = f.now.Add(50 * time.Millisecond)
			x.end(letters(rnd, rnd.IntN(300)))
			past = append(past, x.text)
		}
		f.later()
	}
	l := f.caches.learner.learned
	t.Logf("%d of %d tokens known, %d above, in %d looks; %+v", known, held, above, looks, l)
	if known*100 < held*95 || above*50 > held || l.Whole*10 < 8*uint64(looks) {
		t.Error("too little is known")
	}
}

// one is a whole request.
func (f *fleet) one(e *engine, text []byte, rnd *rand.Rand) {
	x := f.send(e, text, "")
	x.prefill()
	x.end(letters(rnd, 100))
}

// TestFloodOfEvents has an engine publish far more than the router asked it for, while a prompt is under
// way. What the router notes stays bounded, and a prompt on another engine is learned as ever.
func TestFloodOfEvents(t *testing.T) {
	rnd := rand.New(rand.NewPCG(4, 4))
	f := newFleet(t, 1000, 1000)
	flooded, other := f.engines[0], f.engines[1]
	x, y := f.send(flooded, letters(rnd, 2000), ""), f.send(other, letters(rnd, 2000), "")
	parent := uint64(0)
	for i := range uint64(60_000) {
		s := &Stored{Root: x.root, Names: []uint64{i + 1}, Blocks: []uint64{i}, Parent: parent, HasParent: parent > 0}
		flooded.feed.Stored(s)
		if parent = i + 1; rnd.IntN(100) == 0 {
			parent = 0
		}
	}
	if g := &flooded.feed.growths; g.size > maxMarks || g.blocks > maxBlocks || len(g.ends) > 2*maxMarks {
		t.Errorf("%d marks and %d names are noted", g.size, len(g.ends))
	}
	for _, c := range []*call{x, y} {
		c.prefill()
		c.end(nil)
	}
	f.later()
	f.wants(other, y.prompt, "", full(y.prompt), Learned)
	for _, e := range f.engines {
		if g := &e.feed.growths; g.open != 0 || g.size != 0 || g.blocks != 0 || g.list != nil {
			t.Errorf("%d prompts and %d marks are left", g.open, g.size)
		}
	}
}

// TestLyingEngine has an engine name tokens that are not those of its prompts. An honest engine's events
// put right what the router has learned of these texts, and other texts stay.
func TestLyingEngine(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 5))
	f := newFleet(t, 4000, 4000)
	liar, honest := f.engines[0], f.engines[1]
	good := f.learn(honest, letters(rnd, 3000))
	text := letters(rnd, 3000)
	lie := f.send(liar, text, "")
	lie.ids = lie.ids[:len(lie.ids):len(lie.ids)]
	for i := range lie.ids {
		lie.ids[i]++
	}
	lie.prefill()
	blocks := f.hash.AppendBlocks(nil, lie.ids, tokenBlock)
	liar.release(liar.names(lie.root, blocks))
	lie.ticket.End(time.Time{}, true, nil, Counts{Prompt: int64(len(lie.ids)), CachedReported: true})
	f.later()
	f.wants(liar, text, "", full(text), Learned) // as it says
	f.wants(honest, text, "", 0, Learned)
	f.wants(honest, good.prompt, "", full(good.prompt), Learned)
	f.learn(honest, text)
	f.wants(honest, text, "", full(text), Learned)
	f.wants(liar, text, "", 0, Learned)
	if l, _ := f.caches.learner.size(); l.Contradictions == 0 {
		t.Error("no contradiction was counted")
	}
}
