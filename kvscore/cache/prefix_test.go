package cache

import (
	"math/rand/v2"
	"testing"
)

// tell has an engine publish a prompt that another router has sent.
func (f *fleet) tell(e *engine, text []byte, salt string) {
	root, blocks := IdentityRoot(1, tokenBlock, "", salt), f.hash.AppendBlocks(nil, words(text), tokenBlock)
	e.feed.Stored(&Stored{Root: root, Names: e.names(root, blocks), Blocks: blocks, Session: []byte(NewSession(f.prompt(text, salt).Prefixes))})
}

// TestTextsOfOtherRouters has engines publish texts that this router has never seen. Their names tell it
// which prompts begin so.
func TestTextsOfOtherRouters(t *testing.T) {
	rnd := rand.New(rand.NewPCG(7, 7))
	f := newFleet(t, 4000, 4000)
	a, b := f.engines[0], f.engines[1]
	turn := letters(rnd, 20_000)
	next := append(turn[:len(turn):len(turn)], letters(rnd, 500)...)
	about := func(e *engine, text []byte, held int64) { // the text's length in tokens is estimated
		t.Helper()
		if o := f.look(e, text, ""); o.OverlapTokens < held*3/4 || o.OverlapTokens > held*5/4 || o.Knowledge != Learned {
			t.Errorf("overlap is %d tokens (%s), want about %d", o.OverlapTokens, o.Knowledge, held)
		}
	}
	f.wants(a, next, "", 0, Approximate)
	f.tell(a, turn, "")
	about(a, next, full(turn))
	f.wants(b, next, "", 0, Learned)
	f.wants(a, next, "salt", 0, Approximate)

	f.tell(b, next, "")
	if x, y := f.look(a, next, ""), f.look(b, next, ""); x.OverlapTokens > y.OverlapTokens {
		t.Errorf("%d and %d tokens; the second engine has one more turn", x.OverlapTokens, y.OverlapTokens)
	}
	for _, end := range []int{8_000, 13_000, 19_000} { // they may part just behind a prefix
		about(a, append(turn[:end:end], letters(rnd, 12_000)...), full(turn[:end]))
	}
	f.wants(a, letters(rnd, 20_000), "", 0, Approximate)
}

// TestKnownTextCountsForMore has an engine name other blocks by the prefixes of a text that the router
// knows. What the router has learned of the text stays.
func TestKnownTextCountsForMore(t *testing.T) {
	rnd := rand.New(rand.NewPCG(8, 8))
	f := newFleet(t, 4000)
	e := f.engines[0]
	text := letters(rnd, 5_000)
	f.learn(e, text)
	more := append(text[:len(text):len(text)], letters(rnd, 5_000)...)
	other, root := f.hash.AppendBlocks(nil, words(letters(rnd, 10_000)), tokenBlock), IdentityRoot(1, tokenBlock, "", "")
	e.feed.Stored(&Stored{Root: root, Names: e.names(root, other), Blocks: other, Session: []byte(NewSession(f.prompt(more, "").Prefixes))})
	f.wants(e, text, "", full(text), Learned)
	f.wants(e, more, "", full(text), Learned)
}

func FuzzNames(f *testing.F) {
	f.Add([]byte(NewSession([]Prefix{{16, 1}, {20, 2}})))
	f.Add([]byte(OwnSession))
	c := New(1<<20, tokenBlock)
	feed := c.Feed(Target{})
	f.Fuzz(func(_ *testing.T, session []byte) {
		feed.Stored(&Stored{Root: 1, Names: []uint64{1}, Blocks: []uint64{1}, Session: session})
	})
}

// TestOthersPartFromKnownText has another router send texts that part anywhere from one that this router
// has sent. Where they part, the router's own map can only guess.
func TestOthersPartFromKnownText(t *testing.T) {
	rnd := rand.New(rand.NewPCG(9, 9))
	for range 40 {
		f := newFleet(t, 4000)
		e := f.engines[0]
		text := letters(rnd, 10_000)
		f.learn(e, text)
		at := 3000 + rnd.IntN(5000)
		other := append(text[:at:at], letters(rnd, 8_000)...)
		f.tell(e, other, "")
		if o := f.look(e, append(other[:len(other):len(other)], letters(rnd, 500)...), ""); o.OverlapTokens < full(other)*3/4 {
			t.Errorf("overlap is %d tokens, want about %d; they part behind %d", o.OverlapTokens, full(other), full(text[:at]))
		}
	}
}
