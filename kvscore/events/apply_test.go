package events

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

const applySeed = 3

// applied is a worker of two ranks that is followed without a connection.
type applied struct {
	t *testing.T
	s *kvscore.Scheduler
	w *Worker
	p []*Recorder
}

func newApplied(t *testing.T, e Engine) *applied {
	a := &applied{t: t, s: kvscore.NewScheduler(kvscore.Settings{})}
	a.w = NewWorker(a.s.Caches(), applySeed, 1, 2, e)
	for rank := range 2 {
		a.s.Declare(kvscore.Target{Worker: 1, Rank: uint32(rank)}, 0)
		p := a.w.Recorder(rank)
		a.p = append(a.p, p)
		p.State(Live, true)
	}
	return a
}

// ids returns a block of four tokens.
func ids(first uint32) []uint32 { return []uint32{first, first + 1, first + 2, first + 3} }

// holds returns how many tokens of a prompt a rank is known to hold, and by which knowledge.
func (a *applied) holds(rank int, adapter, salt string, blocks []uint64) (int64, kvscore.Knowledge) {
	a.t.Helper()
	id := cache.Identity{BlockTokens: 4, Root: cache.IdentityRoot(applySeed, 4, adapter, salt), Blocks: blocks, Adapter: adapter != "", Salted: salt != ""}
	r := &kvscore.Request{Prompt: cache.Prompt{Root: 9, Blocks: id.Blocks, BlockTokens: 4, Tokens: int64(4*len(blocks)) + 1, Identities: []cache.Identity{id}}}
	sel := kvscore.Selection{Rand: rand.New(rand.NewPCG(1, 1))}
	a.s.Explain(time.Now(), r, a.s.Refs(kvscore.Target{Worker: 1}, kvscore.Target{Worker: 1, Rank: 1}), -1, new(kvscore.LeastLoad), &sel)
	return sel.Candidates[rank].OverlapTokens, sel.Candidates[rank].Knowledge
}

func (a *applied) wantsBlocks(what string, rank int, tokens int64, k kvscore.Knowledge, adapter, salt string, blocks []uint64) {
	a.t.Helper()
	if n, by := a.holds(rank, adapter, salt, blocks); n != tokens || by != k {
		a.t.Errorf("%s: %d tokens by %s knowledge, want %d by %s", what, n, by, tokens, k)
	}
}

// blocksOf returns the hashes of blocks of four tokens.
func blocksOf(prompt ...[]uint32) []uint64 {
	key := cache.TokenHash(applySeed)
	return key.AppendBlocks(nil, slices.Concat(prompt...), 4)
}

func (a *applied) wants(what string, rank int, tokens int64, k kvscore.Knowledge, salt string, prompt ...[]uint32) {
	a.t.Helper()
	a.wantsBlocks(what, rank, tokens, k, "", salt, blocksOf(prompt...))
}

// take applies events of rank 0.
func (a *applied) take(events ...Event) {
	a.w.ranks[0].apply(a.w, &Batch{Rank: 0, Events: events}, time.Now())
}

var namesAll = Engine{BlockTokens: 4, Adapters: true, Salts: true, HitsInFlight: true}

func TestContinuationHasTheSaltOfItsParent(t *testing.T) {
	a := newApplied(t, namesAll)
	a.take(
		Event{Kind: Stored, Hashes: []uint64{1}, Tokens: ids(10), BlockSize: 4, Salt: []byte("s")},
		Event{Kind: Stored, Hashes: []uint64{2}, Parent: 1, HasParent: true, Tokens: ids(20), BlockSize: 4},
		Event{Kind: Stored, Hashes: []uint64{3}, Tokens: ids(10), BlockSize: 4},
	)
	a.wants("with the salt", 0, 8, kvscore.Exact, "s", ids(10), ids(20))
	a.wants("without", 0, 4, kvscore.Exact, "", ids(10), ids(20))
	a.wants("of the other rank", 1, 0, kvscore.Exact, "s", ids(10), ids(20))
}

// TestBlocksWithExtraKeysStayApart has an image in the second of three blocks.
func TestBlocksWithExtraKeysStayApart(t *testing.T) {
	a := newApplied(t, namesAll)
	prompt := slices.Concat(ids(10), ids(20), ids(30))
	for i, image := range []string{"one", "another"} {
		name := uint64(10 * i)
		a.take(Event{
			Kind: Stored, Hashes: []uint64{1, name + 2, name + 3}, Tokens: prompt, BlockSize: 4,
			Extra: []ExtraKey{{Block: 1, Key: []byte(image)}},
		})
	}
	a.wants("the same tokens alone", 0, 4, kvscore.Exact, "", prompt)
	a.take(Event{Kind: Stored, Hashes: []uint64{5, 6}, Parent: 1, HasParent: true, Tokens: prompt[4:], BlockSize: 4})
	a.wants("computed without the image", 0, 12, kvscore.Exact, "", prompt)
	if got := a.w.Applied(0); got.Skipped != [Reasons]uint64{} {
		t.Errorf("%+v", got)
	}
}

