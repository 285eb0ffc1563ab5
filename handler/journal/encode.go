package journal

import (
	"encoding/binary"
	"encoding/json"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"github.com/zeebo/xxh3"
)

// markEvery is the distance, in blocks, of the places in a prompt up to which others can share it.
// Its end is such a place, too, and where it was new.
const markEvery = 64

// Encoder writes records of one run into entries. The zero value is ready for Begin.
type Encoder struct {
	base    int64 // the entry's time, Unix milliseconds
	first   int   // prompts before the entry
	records []byte
	fields  []byte // of the present record
	kind    Kind

	run     uint64
	workers map[uint64]int // numbers, by id
	prompts int            // since Begin
	marks   map[uint64]mark
	open    map[uint64]told // requests that have not ended
	last    uint64          // number of the entry's last request
	path    []place         // scratch: see share
	whole   uint64          // the same: hash up to the last place of markEvery
	out     func(entry []byte)
}

// mark is a place in a prompt: the first blocks of the prompt of that number.
type mark struct {
	prompt, blocks uint32
	depth          uint16
}

type place struct {
	hash   uint64 // of all up to there
	blocks int
}

// told is the prompt of a request that has not ended.
type told struct {
	prompt, blocks, depth int
	rest                  []uint64 // of the blocks, those behind the last place of markEvery
	whole                 uint64   // hash of all before
}

// maxMarks bounds the memory of an encoder, about 40 bytes each.
const maxMarks = 1 << 20

// Full says that it is time for Begin, because the encoder takes much memory.
func (e *Encoder) Full() bool { return len(e.marks) > maxMarks }

// Entry returns what was written since the last Entry, as one entry; nil if that is nothing. It is
// valid until the next write.
func (e *Encoder) Entry() []byte {
	if len(e.records) == 0 {
		return nil
	}
	b := e.fields[:0]
	b = append(binary.LittleEndian.AppendUint32(b, 0), version)
	b = binary.AppendUvarint(binary.AppendVarint(b, e.base), uint64(e.first)) //nolint:gosec // positive
	b = append(b, e.records...)
	binary.LittleEndian.PutUint32(b, uint32(len(b)-4)) //nolint:gosec // less than maxEntry
	b = binary.LittleEndian.AppendUint64(b, xxh3.Hash(b[4:]))
	e.fields, e.records = b[:0], e.records[:0]
	return b
}

func (e *Encoder) begin(k Kind, at int64) {
	if len(e.records) == 0 {
		e.base, e.first, e.last = at, e.prompts, 0
	}
	e.kind = k
	e.fields = binary.AppendVarint(e.fields[:0], at-e.base)
}

func (e *Encoder) end() {
	e.records = binary.AppendUvarint(append(e.records, byte(e.kind)), uint64(len(e.fields)))
	e.records = append(e.records, e.fields...)
	if len(e.records) > entryBytes && e.out != nil {
		e.out(e.Entry())
	}
}

func (e *Encoder) number(n int64) { e.fields = binary.AppendUvarint(e.fields, uint64(max(0, n))) } //nolint:gosec // positive

// NewRun has the next Begin begin a run of its own. Requests under way are given up.
func (e *Encoder) NewRun() { e.run, e.open = rand.Uint64(), nil } //nolint:gosec // only differs

// Begin writes a KindBegin record. The numbers of workers and prompts begin anew. Requests go on.
func (e *Encoder) Begin(at int64, h *Head) {
	e.workers, e.marks = make(map[uint64]int), make(map[uint64]mark)
	if e.prompts = 0; e.open == nil {
		e.open = make(map[uint64]told)
	}
	own := *h
	own.Run = e.run
	e.begin(KindBegin, at)
	e.json(&own)
}

// State writes a state.
func (e *Encoder) State(at int64, s *State) {
	e.begin(KindState, at)
	e.json(s)
}

// json ends a record that is JSON.
func (e *Encoder) json(v any) {
	if b, err := json.Marshal(v); err == nil { // else a number is infinite
		e.fields = append(e.fields, b...)
		e.end()
	}
}

// Worker gives the worker of an id a number, if it has none.
func (e *Encoder) Worker(at int64, id uint64, dial string) {
	if !fits(dial) || len(e.workers) == maxWorkers || e.Knows(id) {
		return
	}
	e.workers[id] = len(e.workers)
	e.begin(KindWorker, at)
	e.number(int64(e.workers[id]))
	e.fields = append(e.fields, dial...)
	e.end()
}

// Knows returns whether the worker of an id has a number.
func (e *Encoder) Knows(id uint64) bool {
	_, known := e.workers[id]
	return known
}

