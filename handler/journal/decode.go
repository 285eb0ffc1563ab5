package journal

import (
	"encoding/binary"
	"errors"
	"io"
	"math"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/quota"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/fxamacker/cbor/v2"
	"github.com/zeebo/xxh3"
)

// maxEntry bounds an entry, in bytes. Entries are far smaller, but for one long prompt.
const maxEntry = 4 << 20

// The records may be of another program, which must not take much memory.
var decoding, _ = cbor.DecOptions{ // the error is that of wrong options
	MaxNestedLevels: 8, MaxMapPairs: 64, MaxArrayElements: maxWorkers,
	IndefLength: cbor.IndefLengthForbidden, TagsMd: cbor.TagsForbidden, UTF8: cbor.UTF8DecodeInvalid,
	NaN: cbor.NaNDecodeForbidden, Inf: cbor.InfDecodeForbidden,
}.DecMode()

// Damage is what a reader of a log has skipped.
type Damage struct {
	Entries int // damaged, or of another version of the format
	Records int // within good entries, of which the rest is skipped, too
}

// Read is [Decoder.Read] of a log. whole is the length of its entries.
func Read(from io.Reader, each func(*Record) bool) (whole int64, skipped Damage, err error) {
	d := new(Decoder)
	whole, err = d.Read(from, each)
	return whole, d.Damage, err
}

// Decoder reads the entries of one router. The zero value is ready for use.
type Decoder struct {
	Damage Damage
	// Aborted, if it is not nil, gets each request whose end will not come.
	Aborted func(*Booking)
	// grown, if it is not nil, is called after each record. It may replace the decoder by another.
	grown func()

	rest         []byte // of the entry
	common       common // of the record
	base         int64
	lastRequest  uint64
	run          uint64
	workers      map[uint64]bool // those with an address
	prompts      []*Prompt       // by number; nil where one is unknown, and at 0
	promptMemory int64           // bytes of prompts, at least of those that are still in use
	open         map[uint64]*Booking
}

// Read passes the records of entries to each, until each returns false. A record is valid during the
// call, but its Booking, Prompt and Answer stay valid. Read skips what is damaged. At an end
// that was not written whole, it stops, and whole is the length up to there. The error is that of
// the reader. Further entries may follow with another call.
func (d *Decoder) Read(from io.Reader, each func(*Record) bool) (whole int64, err error) {
	var frame [4]byte
	for {
		if _, err = io.ReadFull(from, frame[:]); err != nil {
			return whole, unlessEnd(err)
		}
		n := binary.LittleEndian.Uint32(frame[:])
		if n == 0 || n > maxEntry {
			d.Damage.Entries++
			return whole, nil // nothing shows where the next one begins
		}
		b := make([]byte, int(n)+sumBytes)
		if _, err = io.ReadFull(from, b); err != nil {
			return whole, unlessEnd(err)
		}
		whole += int64(len(frame) + len(b))
		if !d.entry(b) {
			d.Damage.Entries++
			continue
		}
		var r Record
		for d.next(&r) {
			if !each(&r) {
				return whole, nil
			}
		}
	}
}

// Forget gives up the requests that have not ended.
func (d *Decoder) Forget() {
	if d.Aborted != nil {
		for _, b := range d.open {
			d.Aborted(b)
		}
	}
	d.open = make(map[uint64]*Booking)
}

func unlessEnd(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return nil
	}
	return err
}

const sumBytes = 8

// entry begins an entry. It returns false if that is damaged.
func (d *Decoder) entry(b []byte) bool {
	body, sum := b[:len(b)-sumBytes], b[len(b)-sumBytes:]
	if len(body) < headBytes-4 || body[0] != version || xxh3.Hash(body) != binary.LittleEndian.Uint64(sum) {
		return false
	}
	d.base, d.lastRequest = int64(binary.LittleEndian.Uint64(body[1:])), 0 //nolint:gosec // as it was written
	n := 1 + int(binary.LittleEndian.Uint32(body[9:]))
	if d.workers == nil {
		n = 1 // before KindEpoch, no record is usable
	}
	missing := max(0, n-len(d.prompts))
	if n > maxPrompts || missing > maxMissing {
		return false
	}
	d.prompts = append(d.prompts, make([]*Prompt, missing)...)[:n]
	d.rest = body[headBytes-4:]
	return true
}