func TestEventsThatCannotBeRead(t *testing.T) {
	a := newApplied(t, namesAll)
	a.take(Event{Kind: Stored, Hashes: []uint64{1}, Tokens: ids(10), BlockSize: 4})
	b := &Batch{Rank: 0}
	b.Skipped[UnknownMedium] = 1
	a.w.ranks[0].apply(a.w, b, time.Now())
	a.wants("after an event of no interest", 0, 4, kvscore.Exact, "", ids(10))
	a.p[0].Payload(1, []byte("no batch"))
	a.wants("after a batch that cannot be read", 0, 4, kvscore.Partial, "", ids(10))
	a.wants("of the other rank", 1, 0, kvscore.Exact, "", ids(10))
	a.p[0].Reset("")
	a.wants("after a reset", 0, 0, kvscore.Exact, "", ids(10))
	if n := a.w.Applied(0).Skipped[Undecoded]; n != 1 {
		t.Errorf("%d batches are counted", n)
	}
}

func TestRanksThatTheRouterDoesNotKnow(t *testing.T) {
	a := newApplied(t, namesAll)
	a.p[0].Payload(0, []byte("\x93\xcb\x41\xda\x00\x00\x00\x00\x00\x00\x90\x05")) // [time, [], 5]
	for rank := range 2 {
		a.wants("with shifted ranks", rank, 0, kvscore.Approximate, "", ids(10))
	}
	if n := a.w.Applied(0).Skipped[OtherRank]; n != 1 {
		t.Errorf("%d batches are counted", n)
	}
}

func TestClearsOfLongAgo(t *testing.T) {
	for state, forgets := range map[State]bool{Live: true, Untrusted: true, Replaying: false} {
		a := newApplied(t, namesAll)
		r := &kvscore.Request{Prompt: cache.Prompt{Root: 9, Blocks: []uint64{1}, BlockTokens: 16, Tokens: 17}}
		sel := kvscore.Selection{Rand: rand.New(rand.NewPCG(1, 1))}
		_, l := a.s.Select(time.Now(), r, a.s.Refs(kvscore.Target{Worker: 1}), 0, nil, &sel)
		l.End(true, nil)
		a.p[0].State(state, false)
		a.take(Event{Kind: Cleared})
		load, _ := a.s.Load(time.Now(), kvscore.Target{Worker: 1})
		if (load.CachedTokens == 0) != forgets {
			t.Errorf("while %s: the approximate model holds %d tokens", state, load.CachedTokens)
		}
	}
}

func TestDoubtedEvents(t *testing.T) {
	a := newApplied(t, namesAll)
	a.take(Event{Kind: Stored, Hashes: []uint64{1}, Tokens: ids(10), BlockSize: 4})
	a.w.Doubt(true)
	a.wants("in doubt", 0, 0, kvscore.Approximate, "", ids(10))
	a.w.Doubt(false)
	a.wants("again", 0, 4, kvscore.Exact, "", ids(10))
}

func TestOtherBlockSizes(t *testing.T) {
	a := newApplied(t, Engine{BlockTokens: 16, HitsInFlight: true})
	a.take(
		Event{Kind: Stored, Hashes: []uint64{1}, Tokens: ids(10), BlockSize: 4},
		Event{Kind: Stored, Hashes: []uint64{2}, Tokens: ids(20)[:2], BlockSize: 2},
	)
	a.wants("the size of the first event", 0, 4, kvscore.Exact, "", ids(10))
	if got := a.w.Applied(0); got.Skipped[OtherSize] != 1 || got.BlockTokens != 4 {
		t.Errorf("%+v", got)
	}
}

// TestOneNameForTwoBlocks has events that contradict themselves. The index keeps what came first.
func TestOneNameForTwoBlocks(t *testing.T) {
	a := newApplied(t, namesAll)
	prompt := slices.Concat(ids(10), ids(20), ids(30))
	a.take(Event{Kind: Stored, Hashes: []uint64{1, 2, 1}, Tokens: prompt, BlockSize: 4})
	a.wants("a name twice", 0, 8, cache.Partial, "", prompt)
	a.take(Event{Kind: Stored, Hashes: []uint64{2}, Parent: 2, HasParent: true, Tokens: ids(30), BlockSize: 4})
	a.wants("the parent's name", 0, 8, cache.Partial, "", prompt)
	if got := a.w.Applied(0); got.Skipped[Contradiction] != 2 || got.Stored != 2 {
		t.Errorf("%+v", got)
	}
	a.take(Event{Kind: Removed, Hashes: []uint64{1, 2}})
	a.wants("removed", 0, 0, cache.Approximate, "", prompt) // the deeper overlap counts
}
