package journal

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// Bounds of what waits for a log. Beyond them, records are lost, and counted.
const (
	maxRecords = 1 << 16
	maxWaiting = 2 << 20 // blocks
)

// Journal gathers the records of one pool for its outlets. Without any, it gathers none. The zero
// value is ready for use. Its methods never wait, but for each other.
//
// It implements [kvscore.Journal] and [affinity.Journal].
type Journal struct {
	// Clock returns the time; nil stands for time.Now.
	Clock func() time.Time

	on atomic.Bool // there are outlets

	mu       sync.Mutex
	requests uint64 // numbers given
	outlets  []*Outlet
}

// Outlet is where one log takes the records.
type Outlet struct {
	journal *Journal
	live    bool          // it takes KindAnswered, too
	wake    chan struct{} // gets a value when records wait
	lost    atomic.Uint64
	batch   batch // the journal's lock guards it
	spare   batch // of the one that writes
}

// Open returns a new outlet. A live one takes records of KindAnswered, too.
func (j *Journal) Open(live bool) *Outlet {
	o := &Outlet{journal: j, live: live, wake: make(chan struct{}, 1)}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.outlets = append(slices.Clip(j.outlets), o)
	j.on.Store(true)
	return o
}

// Close ends an outlet, which may be nil. What waits is dropped.
func (o *Outlet) Close() {
	if o == nil {
		return
	}
	j := o.journal
	j.mu.Lock()
	defer j.mu.Unlock()
	j.outlets = slices.DeleteFunc(slices.Clone(j.outlets), func(one *Outlet) bool { return one == o })
	j.on.Store(len(j.outlets) > 0)
}

// Lost returns how many records had no room. The outlet may be nil.
func (o *Outlet) Lost() uint64 {
	if o == nil {
		return 0
	}
	return o.lost.Load()
}

// batch is records in their order, and the blocks of their prompts.
type batch struct {
	records []record
	blocks  []uint64
}

// record is a record that waits.
type record struct {
	kind     Kind
	computed bool // of KindDrained: it begins
	streamed bool
	text     bool
	leg      kvscore.Leg
	sign     kvscore.Sign
	at       int64 // Unix milliseconds
	target   kvscore.Target
	request  uint64
	blocks   int // in the batch

	root                 uint64
	tokens, expected     int64 // expected: of KindDrained its version
	answerTokens, weight int64
	cached               int64
	matched              int
	past                 float32
	binding              affinity.Saved // also the key alone
	response             Response
	models               []Model
}

// add adds a record for all outlets. The lock is held.
func (j *Journal) add(r *record, blocks []uint64) {
	r.blocks = len(blocks)
	for _, o := range j.outlets {
		b := &o.batch
		switch {
		case r.kind == KindAnswered && !o.live:
			continue
		case len(b.records) == maxRecords || len(b.blocks)+len(blocks) > maxWaiting:
			o.lost.Add(1)
			continue
		}
		b.records, b.blocks = append(b.records, *r), append(b.blocks, blocks...)
		select {
		case o.wake <- struct{}{}:
		default:
		}
	}
}

// note adds a record without blocks.
func (j *Journal) note(r record) {
	if !j.on.Load() {
		return
	}
	r.at = j.now()
	j.mu.Lock()
	defer j.mu.Unlock()
	j.add(&r, nil)
}

