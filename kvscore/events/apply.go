package events

import (
	"bytes"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"github.com/zeebo/xxh3"
)

// Engine is what is known of the engine behind a [Worker].
type Engine struct {
	// BlockTokens is the number of tokens in a block as the engine reports it; 0 is unknown.
	// The first event of each rank counts more.
	BlockTokens int
	// Adapters and Salts say that the events name LoRA adapters, and the cache salt at least
	// with a prompt's first block. Otherwise the events show whether they do.
	Adapters, Salts bool
	// HitsInFlight is that of [cache.FeedInfo].
	HitsInFlight bool
}

// Worker records what the publishers of one worker say in the caches. Requests of token
// ids then find it.
type Worker struct {
	seed   uint64
	tokens cache.TokenHash // of seed
	ranks  []*rank
}

// NewWorker returns a worker with a number of data-parallel ranks. seed keys the hashes; it must
// be that of the requests. Ranks beyond the caches' bound stay without a feed.
func NewWorker(c *cache.Caches, seed, id uint64, ranks int, e Engine) *Worker {
	w := &Worker{seed: seed, tokens: cache.TokenHash(seed)}
	for i := range ranks {
		feed := c.Feed(cache.Target{Worker: id, Rank: uint32(i)}) //nolint:gosec // ranks are few
		w.ranks = append(w.ranks, &rank{feed: feed})
	}
	w.Learn(e)
	return w
}

// Learn replaces what is known of the engine.
func (w *Worker) Learn(e Engine) {
	for _, r := range w.ranks {
		r.update(func(r *rank) {
			r.engine = e
			r.info.Adapters, r.info.Salts = r.info.Adapters || e.Adapters, r.info.Salts || e.Salts
			r.info.HitsInFlight = e.HitsInFlight
			if !r.sized {
				r.info.BlockTokens = e.BlockTokens
			}
		})
	}
}

// Close forgets all that the worker's publishers said. None may speak any more.
func (w *Worker) Close() {
	for _, r := range w.ranks {
		if r.feed != nil {
			r.feed.Close()
		}
	}
}

// Applied counts what one rank's events did to the index.
type Applied struct {
	// Stored and Removed count blocks, Cleared events.
	Stored  uint64 `json:"stored_blocks"`
	Removed uint64 `json:"removed_blocks"`
	Cleared uint64 `json:"cleared"`
	// Skipped counts what was not used, by reason.
	Skipped [Reasons]uint64 `json:"-"`
	// UnknownNames counts removed blocks that the index did not know.
	UnknownNames uint64 `json:"unknown_removed_blocks"`
	// LastBatch is when the last batch came. Lag is the age of the last live one by the
	// engine's clock at its arrival; 0 is unknown.
	LastBatch time.Time     `json:"-"`
	Lag       time.Duration `json:"-"`
	// BlockTokens is the size of the blocks; 0 is unknown.
	BlockTokens int             `json:"block_size_tokens,omitzero"`
	Knowledge   cache.Knowledge `json:"knowledge"`
	// Held are the blocks that the rank holds, by tier.
	Held [cache.Tiers]int64 `json:"-"`
}

// Applied returns the counts of a rank.
func (w *Worker) Applied(rank int) Applied {
	r := w.ranks[rank]
	r.mu.Lock()
	defer r.mu.Unlock()
	a := r.did
	a.BlockTokens, a.Knowledge = r.info.BlockTokens, r.described.Knowledge
	if r.feed != nil {
		for t := range a.Held {
			a.Held[t] = r.feed.Blocks(cache.Tier(t)) //nolint:gosec // a tier
		}
	}
	return a
}

// Doubt says whether the engine's reports contradict its events. Nobody relies on them then.
func (w *Worker) Doubt(doubted bool) {
	for _, r := range w.ranks {
		r.update(func(r *rank) { r.doubted = doubted })
	}
}

type rank struct {
	engine Engine
	feed   *cache.Feed // nil if there was no room for one

	mu        sync.Mutex // publishers may speak of each other's ranks
	info      cache.FeedInfo
	described cache.FeedInfo // what the caches know
	sized     bool           // an event since the last reset has the block size
	lost      bool           // an event since the last reset could not be read
	foreign   bool           // the publisher names a rank that the router does not know
	doubted   bool           // the engine reports something else
	state     State
	complete  bool
	did       Applied
	contents  []uint64
	stored    cache.Stored
}

// Recorder is a [Sink] for what one publisher says. Batches may name another rank than that
// of the publisher's port.
type Recorder struct {
	worker  *Worker
	rank    int
	decoder Decoder
	spoke   []bool // of which ranks, since the last reset
}

// Recorder returns the sink for the publisher of a rank.
func (w *Worker) Recorder(rank int) *Recorder {
	return &Recorder{worker: w, rank: rank, spoke: make([]bool, len(w.ranks))}
}