func (e *Encoder) target(t kvscore.Target) {
	e.number(int64(e.workers[t.Worker]))
	e.number(int64(t.Rank))
}

func (e *Encoder) request(n uint64) {
	e.fields = binary.AppendVarint(e.fields, int64(n-e.last)) //nolint:gosec // wraps around
	e.last = n
}

// Lost says that a worker has lost its KV cache.
func (e *Encoder) Lost(at int64, id uint64) {
	e.begin(KindLost, at)
	e.target(kvscore.Target{Worker: id})
	e.end()
}

type booking struct {
	request          uint64
	target           kvscore.Target
	root             uint64
	tokens, expected int64
	matched          int
	weight           int64
	past             float32
	streamed, text   bool
	phase            kvscore.Phase
}

func (r *booking) write(e *Encoder, at int64, blocks []uint64) {
	e.begin(KindBooked, at)
	e.request(r.request)
	e.target(r.target)
	e.number(r.tokens)
	e.number(r.expected)
	e.number(int64(r.matched))
	e.flags(r.streamed, r.text, r.phase == kvscore.PhasePrefill, r.phase == kvscore.PhaseDecode)
	if blocks = blocks[:min(len(blocks), maxBlocks)]; len(blocks) > 0 {
		e.open[r.request] = e.prompt(r, blocks)
	}
	e.end()
}

// flags writes bits, the first one the lowest.
func (e *Encoder) flags(set ...bool) {
	b := byte(0)
	for i, one := range set {
		if one {
			b |= 1 << i
		}
	}
	e.fields = append(e.fields, b)
}

// prompt writes a prompt, as what it shares with an earlier one and what is new.
func (e *Encoder) prompt(r *booking, blocks []uint64) told {
	shared := e.share(r, blocks)
	e.number(int64(shared.prompt))
	if shared.prompt == 0 {
		e.fields = binary.LittleEndian.AppendUint64(e.fields, r.root)
	} else {
		e.number(int64(shared.blocks))
	}
	e.blocks(blocks[shared.blocks:], r.weight, r.past)
	rest := blocks[len(blocks)/markEvery*markEvery:]
	t := told{e.prompts, len(blocks), int(shared.depth) + 1, slices.Clone(rest), e.whole}
	for _, at := range e.path {
		if _, known := e.marks[at.hash]; !known && at.blocks > int(shared.blocks) {
			e.mark(at, &t)
		}
	}
	return t
}

func (e *Encoder) mark(at place, t *told) {
	e.marks[at.hash] = mark{uint32(t.prompt), uint32(at.blocks), uint16(t.depth)} //nolint:gosec // bounded
}

func (e *Encoder) blocks(blocks []uint64, weight int64, past float32) {
	e.prompts++
	e.number(int64(len(blocks)))
	for _, b := range blocks {
		e.fields = binary.LittleEndian.AppendUint64(e.fields, b)
	}
	e.number(weight)
	e.number(int64(past * (1 << 16)))
}

// share returns the earlier prompt with the longest common beginning, as far as the marks show
// it. It leaves the places of the prompt in path.
func (e *Encoder) share(r *booking, blocks []uint64) (longest mark) {
	e.path = e.path[:0]
	e.whole = cache.Mix(r.root)
	for at := 0; at < len(blocks); at += markEvery {
		end := min(at+markEvery, len(blocks))
		if r.matched > at && r.matched < end {
			e.pass(&longest, place{span(e.whole, blocks[at:r.matched]), r.matched})
		}
		hash := span(e.whole, blocks[at:end])
		if end-at == markEvery {
			e.whole = hash
		}
		e.pass(&longest, place{hash, end})
	}
	return longest
}

// pass adds a place to the path. If it is known, it is the longest common beginning so far.
func (e *Encoder) pass(longest *mark, at place) {
	e.path = append(e.path, at)
	if m, known := e.marks[at.hash]; known && m.depth < maxDepth {
		*longest = m
	}
}

// span returns the hash of a prompt's beginning, from that of all but its last blocks. Four
// independent products take less time than one.
func span(hash uint64, blocks []uint64) uint64 {
	const odd = 0x9e3779b97f4a7c15
	x := [4]uint64{hash, hash + 1, hash + 2, hash + 3}
	for ; len(blocks) >= 4; blocks = blocks[4:] {
		b := (*[4]uint64)(blocks)
		x = [4]uint64{(x[0] ^ b[0]) * odd, (x[1] ^ b[1]) * odd, (x[2] ^ b[2]) * odd, (x[3] ^ b[3]) * odd}
	}
	for i, b := range blocks {
		x[i] = (x[i] ^ b) * odd
	}
	return cache.Mix(cache.Mix(cache.Mix(cache.Mix(x[0])^x[1])^x[2])^x[3]) + uint64(len(blocks)) //nolint:gosec // positive
}

