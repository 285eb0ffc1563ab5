package snapshot

import (
	"context"
	"fmt"
	"math/rand/v2"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// Writer writes a snapshot. It keeps one part in memory. After an error it does nothing.
type Writer struct {
	ctx    context.Context // of the one snapshot
	place  *Place
	last   *Head
	head   Head
	err    error
	bytes  int64
	buf    []byte // the part
	record []byte // scratch
	sharing
}

// NewWriter begins a snapshot. last is the head of the one before, nil if it is not known. In that
// case, a snapshot that breaks off may damage the one in the place, and parts of that may stay.
func NewWriter(ctx context.Context, p *Place, last *Head) *Writer {
	if last == nil {
		last = &Head{folder: 1}
	}
	w := &Writer{ctx: ctx, place: p, last: last, buf: make([]byte, 0, MaxValue), head: Head{id: rand.Uint64(), folder: 1 - last.folder}} //nolint:gosec // only has to differ
	w.begin()
	return w
}

func (w *Writer) begin() {
	w.buf = begin(w.buf[:0], w.head.id, w.head.parts+1)
	w.sharing.reset()
}

// flush stores the part, and begins the next one.
func (w *Writer) flush() {
	if w.err == nil {
		w.err = w.store()
	}
	w.begin()
}

func (w *Writer) store() error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	if w.head.parts == maxParts {
		return ErrTooLarge
	}
	w.head.parts++
	w.buf = seal(w.buf)
	w.bytes += int64(len(w.buf))
	key := w.place.partKey(w.head.folder, w.head.parts)
	if err := w.place.Store(w.ctx, key, w.buf); err != nil {
		return fmt.Errorf("storing %s: %w", key, err)
	}
	return nil
}

// fits reports whether the part has room for the record.
func (w *Writer) fits() bool { return len(w.buf)+len(w.record)+sumBytes <= MaxValue }

// add adds the record to the part.
func (w *Writer) add() {
	if !w.fits() {
		w.flush()
	}
	w.buf = append(w.buf, w.record...)
}

// Worker writes a worker. All workers come before anything else.
func (w *Writer) Worker(one *Worker) {
	w.record = appendWorker(w.record[:0], one)
	w.add()
}

// Binding writes a binding.
func (w *Writer) Binding(s *affinity.Saved, t Target) {
	w.record = appendBinding(w.record[:0], s, t)
	w.add()
}

// Response writes a kept response.
func (w *Writer) Response(one *Response, t Target) {
	w.record = appendResponse(w.record[:0], one, t)
	w.add()
}

// Learned writes what a scheduler has learned, except for its targets.
func (w *Writer) Learned(l *kvscore.Learned) {
	w.record = appendLearned(w.record[:0], l)
	w.add()
}

// LearnedTarget writes what a scheduler has learned of a target.
func (w *Writer) LearnedTarget(l *kvscore.LearnedTarget, t Target) {
	w.record = appendLearnedTarget(w.record[:0], l, t)
	w.add()
}

// Ratios writes the ratios of a model.
func (w *Writer) Ratios(m *kvscore.ModelRatios) {
	w.record = appendRatios(w.record[:0], m)
	w.add()
}

// Chain writes a chain of a target. It leaves out one that fills more than a part.
func (w *Writer) Chain(c *cache.Chain, t Target) {
	w.hash(c)
	from, parts := w.longest()
	w.record = appendChain(w.record[:0], c, t, from, parts)
	if !w.fits() {
		w.flush() // a new part shares nothing with the one before
		from, parts = shared{}, 0
		w.record = appendChain(w.record[:0], c, t, from, parts)
		if !w.fits() {
			return
		}
	}
	w.buf = append(w.buf, w.record...)
	w.learn(parts)
}

// Bytes returns the size of the snapshot so far, without its head.
func (w *Writer) Bytes() int64 { return w.bytes + int64(len(w.buf)) }

// Fail makes the snapshot fail, unless it has failed before.
func (w *Writer) Fail(err error) {
	if w.err == nil {
		w.err = err
	}
}

// Err returns the first error.
func (w *Writer) Err() error { return w.err }

// Finish stores the last part and the head. Only then the snapshot counts. It returns the
// head, and removes parts that an older snapshot has left.
func (w *Writer) Finish(h Head) (*Head, error) {
	w.flush()
	h.id, h.folder, h.parts, h.others = w.head.id, w.head.folder, w.head.parts, w.last.parts
	if w.err == nil {
		value := h.value()
		w.bytes += int64(len(value))
		if w.err = w.place.Store(w.ctx, w.place.prefix+"head", value); w.err != nil {
			w.err = fmt.Errorf("storing the head: %w", w.err)
		}
	}
	if w.err != nil {
		return nil, w.err
	}
	for number := h.parts + 1; number <= w.last.others && w.ctx.Err() == nil; number++ {
		_ = w.place.Delete(w.ctx, w.place.partKey(h.folder, number)) // it does no harm
	}
	return &h, nil
}