// Payload records a batch. It decides all if the engine has cleared the cache of the publisher's rank.
func (p *Recorder) Payload(_ uint64, payload []byte) (decides bool) {
	now := time.Now()
	b, err := p.decoder.Decode(payload)
	if err != nil {
		p.worker.ranks[p.rank].update(func(r *rank) { r.did.Skipped[Undecoded]++; r.lost = true })
		return false
	}
	at := p.rank
	if b.Rank >= 0 && len(p.worker.ranks) > 1 { // a single rank has its own number, whatever it is to the engine
		at = b.Rank
	}
	if at >= len(p.worker.ranks) {
		own := p.worker.ranks[p.rank]
		for _, r := range p.worker.ranks { // the numbers of all ranks may be shifted
			r.update(func(r *rank) {
				if r.foreign = true; r == own {
					r.did.Skipped[OtherRank]++
				}
			})
		}
		return false
	}
	p.spoke[at] = true
	return p.worker.ranks[at].apply(p.worker, b, now) && at == p.rank
}

// Reset forgets what the publisher said.
func (p *Recorder) Reset(string) {
	p.decoder.Reset()
	p.spoke[p.rank] = true
	for i, r := range p.worker.ranks {
		if p.spoke[i] {
			r.update((*rank).reset)
			p.spoke[i] = false
		}
	}
}

// State records how far the publisher's stream can be relied on.
func (p *Recorder) State(s State, complete bool) {
	p.worker.ranks[p.rank].update(func(r *rank) {
		r.state, r.complete = s, complete
		if (s == Live || s == Untrusted) && !complete && r.feed != nil {
			r.feed.Missed()
		}
	})
}

func (r *rank) update(by func(*rank)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	by(r)
	r.describe()
}

func (r *rank) reset() {
	r.sized, r.lost, r.foreign = false, false, false
	if r.feed != nil {
		r.feed.Reset()
	}
}

// apply records a batch. It returns whether the engine has cleared its cache, so that its events
// name all that the rank holds from now on.
func (r *rank) apply(w *Worker, b *Batch, now time.Time) (cleared bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.feed == nil {
		return false
	}
	for i, n := range b.Skipped {
		r.did.Skipped[i] += uint64(n) //nolint:gosec // a count
	}
	r.lost = r.lost || b.Skipped[Malformed]+b.Skipped[BlockSizeMismatch]+b.Skipped[TooLarge] > 0
	r.did.LastBatch = now
	if b.Time > 0 && r.state == Live { // replayed batches are old
		r.did.Lag = now.Sub(time.UnixMicro(int64(b.Time * 1e6)))
	}
	for i := range b.Events {
		switch e := &b.Events[i]; e.Kind {
		case Stored:
			r.store(w, e)
		case Removed:
			unknown := r.feed.Removed(e.Tier, e.Hashes)
			r.did.Removed += uint64(len(e.Hashes))
			r.did.UnknownNames += uint64(unknown) //nolint:gosec // a count
		case Cleared:
			r.did.Cleared++
			if cleared = true; r.state == Replaying { // it was long ago
				r.feed.Reset()
			} else {
				r.feed.Cleared()
			}
		}
	}
	r.describe()
	return cleared
}

func (r *rank) store(w *Worker, e *Event) {
	s := &r.stored
	*s = cache.Stored{Tier: e.Tier, Parent: e.Parent, HasParent: e.HasParent, Names: e.Hashes}
	if e.Tokens != nil {
		if !r.sized {
			r.info.BlockTokens, r.sized = e.BlockSize, true
		}
		if e.BlockSize != r.info.BlockTokens {
			r.did.Skipped[OtherSize]++
			return
		}
		r.info.Adapters = r.info.Adapters || len(e.Adapter) > 0 && !bytes.HasPrefix(e.Adapter, []byte("lora_id:"))
		r.info.Salts = r.info.Salts || len(e.Salt) > 0
		if !e.HasParent || !r.engine.Salts { // else only a prompt's first block has the salt
			s.Root = cache.IdentityRoot(w.seed, e.BlockSize, e.Adapter, e.Salt)
		}
		s.Blocks, s.Session = r.hash(w, e), e.Session
	}
	n, why := r.feed.Stored(s)
	r.did.Stored += uint64(n) //nolint:gosec // a count
	switch why {
	case cache.OK:
	case cache.UnknownParent, cache.UnknownName:
		r.did.Skipped[UnknownParent]++
	case cache.Contradiction:
		r.did.Skipped[Contradiction]++
	case cache.NoRoom:
		r.did.Skipped[NoRoom]++
	}
}

// hash returns the content hashes of an event's blocks. They are valid until the next call.
func (r *rank) hash(w *Worker, e *Event) []uint64 {
	list := w.tokens.AppendBlocks(r.contents[:0], e.Tokens, e.BlockSize)
	for _, x := range e.Extra {
		list[x.Block] = xxh3.HashSeed(x.Key, w.seed^list[x.Block])
	}
	r.contents = list
	return list
}

// describe tells the caches how far to rely on the events, if that has changed.
func (r *rank) describe() {
	info := r.info
	info.Knowledge = cache.Approximate
	switch {
	case r.feed == nil:
		return
	case r.foreign, r.doubted:
	case r.state == Live && r.complete && !r.lost && !r.feed.Incomplete():
		info.Knowledge = cache.Exact
	case r.state == Live || r.state == Untrusted:
		info.Knowledge = cache.Partial
	}
	if info != r.described {
		r.described = info
		r.feed.Describe(info)
	}
}
