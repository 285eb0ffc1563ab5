package events

import (
	"errors"

	"github.com/tinylib/msgp/msgp"
)

// The bounds of a batch. They are far above what engines send, and the length of the payload
// bounds everything else.
const (
	maxEvents = 1 << 16 // in a batch
	maxExtra  = 1 << 16 // extra keys in a batch
	maxBlocks = 1 << 20 // in an event
	maxTokens = 1 << 22 // in an event
	maxText   = 4096    // bytes of a name or a salt
)

// The buffers that a decoder keeps from one batch to the next, in elements: of hashes and tokens,
// and of all else. Larger ones are freed, so that one large batch does not cost memory forever.
const (
	keepNumbers = 1 << 18
	keepOthers  = 1 << 12
)

// ErrNotBatch means that a payload is not a batch of KV events, or was cut short.
var ErrNotBatch = errors.New("the payload is not a batch of KV events")

// Decoder decodes the event batches of one stream. The zero value is ready for use. A decoder
// must not be used by two goroutines at once.
//
// It reads the msgpack batches of vLLM since 0.9, of SGLang and of TensorRT-LLM. A batch and each
// of its events may be an array or a map. The decoder ignores elements and keys that it does
// not know.
//
// The steps are a file each: the batch (this one), an event as it is on the wire (wire.go), what
// it means (meaning.go). A [Recorder] then puts it into the caches (apply.go).
type Decoder struct {
	batch  Batch
	hashes []uint64
	tokens []uint32
	extra  []ExtraKey
	text   []byte // names that the payload does not contain
	group  mainGroup
}

// Reset makes the decoder forget what it has learned of the engine.
func (d *Decoder) Reset() { d.group = mainGroup{} }

// Decode decodes one payload. The batch aliases the payload and is valid until the next call.
// A bad event costs only itself and is counted in Skipped. The error is [ErrNotBatch].
func (d *Decoder) Decode(payload []byte) (*Batch, error) {
	d.clear()
	r := reader{b: payload}
	d.readBatch(&r)
	if r.bad || len(r.b) > 0 {
		return nil, ErrNotBatch
	}
	return &d.batch, nil
}

func (d *Decoder) clear() {
	clear(d.batch.Events)
	d.batch = Batch{Rank: -1, Events: kept(d.batch.Events, keepOthers)}
	clear(d.extra)
	d.extra = kept(d.extra, keepOthers)
	d.hashes = kept(d.hashes, keepNumbers)
	d.tokens = kept(d.tokens, keepNumbers)
	d.text = kept(d.text, keepOthers)
}

// kept empties a buffer, and frees it if it is larger than keep.
func kept[T any](buffer []T, keep int) []T {
	if cap(buffer) > keep {
		return nil
	}
	return buffer[:0]
}

// readBatch reads [time, events, rank], where the rank may be missing, or a map of these.
func (d *Decoder) readBatch(r *reader) {
	if r.is(msgp.MapType) {
		d.readNamedBatch(r)
		return
	}
	n := r.array()
	if n < 2 {
		r.fail()
		return
	}
	d.batch.Time = r.seconds()
	d.readEvents(r)
	if n > 2 {
		d.readRank(r)
	}
	r.skipAll(n - 3)
}

func (d *Decoder) readNamedBatch(r *reader) {
	lists := 0
	for n := r.mapping(); n > 0 && !r.bad; n-- {
		switch string(r.key()) {
		case "ts":
			d.batch.Time = r.seconds()
		case "events":
			lists++
			d.readEvents(r)
		case "data_parallel_rank", "dp_rank", "attn_dp_rank":
			d.readRank(r)
		default:
			r.skip()
		}
	}
	if lists != 1 {
		r.fail()
	}
}

// readRank reads a rank. What is not a rank counts as missing.
func (d *Decoder) readRank(r *reader) {
	if !r.isInteger() {
		r.skip()
		return
	}
	if v, minus := r.integer(); !minus && v < 1<<31 {
		d.batch.Rank = int(v)
	}
}

func (d *Decoder) readEvents(r *reader) {
	n := r.array()
	for i := 0; i < min(n, maxEvents) && !r.bad; i++ {
		d.readEvent(r)
	}
	if n > maxEvents {
		d.batch.Skipped[TooLarge] += n - maxEvents
	}
	r.skipAll(n - maxEvents)
}

// readEvent reads an event and adds it to the batch, or leaves it out.
func (d *Decoder) readEvent(r *reader) {
	begin := r.b
	hashes, tokens, extra, text := len(d.hashes), len(d.tokens), len(d.extra), len(d.text)
	w := wire{group: -1}
	d.readWire(r, &w)
	if !r.bad && d.interpret(&w) {
		if e := &w.event; e.Kind == Cleared || len(e.Hashes) > 0 {
			d.batch.Events = append(d.batch.Events, *e)
		}
		return
	}
	d.hashes, d.tokens, d.extra, d.text = d.hashes[:hashes], d.tokens[:tokens], d.extra[:extra], d.text[:text]
	d.batch.Skipped[w.why]++
	r.bad, r.b = false, begin
	r.skip() // fails if the event has no end
}
