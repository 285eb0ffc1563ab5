package snapshot

import (
	"encoding/binary"
	"math"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// Kind is the kind of a record.
type Kind byte

// The kinds of records. Workers come first, and the others name them by their number in
// that order.
const (
	KindWorker Kind = iota + 1
	KindBinding
	KindChain
	KindResponse
	KindLearned
	KindTarget // what was learned of a target
	KindRatios
)

// Worker is a worker by its address: its id may change.
type Worker struct {
	Dial      string
	Life      string    // what the engine reported of its start, empty if nothing
	Seen      time.Time // when it was last an upstream
	Confirmed int       // predictions of its cached tokens that were right, at most 255
}

// Target is a rank of the worker with that number.
type Target struct {
	Worker int
	Rank   uint32
}

// Response is a response that an engine keeps.
type Response struct {
	Hash    uint64 // of its id
	Session affinity.Identity
}

// Record is one record. Only the fields of its kind are set.
type Record struct {
	Kind     Kind
	Target   Target // of a binding, a chain, a response or a learned target; see there
	Worker   Worker
	Binding  affinity.Saved // without its target
	Chain    cache.Chain    // valid until the next record; without its slot
	Response Response
	Learned  kvscore.Learned       // without its targets
	Of       kvscore.LearnedTarget // without its target
	Ratios   kvscore.ModelRatios
}

// Lengths and numbers that a record may have.
const (
	maxText    = 2048 // bytes of an address, a life, or an engine's session id with its tenant's prefix
	maxWorkers = 1 << 16
	maxRank    = 1 << 16
)

// Fits reports whether a text is short enough for a record.
func Fits(text string) bool { return len(text) <= maxText }

func appendText(b []byte, text string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(text))), text...)
}

func (r *reader) text() string { return string(r.bytes(r.small(maxText))) }

func appendTarget(b []byte, t Target) []byte {
	b = binary.AppendUvarint(b, uint64(t.Worker)) //nolint:gosec // positive
	return binary.AppendUvarint(b, uint64(t.Rank))
}

func (r *reader) target() Target {
	return Target{r.small(maxWorkers), uint32(r.small(maxRank))} //nolint:gosec // bounded
}

func appendFloats(b []byte, values ...float64) []byte {
	for _, v := range values {
		b = binary.LittleEndian.AppendUint64(b, math.Float64bits(v))
	}
	return b
}

func (r *reader) floats(to ...*float64) {
	for _, v := range to {
		*v = math.Float64frombits(r.fixed())
	}
}

// millis reads a time in milliseconds.
func (r *reader) millis() time.Duration {
	return time.Duration(r.small(math.MaxInt64/int(time.Millisecond))) * time.Millisecond
}

func appendMillis(b []byte, d time.Duration) []byte {
	return binary.AppendUvarint(b, uint64(max(0, d.Milliseconds()))) //nolint:gosec // positive
}

func appendWorker(b []byte, w *Worker) []byte {
	b = appendText(append(b, byte(KindWorker)), w.Dial)
	b = appendText(b, w.Life)
	b = binary.AppendVarint(b, w.Seen.UnixMilli())
	return append(b, byte(min(w.Confirmed, 255)))
}

func (r *reader) worker(to *Worker) {
	to.Dial, to.Life = r.text(), r.text()
	to.Seen = time.UnixMilli(r.varint())
	if b := r.bytes(1); b != nil {
		to.Confirmed = int(b[0])
	}
}

// appendBinding keeps milliseconds. A time to live is rounded up, so that it stays positive.
func appendBinding(b []byte, s *affinity.Saved, t Target) []byte {
	b = append(append(b, byte(KindBinding)), s.Key[:]...)
	b = appendTarget(b, t)
	b = appendMillis(b, s.TTL+time.Millisecond-1)
	b = appendMillis(b, s.Idle)
	b = binary.AppendUvarint(b, uint64(s.Scope))
	b = append(b, byte(s.Kind))
	return appendText(b, s.EngineSession)
}

func (r *reader) binding(to *affinity.Saved) (t Target) {
	copy(to.Key[:], r.bytes(len(to.Key)))
	t = r.target()
	to.TTL, to.Idle = r.millis(), r.millis()
	to.Scope = uint32(r.small(math.MaxUint32)) //nolint:gosec // bounded
	to.Kind = affinity.Kind(r.small(int(affinity.Fixed)))
	to.EngineSession = r.text()
	return t
}

func appendResponse(b []byte, one *Response, t Target) []byte {
	b = binary.LittleEndian.AppendUint64(append(b, byte(KindResponse)), one.Hash)
	return append(appendTarget(b, t), one.Session[:]...)
}

func (r *reader) response(to *Response) (t Target) {
	to.Hash = r.fixed()
	t = r.target()
	copy(to.Session[:], r.bytes(len(to.Session)))
	return t
}

func appendLearned(b []byte, l *kvscore.Learned) []byte {
	b = appendFloats(append(b, byte(KindLearned)), l.Latency[:]...)
	b = appendFloats(appendFloats(b, l.Squares[:]...), l.Products[:]...)
	b = appendFloats(b, l.Continued, l.TurnTime, l.Answer, l.Capacity)
	for _, n := range []uint64{l.Samples, l.Requests, l.Continuing, l.Answers} {
		b = binary.AppendUvarint(b, n)
	}
	return b
}

func (r *reader) learned(to *kvscore.Learned) {
	for _, list := range [][]float64{to.Latency[:], to.Squares[:], to.Products[:]} {
		for i := range list {
			r.floats(&list[i])
		}
	}
	r.floats(&to.Continued, &to.TurnTime, &to.Answer, &to.Capacity)
	to.Samples, to.Requests, to.Continuing, to.Answers = r.uvarint(), r.uvarint(), r.uvarint(), r.uvarint()
}

func appendLearnedTarget(b []byte, l *kvscore.LearnedTarget, t Target) []byte {
	b = appendTarget(append(b, byte(KindTarget)), t)
	b = binary.AppendUvarint(b, uint64(max(0, l.Declared))) //nolint:gosec // positive
	b = appendMillis(appendFloats(b, l.Capacity, l.Slowness), l.Age)
	return binary.AppendUvarint(b, l.Samples)
}

func (r *reader) learnedTarget(to *kvscore.LearnedTarget) (t Target) {
	t = r.target()
	to.Declared = int64(r.small(math.MaxInt))
	r.floats(&to.Capacity, &to.Slowness)
	to.Age = r.millis()
	to.Samples = r.uvarint()
	return t
}

// appendRatios keeps single precision.
func appendRatios(b []byte, m *kvscore.ModelRatios) []byte {
	b = binary.LittleEndian.AppendUint64(append(b, byte(KindRatios)), m.Name)
	for _, v := range m.Tokens {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(float32(v)))
	}
	return b
}

func (r *reader) ratios(to *kvscore.ModelRatios) {
	to.Name = r.fixed()
	for i := range to.Tokens {
		if b := r.bytes(4); b != nil {
			to.Tokens[i] = float64(math.Float32frombits(binary.LittleEndian.Uint32(b)))
		}
	}
}