// Booked implements [kvscore.Journal].
func (j *Journal) Booked(now time.Time, t kvscore.Target, p *cache.Prompt, v *cache.View, streamed bool, expected int64, leg kvscore.Leg) (request uint64) {
	if !j.on.Load() {
		return 0
	}
	r := record{
		kind: KindBooked, at: now.UnixMilli(), target: t, root: p.Root, tokens: v.Tokens, expected: expected,
		matched: v.Known.Blocks, past: p.Past, weight: v.NewWeight(p), streamed: streamed, text: p.Weights.Kinds != nil, leg: leg,
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.requests++
	r.request = j.requests
	j.add(&r, p.Blocks)
	return r.request
}

// Answered implements [kvscore.Journal].
func (j *Journal) Answered(request uint64, now time.Time, how kvscore.Sign, tokens int64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.add(&record{kind: KindAnswered, at: now.UnixMilli(), request: request, sign: how, expected: tokens}, nil)
}

// Ended implements [kvscore.Journal].
func (j *Journal) Ended(request uint64, computed bool, tokens int64, n kvscore.Counts, answer []uint64) {
	r := record{
		kind: KindEnded, at: j.now(), request: request, computed: computed, tokens: n.Prompt,
		expected: tokens, answerTokens: n.Answer, past: n.AnswerPast, cached: -1,
	}
	if n.CachedReported {
		r.cached = n.Cached
	}
	if n.Answer > n.Prompt && n.Prompt > 0 && len(answer) > 0 {
		r.weight = 1000 * (n.Answer - n.Prompt) / int64(len(answer))
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.add(&r, answer)
}

// Bound implements [affinity.Journal].
func (j *Journal) Bound(key affinity.Key, want affinity.Want, v affinity.Version) {
	j.note(record{kind: KindBound, target: want.Target, binding: affinity.Saved{Key: key, Want: want, Version: v}})
}

// Used implements [affinity.Journal].
func (j *Journal) Used(key affinity.Key) {
	j.note(record{kind: KindUsed, binding: affinity.Saved{Key: key}})
}

// Unbound implements [affinity.Journal].
func (j *Journal) Unbound(key affinity.Key, v affinity.Version) {
	j.note(record{kind: KindUnbound, binding: affinity.Saved{Key: key, Version: v}})
}

// Kept records a response that the engine of a target keeps.
func (j *Journal) Kept(one Response, t kvscore.Target) {
	j.note(record{kind: KindResponse, target: t, response: one})
}

// LostCache records that a worker has lost its KV cache.
func (j *Journal) LostCache(worker uint64) {
	j.note(record{kind: KindLost, target: kvscore.Target{Worker: worker}})
}

// Drained records that the drain of a worker begins or ends, and
// after how many calls of the admin API for it.
func (j *Journal) Drained(worker uint64, drains bool, version uint64) {
	j.note(record{kind: KindDrained, target: kvscore.Target{Worker: worker}, computed: drains, expected: int64(version)}) //nolint:gosec // it counts from 0
}

// Lists records a worker's list of its models, nil if it has none.
func (j *Journal) Lists(worker uint64, models []Model) {
	j.note(record{kind: KindModels, target: kvscore.Target{Worker: worker}, models: models})
}

// now returns the time in Unix milliseconds.
func (j *Journal) now() int64 {
	if j.Clock != nil {
		return j.Clock().UnixMilli()
	}
	return time.Now().UnixMilli()
}

// take takes what waits.
func (o *Outlet) take() batch {
	clear(o.spare.records) // they have strings
	o.journal.mu.Lock()
	defer o.journal.mu.Unlock()
	b := o.batch
	o.batch, o.spare = batch{o.spare.records[:0], o.spare.blocks[:0]}, b
	return b
}

// Write writes what waits, and returns whether there was anything. dial returns the address of a
// worker; it is empty if that is gone. One goroutine may write.
func (o *Outlet) Write(e *Encoder, dial func(id uint64) string) bool {
	b := o.take()
	blocks := b.blocks
	for i := range b.records {
		r := &b.records[i]
		own := blocks[:r.blocks]
		blocks = blocks[r.blocks:]
		if e.names(r, dial) {
			e.add(r, own)
		}
	}
	return len(b.records) > 0
}

// names makes the record's worker known. It returns false if that is gone.
func (e *Encoder) names(r *record, dial func(id uint64) string) bool {
	id := r.target.Worker
	none := r.kind == KindEnded || r.kind == KindAnswered || r.kind == KindUsed || r.kind == KindUnbound
	if none || e.Knows(id) {
		return true
	}
	if at := dial(id); at != "" {
		e.Worker(r.at, id, at)
	}
	return e.Knows(id)
}

// add writes a record of a batch.
func (e *Encoder) add(r *record, blocks []uint64) {
	switch r.kind {
	case KindBooked:
		e.booked(r.at, r, blocks)
	case KindEnded:
		e.ended(r.at, r, blocks)
	case KindBound:
		e.Bound(r.at, &r.binding)
	case KindUsed, KindUnbound:
		e.key(r.kind, r.at, &r.binding)
	case KindAnswered:
		e.answered(r.at, r)
	case KindDrained:
		e.Drained(r.at, r.target.Worker, r.computed, uint64(r.expected)) //nolint:gosec // not negative
	case KindResponse:
		e.Response(r.at, &r.response, r.target)
	case KindLost:
		e.Lost(r.at, r.target.Worker)
	case KindModels:
		e.Models(r.at, r.target.Worker, r.models)
	case KindBegin, KindWorker, KindState: // these are not gathered
	}
}