type ending struct {
	request              uint64
	computed             bool
	tokens, cached       int64
	output, answerTokens int64
	weight               int64
	past                 float32
}

// write writes the end. blocks are those of the answer, behind those of the prompt.
func (r *ending) write(e *Encoder, at int64, blocks []uint64) {
	e.begin(KindEnded, at)
	e.request(r.request)
	p, known := e.open[r.request]
	delete(e.open, r.request)
	answer := known && r.computed && len(blocks) > 0 && p.blocks+len(blocks) <= maxBlocks && p.depth < maxDepth
	e.flags(r.computed, answer)
	e.number(r.tokens)
	e.number(r.answerTokens)
	if answer {
		e.blocks(blocks, r.weight, r.past)
		rest, at := append(p.rest, blocks...), p.blocks-len(p.rest)
		p.prompt, p.depth = e.prompts, p.depth+1
		for whole := p.whole; len(rest) > 0; {
			n := min(markEvery, len(rest))
			whole, rest, at = span(whole, rest[:n]), rest[n:], at+n
			e.mark(place{whole, at}, &p)
		}
	}
	e.number(r.output)
	e.number(r.cached + 1)
	e.end()
}

func (e *Encoder) answered(at int64, request uint64, how kvscore.Sign, tokens int64) {
	e.begin(KindAnswered, at)
	e.request(request)
	e.fields = append(e.fields, byte(how))
	e.number(tokens + 1)
	e.end()
}

func (e *Encoder) paid(at int64, request uint64, by *Payer) {
	e.begin(KindPaid, at)
	e.request(request)
	e.fields = binary.LittleEndian.AppendUint64(e.fields, by.Tenant)
	e.number(int64(1000 * min(max(by.Weight, 0), maxWeight)))
	class := by.Class[:min(len(by.Class), maxText)]
	e.number(int64(len(class)))
	e.fields = append(e.fields, class...)
	e.end()
}

const maxWeight = 1e6

// Drained writes that the drain of a worker begins or ends, and
// after how many calls of the admin API for it.
func (e *Encoder) Drained(at int64, id uint64, drains bool, version uint64) {
	e.begin(KindDrained, at)
	e.target(kvscore.Target{Worker: id})
	e.flags(drains)
	e.number(int64(version)) //nolint:gosec // it counts from 0
	e.end()
}

// maxModels is the longest list of models in a record, in bytes.
const maxModels = 64 << 10

// Models writes a worker's list of its models. A list that is too long counts as none: a part of it
// would say that the worker lacks the rest.
func (e *Encoder) Models(at int64, id uint64, list []Model) {
	size := 0
	for i := range list {
		size += len(list[i].ID) + len(`{"id":"","adapter":true},`)
	}
	if size > maxModels {
		list = nil
	}
	e.begin(KindModels, at)
	e.target(kvscore.Target{Worker: id})
	e.json(list)
}

// Bound writes a binding, which was last used some time ago, in milliseconds.
func (e *Encoder) Bound(at int64, s *affinity.Saved) {
	if !fits(s.EngineSession) {
		return
	}
	e.begin(KindBound, at)
	e.target(s.Target)
	e.fields = append(e.fields, s.Key[:]...)
	e.number((s.TTL + time.Millisecond - 1).Milliseconds()) // so that it stays positive
	e.number(s.Idle.Milliseconds())
	e.number(int64(s.Scope))
	e.number(int64(s.Version)) //nolint:gosec // less than 2^63
	e.fields = append(append(e.fields, byte(s.Kind)), s.EngineSession...)
	e.end()
}

// key writes a record of a session's key and version only: KindUsed or KindUnbound.
func (e *Encoder) key(k Kind, at int64, s *affinity.Saved) {
	e.begin(k, at)
	e.fields = append(e.fields, s.Key[:]...)
	e.number(int64(s.Version)) //nolint:gosec // less than 2^63
	e.end()
}

// Response writes a response that an engine keeps.
func (e *Encoder) Response(at int64, one *Response, t kvscore.Target) {
	e.begin(KindResponse, at)
	e.target(t)
	e.fields = append(binary.LittleEndian.AppendUint64(e.fields, one.Hash), one.Session[:]...)
	e.end()
}
