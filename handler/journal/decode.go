package journal

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"math"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/zeebo/xxh3"
)

// maxEntry bounds an entry, in bytes. Entries are far smaller, but for one long prompt.
const maxEntry = 4 << 20

// Damage is what a reader of a log has skipped.
type Damage struct {
	Entries int // damaged, or of another version of the format
	Records int // within good entries
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
	// Lost, if it is not nil, gets each request whose end will not be told.
	Lost func(*Booking)
	// grown, if it is not nil, is called after each record. It may replace the decoder by another.
	grown func()

	rest    reader // of the entry
	base    int64
	run     uint64
	workers map[int]bool // by number
	prompts []*Prompt    // by number; nil where one is unknown, and at 0
	held    int64        // bytes of prompts, at least of those that are still in use
	open    map[uint64]*Booking
	last    uint64
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
	if d.Lost != nil {
		for _, b := range d.open {
			d.Lost(b)
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
	body := b[:len(b)-sumBytes]
	if body[0] != version || xxh3.Hash(body) != binary.LittleEndian.Uint64(b[len(body):]) {
		return false
	}
	d.rest, d.last = reader{b: body[1:]}, 0
	d.base = d.rest.varint()
	n := 1 + d.rest.small(maxPrompts)
	if d.workers == nil {
		n = 1 // before KindBegin, no record is usable
	}
	switch missing := n - len(d.prompts); {
	case missing > maxMissing:
		return false
	case missing > 0:
		d.prompts = append(d.prompts, make([]*Prompt, missing)...)
	}
	d.prompts = d.prompts[:n]
	return !d.rest.failed
}

// maxPrompts bounds the prompts between two KindBegin records.
const maxPrompts = 1 << 22

// maxMissing bounds the prompts of lost entries between two others.
const maxMissing = 1 << 16

// next reads the next good record of the entry. It returns false at the end.
func (d *Decoder) next(to *Record) bool {
	for {
		if d.grown != nil {
			d.grown()
		}
		if len(d.rest.b) == 0 {
			return false
		}
		kind := Kind(d.rest.bytes(1)[0])
		r := reader{b: d.rest.bytes(d.rest.small(maxEntry))}
		if d.rest.failed {
			d.Damage.Records++
			return false
		}
		*to = Record{Kind: kind, At: time.UnixMilli(d.base + r.varint())}
		switch usable := d.record(&r, to); {
		case r.failed:
			d.Damage.Records++
		case usable:
			return true
		}
	}
}

// record reads the fields of a record. It returns false if its kind or its worker is unknown.
func (d *Decoder) record(r *reader, to *Record) (usable bool) {
	switch to.Kind {
	case KindBegin:
		if r.json(&to.Head); len(to.Head.Name) > maxText {
			r.fail()
			return true
		}
		d.workers, d.prompts = make(map[int]bool), make([]*Prompt, 1)
		if d.run != to.Head.Run || d.open == nil {
			d.run = to.Head.Run
			d.Forget()
		}
		d.held = d.inUse()
	case KindWorker:
		to.Target.Worker = r.small(maxWorkers)
		if to.Dial = r.text(); !r.failed && d.workers != nil {
			d.workers[to.Target.Worker] = true
		}
	case KindBooked:
		return d.booked(r, to)
	case KindEnded:
		return d.ended(r, to)
	case KindBound:
		known := d.target(r, &to.Target)
		r.binding(&to.Binding)
		return known
	case KindUsed, KindUnbound:
		copy(to.Binding.Key[:], r.bytes(len(affinity.Key{})))
		to.Binding.Version = affinity.Version(r.count()) //nolint:gosec // positive
	case KindPaid:
		to.Paid.Booking = d.open[d.request(r)]
		to.Paid.Tenant, to.Paid.Weight = r.fixed(), float64(r.small(1000*maxWeight))/1000
		to.Paid.Class = string(r.bytes(r.small(maxText)))
		if to.Paid.Booking != nil {
			to.Target = to.Paid.Target
		}
		return to.Paid.Booking != nil
	case KindAnswered:
		to.Answered = Answered{d.open[d.request(r)], kvscore.Sign(r.small(math.MaxUint8)), r.count() - 1}
		if to.Answered.Booking != nil {
			to.Target = to.Answered.Target
		}
		return to.Answered.Booking != nil
	case KindDrained:
		known := d.target(r, &to.Target)
		to.Drained = r.flags()&1 != 0
		to.Version = uint64(r.count()) //nolint:gosec // positive
		return known
	case KindResponse:
		known := d.target(r, &to.Target)
		to.Response.Hash = r.fixed()
		copy(to.Response.Session[:], r.bytes(len(affinity.Identity{})))
		return known
	case KindLost:
		return d.target(r, &to.Target)
	case KindModels:
		known := d.target(r, &to.Target)
		if len(r.b) > 8*maxModels { // with escapes
			r.fail()
			return true
		}
		r.json(&to.Models)
		return known
	case KindState:
		r.json(&to.State)
	case KindQuota:
		to.Quota = r.change()
	case KindTenant:
		to.Tenant = r.tenant()
	default:
		return false
	}
	return true
}

// target reads a target. It reports whether the worker is known: its entry may be lost.
func (d *Decoder) target(r *reader, to *Target) (known bool) {
	*to = Target{r.small(maxWorkers), uint32(r.small(maxRank))} //nolint:gosec // bounded
	return d.workers[to.Worker]
}

func (d *Decoder) request(r *reader) uint64 {
	d.last += uint64(r.varint()) //nolint:gosec // wraps around
	return d.last
}

func (d *Decoder) booked(r *reader, to *Record) (usable bool) {
	id, b := d.request(r), &Booking{At: to.At}
	usable = d.target(r, &b.Target)
	b.Tokens, b.Expected, b.Matched = r.count(), r.count(), r.small(math.MaxInt32)
	flags := r.flags()
	b.Streamed, b.Text = flags&1 != 0, flags&2 != 0
	switch {
	case flags&4 != 0:
		b.Phase = kvscore.PhasePrefill
	case flags&8 != 0:
		b.Phase = kvscore.PhaseDecode
	}
	if len(r.b) > 0 {
		b.Prompt = d.prompt(r) // also without a worker, so that the numbers stay right
	}
	if !usable || r.failed {
		return false
	}
	if len(d.open) == maxOpen {
		d.Forget() // no router has so many requests
	}
	if twice := d.open[id]; twice != nil && d.Lost != nil {
		d.Lost(twice)
	}
	d.open[id] = b
	to.Target, to.Booking = b.Target, b
	return true
}

// maxOpen bounds the requests that have begun and not ended.
const maxOpen = 1 << 20

// prompt reads a prompt. It is nil if what it shares is unknown.
func (d *Decoder) prompt(r *reader) *Prompt {
	p := new(Prompt)
	at := r.small(maxPrompts)
	if at == 0 {
		p.root = r.fixed()
		return d.add(r, p)
	}
	p.shares = r.small(maxBlocks)
	if at < len(d.prompts) {
		p.up = d.prompts[at]
	}
	return d.add(r, p)
}

// add reads the blocks of a prompt, and gives it a number.
func (d *Decoder) add(r *reader, p *Prompt) *Prompt {
	raw := r.bytes(8 * r.small(maxBlocks))
	p.Weight, p.Past = int64(r.small(math.MaxInt32)), float32(r.small(math.MaxUint16))/(1<<16)
	switch {
	case r.failed || len(d.prompts) > maxPrompts:
		r.fail()
		p = nil
	case p.shares > 0 && (p.up == nil || p.shares > p.up.Len() || p.up.depth >= maxDepth):
		p = nil
	case p.shares+len(raw)/8 > maxBlocks:
		p = nil
	default:
		p.blocks = make([]uint64, len(raw)/8)
		for i := range p.blocks {
			p.blocks[i] = binary.LittleEndian.Uint64(raw[8*i:])
		}
		if p.up != nil {
			p.root, p.depth = p.up.root, p.up.depth+1
		}
	}
	if d.prompts = append(d.prompts, p); p != nil {
		d.held += p.bytes()
	}
	return p
}

// About the memory of a prompt without its blocks, of a request that has not ended, with its lease,
// and of a worker, in bytes.
const promptBytes, bookingBytes, workerBytes = 104, 1 << 10, 100

func (p *Prompt) bytes() int64 { return promptBytes + 8*int64(len(p.blocks)) }

func (d *Decoder) bytes() int64 {
	return d.held + 8*int64(cap(d.prompts)) + bookingBytes*int64(len(d.open)) + workerBytes*int64(len(d.workers))
}

func (d *Decoder) inUse() (n int64) {
	seen := make(map[*Prompt]bool)
	for _, b := range d.open {
		for p := b.Prompt; p != nil && !seen[p]; p = p.up {
			seen[p] = true
			n += p.bytes()
		}
	}
	return n
}

func (d *Decoder) ended(r *reader, to *Record) (usable bool) {
	id := d.request(r)
	b := d.open[id]
	flags := r.flags()
	to.End = End{Booking: b, Computed: flags&1 != 0, Tokens: r.count(), AnswerTokens: r.count()}
	if flags&2 != 0 {
		p := &Prompt{shares: 1} // of an unknown one
		if b != nil && b.Prompt != nil {
			p.up, p.shares = b.Prompt, b.Prompt.Len()
		}
		to.End.Answer = d.add(r, p)
	}
	to.End.Output, to.End.Cached = r.count(), r.count()-1
	if b == nil || r.failed {
		return false // it began before the log, or the record is damaged
	}
	delete(d.open, id)
	to.Target = b.Target
	return true
}

// Lengths and numbers that a record may have.
const (
	maxText    = 2048 // bytes of an address, or of an engine's session id with its tenant's prefix
	maxWorkers = 1 << 16
	maxRank    = 1 << 16
)

func fits(text string) bool { return len(text) <= maxText }

func (r *reader) binding(to *affinity.Saved) {
	copy(to.Key[:], r.bytes(len(to.Key)))
	to.TTL, to.Idle = r.millis(), r.millis()
	to.Scope = uint32(r.small(math.MaxUint32)) //nolint:gosec // bounded
	to.Version = affinity.Version(r.count())   //nolint:gosec // positive
	to.Kind = affinity.Kind(r.small(int(affinity.Fixed)))
	to.EngineSession = r.text()
}

// reader reads the fields of a record. After a failure it returns zeroes.
type reader struct {
	b      []byte
	failed bool
}

func (r *reader) fail() {
	r.b, r.failed = nil, true
}

func (r *reader) varint() int64 {
	v, n := binary.Varint(r.b)
	if n <= 0 {
		r.fail()
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *reader) small(most int) int {
	v, n := binary.Uvarint(r.b)
	if n <= 0 || v > uint64(most) { //nolint:gosec // positive
		r.fail()
		return 0
	}
	r.b = r.b[n:]
	return int(v) //nolint:gosec // bounded
}

func (r *reader) count() int64 { return int64(r.small(math.MaxInt)) }

func (r *reader) flags() byte {
	if b := r.bytes(1); b != nil {
		return b[0]
	}
	return 0
}

func (r *reader) fixed() uint64 {
	if b := r.bytes(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// bytes returns the next n bytes, nil if there are fewer.
func (r *reader) bytes(n int) []byte {
	if n > len(r.b) {
		r.fail()
		return nil
	}
	b := r.b[:n]
	r.b = r.b[n:]
	return b
}

// text returns the rest, which is a text.
func (r *reader) text() string {
	if len(r.b) > maxText {
		r.fail()
	}
	return string(r.bytes(len(r.b)))
}

// json reads the rest, which is JSON.
func (r *reader) json(to any) {
	if json.Unmarshal(r.bytes(len(r.b)), to) != nil {
		r.fail()
	}
}

func (r *reader) millis() time.Duration {
	return time.Duration(r.small(math.MaxInt64/int(time.Millisecond))) * time.Millisecond
}
