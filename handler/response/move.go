package response

import (
	"context"
	"errors"
	"io"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// Mover lets a stream that breaks off go on elsewhere.
type Mover interface {
	// Track has the stream's reader keep what a move needs.
	Track(a *api.Answer)
	// Stays says, once, that the stream cannot go on elsewhere any more.
	Stays()
	// Move returns the rest of a stream that broke off; nil if there is none.
	Move(why error, a *api.Answer) *Rest
}

// Rest is the rest of a stream, from another engine.
type Rest struct {
	From  io.ReadCloser
	Ctx   context.Context // of the attempt; see Options
	Joint *api.Joint
}

// broke returns whether a stream that ends with err lacks its end.
func (b *Body) broke(err error) bool {
	if b.frames.Torn() {
		return false
	}
	if errors.Is(err, io.EOF) {
		return !b.reader.Closed() && !b.reader.Done() && b.reader.Ends()
	}
	return !b.reader.Closed() && !errors.Is(err, context.Canceled)
}

// move lets the stream go on elsewhere, and returns whether it does. Otherwise it stays what it is.
func (b *Body) move(why error) bool {
	if b.Mover == nil {
		return false
	}
	from := b.from
	if errors.Is(why, ErrEvent) {
		b.reader.Retract()
	} else {
		_ = from.Close() // whatever comes of it, the engine need not go on
	}
	rest := b.Mover.Move(why, b.reader)
	if rest == nil {
		b.Mover = nil
		return false
	}
	_ = from.Close()
	b.from, b.Ctx, b.joint = rest.From, rest.Ctx, rest.Joint
	b.frames = &rawjson.Framer{Edits: true}
	b.reader.Revive(rest.Joint)
	b.named = false
	return true
}
