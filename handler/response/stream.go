package response

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// stream reads the next bytes of a stream, which err ends if it is not nil. It returns what the
// client gets of them: whole events. It returns nil in place of err if the stream goes on elsewhere.
func (b *Body) stream(t time.Time, p []byte, err error) (out []byte, _ error) {
	r, before := b.reader, b.reader.Chunks()
	b.frames.Write(p, false)
	fault := b.events(t)
	b.tellID()
	if r.Chunks() != before {
		b.Sum.Last = t
	}
	begun := r.FirstToken() || r.Failed() || r.Done() || r.Others() > maxUnread || err != nil
	b.Listener.Received(t, len(p), r.Chunks(), begun)
	if fault != nil {
		out = b.frames.Before()
		if b.move(fault) {
			if errors.Is(fault, errAbortedText) {
				out = append(out, b.textOf(b.stopped)...)
			}
			return out, nil
		}
		if errors.Is(fault, errShape) {
			return out, fault
		}
		b.pass(t)
	}
	out = b.frames.Forward()
	if err != nil {
		return b.last(t, err)
	}
	if !b.pinned && b.Mover != nil && r.WhyNotResumable() != "" {
		b.pinned = true
		b.Mover.PinStream()
	}
	return out, nil
}

// last returns what is left of a stream that err ends. An event counts if it
// lacks only its empty line. The client gets no other part of an event, unless the stream is whole.
// The error is nil if the stream goes on elsewhere.
func (b *Body) last(t time.Time, err error) ([]byte, error) {
	b.torn = b.frames.Torn()
	b.frames.Write(nil, true)
	fault := b.events(t)
	half := errors.Is(fault, errHalf)
	if fault != nil && !half && !errors.Is(fault, errAbortedText) {
		if b.move(fault) {
			return nil, nil
		}
		if errors.Is(fault, errShape) {
			return nil, fault
		}
	}
	if fault != nil {
		b.pass(t)
	}
	rest := b.frames.Forward()
	if errors.Is(fault, errTorn) && errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if !b.extensible || !b.broke(err) {
		return rest, err
	}
	switch {
	case b.move(err):
		err = nil
	case errors.Is(err, io.EOF) && (b.splicer == nil || b.reader.Done()):
		return rest, err // for the engine it is an end
	case errors.Is(err, io.EOF):
		err = io.ErrUnexpectedEOF // it was to have an end
	}
	if half {
		return nil, err
	}
	return append(rest, emptyLine(rest)...), err
}

// emptyLine returns what ends an event after its last bytes, nothing if it has ended.
func emptyLine(after []byte) string {
	if len(after) == 0 || ending(after) != "" {
		return ""
	}
	return "\n\n"
}

// Why a stream goes on elsewhere although its connection is well.
var (
	ErrEvent   = errors.New("the engine sent an error event")
	ErrAborted = fmt.Errorf("%w: it aborted the request", ErrEvent)
	// errAbortedText: the same event has text. A busy engine sends all it has in one event.
	errAbortedText = fmt.Errorf("%w, behind its last text", ErrAborted)
	ErrMisfit      = fmt.Errorf("%w: another engine may serve the request", ErrEvent)
	errShape       = errors.New("the stream does not go on where it broke off")
)

// What is left of a stream that has ended.
var (
	errHalf = errors.New("the last event has no end")
	errTorn = fmt.Errorf("%w, and neither has its JSON", errHalf)
)

// half returns whether a frame is but a part of an event.
func half(f rawjson.Frame) error {
	if !f.Cut || string(bytes.TrimSpace(f.Data)) == "[DONE]" {
		return nil
	}
	i := rawjson.SkipSpace(f.Data, 0)
	if i == len(f.Data) || f.Data[i] != '{' && f.Data[i] != '[' {
		return errHalf
	}
	c := rawjson.Enter(f.Data, i)
	for c.Next() {
		c.Value()
	}
	if !c.Alone() {
		return errTorn
	}
	return nil
}

// events reads the events that were written. The error says why the stream must go on elsewhere
// before the last one; it is nil if the mover is. Or the last one is not whole.
func (b *Body) events(t time.Time) error {
	b.stopped = rawjson.Frame{}
	for f, ok := b.frames.Next(); ok; f, ok = b.frames.Next() {
		if err := half(f); err != nil {
			return err
		}
		length := len(f.Data)
		if b.splicer != nil && !f.Failed && (len(f.Data) > 0 || f.Long) {
			switch data, ok := b.splicer.Event(f.Data); {
			case ok && f.Lines == 1 && data == nil:
				b.frames.Drop()
				continue
			case ok && f.Lines == 1:
				f.Data = data
			case !b.reader.Closed():
				return errShape
			}
		}
		if err := b.event(t, f); err != nil {
			b.stopped, b.length = f, length
			return err
		}
		if b.Name != "" || b.edits() {
			b.edit(f, length)
		}
	}
	return nil
}

// pass goes on behind the event before which events has stopped: the client gets it.
func (b *Body) pass(t time.Time) {
	if b.stopped.Lines > 0 && (b.Name != "" || b.edits()) {
		b.edit(b.stopped, b.length)
	}
	_ = b.events(t)
}

