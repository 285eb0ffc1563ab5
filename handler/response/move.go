package response

import (
	"context"
	"errors"
	"io"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// Mover lets a stream that breaks off go on elsewhere.
type Mover interface {
	// Track has the stream's reader keep what a move needs.
	Track(a *api.Answer)
	// Stays says, once, that the stream cannot go on elsewhere any more.
	Stays()
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
		b.from, b.frames, b.Mover = io.NopCloser(strings.NewReader(end)), rawjson.NewFramer(), nil
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
	b.from, b.Ctx, b.splicer = rest.From, rest.Ctx, rest.Splicer
	if rest.Name != "" {
		b.setName(rest.Name)
	}
	b.frames = rawjson.NewFramer()
	b.reader.Revive(rest.Splicer)
	b.named = false
	return true
}
