package journal

import (
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

// Journal gathers the records of one pool. While no log takes them, it gathers none. The zero value
// is ready for use. Its methods never wait, but for each other.
//
// It implements [kvscore.Journal] and [affinity.Journal].
type Journal struct {
	on   atomic.Bool
	lost atomic.Uint64

	mu       sync.Mutex
	requests uint64 // numbers given
	batch    batch
}

// batch is records in their order, and the blocks of their prompts.
type batch struct {
	records []record
	blocks  []uint64
}

// record is a record that waits.
type record struct {
	kind     Kind
	computed bool
	at       int64 // Unix milliseconds
	target   kvscore.Target
	request  uint64
	blocks   int // in the batch

	root                 uint64
	tokens, expected     int64
	answerTokens, weight int64
	matched              int
	past                 float32
	binding              affinity.Saved // also the key alone
	response             Response
}

// On returns whether a log takes records.
func (j *Journal) On() bool { return j.on.Load() }

// Lost returns how many records had no room.
func (j *Journal) Lost() uint64 { return j.lost.Load() }

// add adds a record. The lock is held. It returns false if there is no room.
func (j *Journal) add(r record, blocks []uint64) bool {
	b := &j.batch
	if len(b.records) == maxRecords || len(b.blocks)+len(blocks) > maxWaiting {
		j.lost.Add(1)
		return false
	}
	r.blocks = len(blocks)
	b.records, b.blocks = append(b.records, r), append(b.blocks, blocks...)
	return true
}

// note adds a record without blocks.
func (j *Journal) note(r record) {
	if !j.on.Load() {
		return
	}
	r.at = time.Now().UnixMilli()
	j.mu.Lock()
	defer j.mu.Unlock()
	j.add(r, nil)
}

// Booked implements [kvscore.Journal].
func (j *Journal) Booked(now time.Time, t kvscore.Target, p *cache.Prompt, v *cache.View, expected int64) (request uint64) {
	if !j.on.Load() {
		return 0
	}
	r := record{
		kind: KindBooked, at: now.UnixMilli(), target: t, root: p.Root, tokens: v.Tokens, expected: expected,
		matched: v.Known.Blocks, past: p.Past, weight: v.NewWeight(p),
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.requests++
	r.request = j.requests
	if !j.add(r, p.Blocks) {
		return 0
	}
	return r.request
}

// Ended implements [kvscore.Journal].
func (j *Journal) Ended(request uint64, computed bool, tokens int64, n kvscore.Counts, answer []uint64) {
	r := record{
		kind: KindEnded, at: time.Now().UnixMilli(), request: request, computed: computed, tokens: n.Prompt,
		expected: tokens, answerTokens: n.Answer, past: n.AnswerPast,
	}
	if n.Answer > n.Prompt && n.Prompt > 0 && len(answer) > 0 {
		r.weight = 1000 * (n.Answer - n.Prompt) / int64(len(answer))
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.add(r, answer)
}

// Take has the journal gather records, or not. What waits is dropped then.
func (j *Journal) Take(on bool) {
	if j.on.Swap(on); !on {
		j.take(batch{})
	}
}

// Bound implements [affinity.Journal].
func (j *Journal) Bound(key affinity.Key, want affinity.Want) {
	j.note(record{kind: KindBound, target: want.Target, binding: affinity.Saved{Key: key, Want: want}})
}

// Used implements [affinity.Journal].
func (j *Journal) Used(key affinity.Key) {
	j.note(record{kind: KindUsed, binding: affinity.Saved{Key: key}})
}

// Unbound implements [affinity.Journal].
func (j *Journal) Unbound(key affinity.Key) {
	j.note(record{kind: KindUnbound, binding: affinity.Saved{Key: key}})
}

// Kept records a response that the engine of a target keeps.
func (j *Journal) Kept(one Response, t kvscore.Target) {
	j.note(record{kind: KindResponse, target: t, response: one})
}

// LostCache records that a worker has lost its KV cache.
func (j *Journal) LostCache(worker uint64) {
	j.note(record{kind: KindLost, target: kvscore.Target{Worker: worker}})
}

// take returns what waits. to is used again.
func (j *Journal) take(to batch) batch {
	j.mu.Lock()
	defer j.mu.Unlock()
	b := j.batch
	clear(to.records) // they have strings
	j.batch = batch{to.records[:0], to.blocks[:0]}
	return b
}

// write writes a batch. dial returns the address of a worker; it is empty if that is gone.
func (e *Encoder) write(b *batch, dial func(id uint64) string) {
	blocks := b.blocks
	for i := range b.records {
		r := &b.records[i]
		own := blocks[:r.blocks]
		blocks = blocks[r.blocks:]
		if e.names(r, dial) {
			e.add(r, own)
		}
	}
}

// names makes the record's worker known. It returns false if that is gone.
func (e *Encoder) names(r *record, dial func(id uint64) string) bool {
	id := r.target.Worker
	if r.kind == KindEnded || r.kind == KindUsed || r.kind == KindUnbound || e.Knows(id) {
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
		e.key(r.kind, r.at, r.binding.Key)
	case KindResponse:
		e.Response(r.at, &r.response, r.target)
	case KindLost:
		e.Lost(r.at, r.target.Worker)
	case KindBegin, KindWorker, KindState: // these are not gathered
	}
}
