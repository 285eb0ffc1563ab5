package journal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"github.com/fxamacker/cbor/v2"
	"github.com/zeebo/xxh3"
)

// markEvery is the distance, in blocks, of the places in a prompt up to which others can share it.
// Its end is such a place, too, and where it was new.
const markEvery = 64

// An encoder's records are CBOR without numbers that are no numbers, which would spread.
var encoding, _ = cbor.EncOptions{ // the error is that of wrong options
	ShortestFloat: cbor.ShortestFloat16, NaNConvert: cbor.NaNConvertReject, InfConvert: cbor.InfConvertReject,
}.UserBufferEncMode()

// Encoder writes records of one run into entries. The zero value is ready for StartEpoch.
type Encoder struct {
	base        int64        // the entry's time, Unix milliseconds
	lastRequest uint64       // number of its last request
	entry       bytes.Buffer // its head and its records

	// scratch
	common  common
	booking Booking
	end     End
	prompt  Prompt
	packed  []byte
	rest    []uint64
	path    []place // see share
	whole   uint64  // hash up to the last place of markEvery

	run     uint64
	workers map[uint64]bool // those with an address
	prompts int             // of the epoch
	marks   map[uint64]mark
	open    map[uint64]openPrompt // requests that have not ended
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

// openPrompt is the prompt of a request that has not ended.
type openPrompt struct {
	prompt, blocks, depth int
	rest                  []uint64 // of the blocks, those behind the last place of markEvery
	whole                 uint64   // hash of all before
}

// maxMarks bounds the memory of an encoder, about 40 bytes each.
const maxMarks = 1 << 20

// Full says that it is time for StartEpoch, because the encoder takes much memory.
func (e *Encoder) Full() bool { return len(e.marks) > maxMarks }

// Entry returns what was written since the last Entry, as one entry; nil if that is nothing. It is
// valid until the next write.
func (e *Encoder) Entry() []byte {
	b := e.entry.Bytes()
	if len(b) == 0 {
		return nil
	}
	e.entry.Reset()
	binary.LittleEndian.PutUint32(b, uint32(len(b)-4)) //nolint:gosec // less than maxEntry
	return binary.LittleEndian.AppendUint64(b, xxh3.Hash(b[4:]))
}

// headBytes are the bytes of an entry before its records.
const headBytes = 4 + 1 + 8 + 4

// Write writes a record, and the blocks of its prompt. It does not write one of a worker whose address is
// unknown, nor one that no reader would take. A list of models that is too long counts as none.
func (e *Encoder) Write(r *Record, blocks []uint64) {
	body := r.Body
	if !isSound(body) {
		if r.Kind != KindModels {
			return
		}
		body = new([]Model) // a part of the list would say that the worker lacks the rest
	}
	if r.Kind.ofWorker() && !e.workers[r.Target.Worker] {
		return
	}
	at := r.At.UnixMilli()
	if e.entry.Len() == 0 {
		e.base, e.lastRequest = at, 0
		head := append(make([]byte, 4, headBytes), version)
		head = binary.LittleEndian.AppendUint64(head, uint64(at))                //nolint:gosec // restored as it was
		e.entry.Write(binary.LittleEndian.AppendUint32(head, uint32(e.prompts))) //nolint:gosec // bounded
	}
	e.common = common{After: at - e.base, Worker: r.Target.Worker, Rank: r.Target.Rank}
	if r.Request != 0 {
		e.common.Request = int64(r.Request - e.lastRequest) //nolint:gosec // wraps around
		e.lastRequest = r.Request
	}
	switch b := body.(type) {
	case *Booking:
		body = e.encodeBooking(r.Request, b, blocks[:min(len(blocks), maxBlocks)])
	case *End:
		body = e.encodeEnd(r.Request, b, blocks)
	}
	before := e.entry.Len()
	e.entry.WriteByte(byte(r.Kind))
	if errors.Join(encoding.MarshalToBuffer(&e.common, &e.entry), encoding.MarshalToBuffer(body, &e.entry)) != nil {
		e.entry.Truncate(before) // a number is infinite
	}
	if e.entry.Len() > entryBytes && e.out != nil {
		e.out(e.Entry())
	}
}

// NewRun has the next epoch start a run of its own. Requests under way are given up.
func (e *Encoder) NewRun() { e.run, e.open = rand.Uint64(), nil } //nolint:gosec // only differs

// StartEpoch writes a KindEpoch record. The ids of workers and the numbers of prompts start anew. Requests go on.
func (e *Encoder) StartEpoch(at time.Time, h *Head) {
	e.workers, e.marks = make(map[uint64]bool), make(map[uint64]mark)
	if e.prompts = 0; e.open == nil {
		e.open = make(map[uint64]openPrompt)
	}
	own := *h
	own.Run = e.run
	e.Write(&Record{Kind: KindEpoch, At: at, Body: &own}, nil)
}

// Worker writes the address of a worker, if it is not written yet. An empty address is none.
func (e *Encoder) Worker(at time.Time, id uint64, dial string) {
	if dial == "" || len(dial) > maxText || len(e.workers) == maxWorkers || e.workers[id] {
		return
	}
	e.workers[id] = true
	e.Write(&Record{Kind: KindWorker, At: at, Target: kvscore.Target{Worker: id}, Body: new(Address(dial))}, nil)
}

// encodeBooking gives the prompt of a booking a number, and what it shares with an earlier one.
func (e *Encoder) encodeBooking(request uint64, from *Booking, blocks []uint64) *Booking {
	b, p := &e.booking, &e.prompt
	*b = *from
	if b.Prompt = nil; len(blocks) == 0 {
		return b
	}
	*p, b.Prompt = *from.Prompt, p
	shared := e.share(p.Root, b.Matched, blocks)
	if p.ParentNumber, p.Shares = int(shared.prompt), int(shared.blocks); p.ParentNumber > 0 {
		p.Root = 0
	}
	p.Blocks = e.pack(blocks[p.Shares:])
	rest := blocks[len(blocks)/markEvery*markEvery:]
	t := openPrompt{e.prompts, len(blocks), int(shared.depth) + 1, slices.Clone(rest), e.whole}
	for _, at := range e.path {
		if _, known := e.marks[at.hash]; !known && at.blocks > p.Shares {
			e.mark(at, &t)
		}
	}
	e.open[request] = t
	return b
}

// pack returns blocks as a prompt has them, which gets a number.
func (e *Encoder) pack(blocks []uint64) []byte {
	e.prompts++
	e.packed = e.packed[:0]
	for _, b := range blocks {
		e.packed = binary.LittleEndian.AppendUint64(e.packed, b)
	}
	return e.packed
}

func (e *Encoder) mark(at place, t *openPrompt) {
	e.marks[at.hash] = mark{uint32(t.prompt), uint32(at.blocks), uint16(t.depth)} //nolint:gosec // bounded
}

// share returns the earlier prompt with the longest common beginning, as far as the marks show
// it. It leaves the places of the prompt in path.
func (e *Encoder) share(root uint64, matched int, blocks []uint64) (longest mark) {
	e.path = e.path[:0]
	e.whole = cache.Mix(root)
	for at := 0; at < len(blocks); at += markEvery {
		end := min(at+markEvery, len(blocks))
		if matched > at && matched < end {
			e.pass(&longest, place{span(e.whole, blocks[at:matched]), matched})
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

// encodeEnd gives the answer of a request a number, and what its prompt's others can share with it. blocks are
// those of the answer, behind those of the prompt.
func (e *Encoder) encodeEnd(request uint64, from *End, blocks []uint64) *End {
	t, known := e.open[request]
	delete(e.open, request)
	end, answer := &e.end, &e.prompt
	*end = *from
	if end.Answer = nil; !known || !end.Computed || len(blocks) == 0 || t.blocks+len(blocks) > maxBlocks || t.depth >= maxDepth {
		return end
	}
	*answer, end.Answer = *from.Answer, answer
	answer.Blocks = e.pack(blocks)
	e.rest = append(append(e.rest[:0], t.rest...), blocks...)
	rest, at := e.rest, t.blocks-len(t.rest)
	t.prompt, t.depth = e.prompts, t.depth+1
	for whole := t.whole; len(rest) > 0; {
		n := min(markEvery, len(rest))
		whole, rest, at = span(whole, rest[:n]), rest[n:], at+n
		e.mark(place{whole, at}, &t)
	}
	return end
}