// maxPrompts bounds the prompts of an epoch.
const maxPrompts = 1 << 22

// maxMissing bounds the prompts of lost entries between two others.
const maxMissing = 1 << 16

// next reads the next good record of the entry. It returns false at the end. A damaged record ends its entry:
// it may have had a prompt, so that the numbers of those behind it would be wrong.
func (d *Decoder) next(to *Record) bool {
	for {
		if d.grown != nil {
			d.grown()
		}
		if len(d.rest) == 0 {
			return false
		}
		if !d.decode(to) || len(d.prompts) > maxPrompts {
			d.rest = nil
			d.Damage.Records++
			return false
		}
		if d.link(to) {
			return true
		}
	}
}

// decode reads a record. It returns false if that is damaged. A record of an unknown kind has no body.
func (d *Decoder) decode(to *Record) bool {
	*to = Record{Kind: Kind(d.rest[0])}
	var err error
	if d.rest, err = decoding.UnmarshalFirst(d.rest[1:], &d.common); err != nil {
		return false
	}
	d.lastRequest += uint64(d.common.Request) //nolint:gosec // wraps around
	if int(to.Kind) >= len(bodies) || to.Kind == 0 {
		d.rest, err = decoding.UnmarshalFirst(d.rest, new(cbor.RawMessage))
		return err == nil
	}
	to.Body = bodies[to.Kind]()
	d.rest, err = decoding.UnmarshalFirst(d.rest, to.Body)
	to.At, to.Request = time.UnixMilli(d.base+d.common.After), d.lastRequest
	to.Target = kvscore.Target{Worker: d.common.Worker, Rank: d.common.Rank}
	return err == nil && isSound(to.Body)
}

// link links a record to those before. It returns false if its kind, worker or request is unknown.
func (d *Decoder) link(r *Record) (usable bool) {
	known := d.workers[r.Target.Worker] // else the entry with its address is lost
	switch b := r.Body.(type) {
	case *Head:
		d.workers, d.prompts = make(map[uint64]bool), make([]*Prompt, 1)
		if d.run != b.Run || d.open == nil {
			d.run = b.Run
			d.Forget()
		}
		d.promptMemory = d.inUse()
	case *Address:
		if d.workers == nil || len(d.workers) == maxWorkers {
			return false
		}
		d.workers[r.Target.Worker] = true
	case *Booking:
		d.linkBooking(r, b, known)
		return known
	case *Answered, *Payer, *End: // unknown if it began before the log
		if r.Booking = d.open[r.Request]; r.Booking != nil {
			r.Target = r.Booking.Target
		}
		if end, over := b.(*End); over {
			d.linkEnd(r, end)
		}
		return r.Booking != nil
	}
	return r.Body != nil && (known || !r.Kind.ofWorker())
}

func (d *Decoder) linkBooking(r *Record, b *Booking, known bool) {
	b.At, b.Target, r.Booking = r.At, r.Target, b
	if p := b.Prompt; p != nil { // also without a worker, so that the numbers stay right
		var parent *Prompt
		if p.ParentNumber < len(d.prompts) {
			parent = d.prompts[p.ParentNumber]
		}
		b.Prompt = d.add(p, parent)
	}
	if !known {
		return
	}
	if len(d.open) == maxOpen {
		d.Forget() // no router has so many requests
	}
	if twice := d.open[r.Request]; twice != nil && d.Aborted != nil {
		d.Aborted(twice)
	}
	d.open[r.Request] = b
}