// event reads the next event. The error says why the stream must go on elsewhere before it.
func (b *Body) event(t time.Time, f rawjson.Frame) error {
	closed, chunks := b.reader.Closed(), b.reader.Chunks()
	b.reader.Event(f)
	if b.Sum.First.IsZero() && b.reader.FirstToken() {
		b.Sum.First = t
		b.Listener.FirstToken(t)
	}
	if b.Mover == nil || closed {
		return nil
	}
	status := b.reader.ErrorStatus()
	if b.reader.Chunks() != chunks {
		if status == api.StatusAborted && f.Lines == 1 && api.ReasonIn(f.Data).Len() > 0 {
			return errAbortedText
		}
		return nil
	}
	switch status {
	case api.StatusAborted:
		return ErrAborted
	case http.StatusRequestTimeout, http.StatusConflict, http.StatusTooManyRequests:
		return ErrEvent
	default:
		switch {
		case status >= http.StatusInternalServerError:
			return ErrEvent
		case status > 0 && b.Sum.First.IsZero() && b.Mover.Misfit(f.Data):
			return ErrMisfit
		}
	}
	return nil // or another engine would say the same
}

// textOf returns an aborted event without the reason of its end, for the client of a stream that goes on
// elsewhere.
func (b *Body) textOf(f rawjson.Frame) []byte {
	changes, _ := b.changesOf(f)
	if reason := api.ReasonIn(f.Data); reason.Len() > 0 {
		changes = append(changes, rawjson.Edit{Span: reason, Text: []byte("null")})
	}
	slices.SortStableFunc(changes, func(x, y rawjson.Edit) int { return cmp.Compare(x.Start, y.Start) })
	return append(rawjson.Splice([]byte("data: "), f.Data, changes), "\n\n"...)
}

// edit gives an event the model's public name. It removes the usage and the token ids that the client did
// not ask for, and adds the nvext that it did ask for. length is that of the data as the engine sent them.
func (b *Body) edit(f rawjson.Frame, length int) {
	changes, drop := b.changesOf(f)
	if drop {
		b.frames.Drop()
		return
	}
	if b.splicer != nil && f.Lines == 1 {
		all := rawjson.Edit{Span: rawjson.Span{End: length}, Text: rawjson.Splice(nil, f.Data, changes)}
		changes = append(changes[:0], all)
	}
	if len(changes) > 0 {
		b.frames.Edit(changes)
	}
}

// changesOf returns the edits of an event's data, or whether the client does not get it at all. They are
// valid until the next call.
func (b *Body) changesOf(f rawjson.Frame) (_ []rawjson.Edit, drop bool) {
	b.changes = b.changes[:0]
	if b.Name != "" && f.Lines == 1 {
		if at := b.name.in(f.Data, b.NameAt); at.Len() > 0 {
			b.changes = append(b.changes, rawjson.Edit{Span: at, Text: b.name.text})
		}
	}
	if b.CutUsage {
		if b.changes, drop = api.CutUsage(b.changes, f.Data); drop {
			return nil, true
		}
	}
	if b.CutIDs && f.Lines == 1 {
		if b.changes, drop = api.CutIDs(b.changes, f.Data); drop {
			return nil, true
		}
	}
	if b.added != nil && b.added.nvext != nil {
		if !f.Named && f.Lines == 1 && !f.Cut {
			b.changes = append(b.changes, b.added.nvext.Edits(f.Data, true)...)
		}
		b.Sum.Skipped = b.Sum.Skipped || f.Long
	}
	if len(b.changes) > 1 {
		slices.SortStableFunc(b.changes, func(x, y rawjson.Edit) int { return cmp.Compare(x.Start, y.Start) })
	}
	return b.changes, false
}

// Mover lets a stream that breaks off go on elsewhere.
type Mover interface {
	// Track has the stream's reader keep what a move needs.
	Track(a *api.Answer)
	// PinStream says, once, that the stream cannot go on elsewhere any more.
	PinStream()
	// Misfit returns whether another worker may serve a request that an error event refuses.
	Misfit(event []byte) bool
	// Move returns the rest of a stream that broke off; nil if there is none.
	Move(why error, a *api.Answer) *Rest
}

// Rest is the rest of a stream, from another engine.
type Rest struct {
	From    io.ReadCloser
	Ctx     context.Context // of the attempt; see Options
	Splicer *api.Splicer
	Name    string // see Options
}

// broke returns whether a stream that ends with err lacks its end, and something can follow.
func (b *Body) broke(err error) bool {
	switch {
	case b.reader.Closed() || b.torn || errors.Is(err, context.Canceled):
		return false
	case errors.Is(err, io.EOF):
		return b.reader.Ends()
	}
	return true
}

// move lets the stream go on elsewhere, and returns whether it does. Otherwise it stays what it is. If its
// client lacks only the last event, it goes on with that.
func (b *Body) move(why error) bool {
	if b.Mover == nil {
		return false
	}
	from, undo := b.from, func() {}
	if errors.Is(why, ErrEvent) {
		undo = b.reader.Retract(errors.Is(why, errAbortedText))
	} else {
		_ = from.Close() // whatever comes of it, the engine need not go on
	}
	if end := b.reader.End(); end != "" { // no engine needs to be asked for that
		_ = from.Close()
		b.from, b.ends, b.frames, b.Mover = io.NopCloser(strings.NewReader(end)), nil, new(rawjson.Framer), nil
		b.reader.Revive(nil)
		return true
	}
	rest := b.Mover.Move(why, b.reader)
	if rest == nil {
		undo()
		b.Mover = nil
		return false
	}
	_ = from.Close()
	b.from, b.ends, b.Ctx, b.splicer = rest.From, nil, rest.Ctx, rest.Splicer
	if rest.Name != "" {
		b.setName(rest.Name)
	}
	b.frames = new(rawjson.Framer)
	b.reader.Revive(rest.Splicer)
	b.named = false
	return true
}
