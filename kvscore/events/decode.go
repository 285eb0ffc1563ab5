package events

import "errors"

// The bounds of a batch. They are far above what engines send, and the length of the payload
// bounds everything else.
const (
	maxEvents = 1 << 16 // in a batch
	maxBlocks = 1 << 20 // in an event
	maxTokens = 1 << 22 // in an event
	maxText   = 4096    // bytes of a name or a salt
)

// The buffers that a decoder keeps from one batch to the next, in elements. Larger ones are
// freed, so that one large batch does not cost memory forever.
const (
	keepEvents = 1 << 12
	keepHashes = 1 << 16
	keepTokens = 1 << 19
	keepExtra  = 1 << 12
	keepText   = 1 << 12
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
// Some engines keep several groups of attention layers and publish the blocks of each group
// under equal names. The decoder delivers only the first group that an event marks as full
// attention, and group 0 as long as no event marks one. The decoder remembers that group,
// because a removal has only the group's number. Call [Decoder.Reset] when the engine restarts.
type Decoder struct {
	batch  Batch
	hashes []uint64
	tokens []uint32
	extra  []ExtraKey
	text   []byte // names that the payload does not contain
	unique unique
	group  mainGroup
}

// Reset makes the decoder forget what it has learned of the engine.
func (d *Decoder) Reset() { d.group = mainGroup{} }

// Decode decodes one payload. The batch aliases the payload and is valid until the next call.
// A bad event costs only itself and is counted in Skipped. The error is [ErrNotBatch].
func (d *Decoder) Decode(payload []byte) (*Batch, error) {
	d.clear()
	r := reader{b: payload}
	if !d.readBatch(&r) || r.i != len(payload) {
		return nil, ErrNotBatch
	}
	return &d.batch, nil
}

// clear empties the buffers.
func (d *Decoder) clear() {
	clear(d.batch.Events)
	d.batch = Batch{Rank: -1, Events: kept(d.batch.Events, keepEvents)}
	clear(d.extra)
	d.extra = kept(d.extra, keepExtra)
	d.hashes = kept(d.hashes, keepHashes)
	d.tokens = kept(d.tokens, keepTokens)
	d.text = kept(d.text, keepText)
}

// kept empties a buffer, and frees it if it is larger than keep.
func kept[T any](buffer []T, keep int) []T {
	if cap(buffer) > keep {
		return nil
	}
	return buffer[:0]
}

// readBatch reads [time, events, rank], where the rank may be missing, or a map of these.
func (d *Decoder) readBatch(r *reader) (ok bool) {
	if isMap(r.lead()) {
		return d.readNamedBatch(r)
	}
	n, ok := r.array()
	if !ok || n < 2 {
		return false
	}
	if d.batch.Time, ok = r.seconds(); !ok || !d.readEvents(r) {
		return false
	}
	if n > 2 && !d.readRank(r) {
		return false
	}
	return r.skipAll(n - 3)
}

func (d *Decoder) readNamedBatch(r *reader) bool {
	n, ok := r.mapping()
	if !ok {
		return false
	}
	found := false
	for range n {
		key, ok := r.key()
		if !ok {
			return false
		}
		switch string(key) {
		case "ts":
			d.batch.Time, ok = r.seconds()
		case "events":
			ok = !found && d.readEvents(r)
			found = true
		case "data_parallel_rank", "dp_rank", "attn_dp_rank":
			ok = d.readRank(r)
		default:
			ok = r.skip()
		}
		if !ok {
			return false
		}
	}
	return found
}

// key reads a map's key; nil if it is not a string.
func (r *reader) key() ([]byte, bool) {
	switch c := r.lead(); {
	case c >= fixStr && c < null:
		r.i++
		return r.bytes(uint64(c & 31))
	case isText(c):
		return r.text()
	}
	return nil, r.skip()
}

// skipAll skips n values, none if n is negative.
func (r *reader) skipAll(n int) bool {
	for ; n > 0; n-- {
		if !r.skip() {
			return false
		}
	}
	return true
}

// readRank reads a rank. What is not a rank counts as missing.
func (d *Decoder) readRank(r *reader) bool {
	if !isInteger(r.lead()) {
		return r.skip()
	}
	v, minus, ok := r.integer()
	if !minus && v < 1<<31 {
		d.batch.Rank = int(v)
	}
	return ok
}

func (d *Decoder) readEvents(r *reader) bool {
	n, ok := r.array()
	if !ok {
		return false
	}
	for range min(n, maxEvents) {
		if !d.readEvent(r) {
			return false
		}
	}
	if n > maxEvents {
		d.batch.Skipped[TooLarge] += n - maxEvents
	}
	return r.skipAll(n - maxEvents)
}

// readEvent reads an event and adds it to the batch. It returns false only if the end of the
// event cannot be found.
func (d *Decoder) readEvent(r *reader) bool {
	start := r.i
	hashes, tokens, extra, text := len(d.hashes), len(d.tokens), len(d.extra), len(d.text)
	w := wire{group: -1}
	if d.parse(r, &w) {
		if e := &w.event; e.Kind == Cleared || len(e.Hashes) > 0 {
			d.batch.Events = append(d.batch.Events, *e)
		}
		return true
	}
	d.hashes, d.tokens, d.extra, d.text = d.hashes[:hashes], d.tokens[:tokens], d.extra[:extra], d.text[:text]
	d.batch.Skipped[w.why]++
	r.i = start
	return r.skip()
}