// maxOpen bounds the requests that have begun and not ended.
const maxOpen = 1 << 20

// add gives a prompt its number, and what it shares with an earlier one. It returns nil if that is unknown.
func (d *Decoder) add(p, parent *Prompt) *Prompt {
	switch {
	case p.Len() > maxBlocks, p.Shares > 0 && (parent == nil || p.Shares > parent.Len() || parent.depth >= maxDepth):
		p = nil
	case parent != nil:
		p.parent, p.Root, p.depth = parent, parent.Root, parent.depth+1
	}
	if d.prompts = append(d.prompts, p); p != nil {
		d.promptMemory += p.bytes()
	}
	return p
}

// About the memory of a prompt without its blocks, of a request that has not ended, with its lease,
// and of a worker, in bytes.
const promptBytes, bookingBytes, workerBytes = 104, 1 << 10, 100

func (p *Prompt) bytes() int64 { return promptBytes + int64(len(p.Blocks)) }

func (d *Decoder) bytes() int64 {
	return d.promptMemory + 8*int64(cap(d.prompts)) + bookingBytes*int64(len(d.open)) + workerBytes*int64(len(d.workers))
}

func (d *Decoder) inUse() (n int64) {
	seen := make(map[*Prompt]bool)
	for _, b := range d.open {
		for p := b.Prompt; p != nil && !seen[p]; p = p.parent {
			seen[p] = true
			n += p.bytes()
		}
	}
	return n
}

func (d *Decoder) linkEnd(r *Record, end *End) {
	delete(d.open, r.Request)
	answer := end.Answer
	if answer == nil {
		return
	}
	var prompt *Prompt
	if answer.Shares = 1; r.Booking != nil && r.Booking.Prompt != nil { // 1: of an unknown one
		prompt, answer.Shares = r.Booking.Prompt, r.Booking.Prompt.Len()
	}
	end.Answer = d.add(answer, prompt)
}

// Lengths and numbers that a record may have.
const (
	maxText    = 2048 // bytes of an address, or of an engine's session id with its tenant's prefix
	maxWorkers = 1 << 16
	maxModels  = 64 << 10 // memory of a list of models, in bytes
	modelBytes = 24       // of that, one of them without its id
	maxLevels  = 64
	maxWeight  = 1e6
)

// isSound returns whether the body of a record is within the bounds.
func isSound(body any) bool {
	switch b := body.(type) {
	case *Head:
		return len(b.Name) <= maxText
	case *Address:
		return len(*b) <= maxText
	case *Booking:
		return min(b.Tokens, b.Expected, int64(b.Matched)) >= 0 && b.Matched <= math.MaxInt32 && b.Phase <= kvscore.PhaseDecode && b.Prompt.isSound()
	case *Answered:
		return b.Tokens >= -1
	case *Payer:
		return len(b.Class) <= maxText && b.Weight >= 0 && b.Weight <= maxWeight
	case *End:
		return min(b.Tokens, b.Output, b.AnswerTokens) >= 0 && b.Cached >= -1 && b.Answer.isSound()
	case *affinity.Saved:
		return b.Kind <= affinity.Fixed && len(b.EngineSession) <= maxText
	case *[]Model:
		size := 0
		for i := range *b {
			size += len((*b)[i].ID) + modelBytes
		}
		return size <= maxModels
	case *quota.Change:
		return b.Running >= -1 && b.Running <= 1 && b.Age >= 0
	case *quota.State:
		return len(b.Levels) <= maxLevels && !slices.ContainsFunc(b.Levels, func(l quota.Level) bool { return min(l.Used, l.Period) < 0 })
	}
	return true
}

func (p *Prompt) isSound() bool {
	return p == nil || p.ParentNumber >= 0 && p.Shares >= 0 && p.Shares <= maxBlocks && len(p.Blocks)%8 == 0 &&
		p.Weight >= 0 && p.Weight <= math.MaxInt32 && p.Past >= 0 && p.Past <= 1
}
