package handler

import (
	"bytes"
	"io"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// sending is what one attempt sends of a body: the body as it is, or with
// changes.
type sending struct {
	of    *replay
	parts [][]byte // nil: the body as it is
	size  int64
}

// edited returns a body, which is one part, with changes, which are in order and
// do not overlap. All other bytes stay, and stay where they are.
func (b *replay) edited(edits []rawjson.Edit) sending {
	s := sending{of: b, size: b.size}
	if len(edits) == 0 {
		return s
	}
	whole, at := b.parts[0], 0
	if b.inMemory() {
		body := rawjson.Splice(nil, whole, edits)
		s.parts, s.size = [][]byte{body}, int64(len(body))
		return s
	}
	s.parts, s.size = make([][]byte, 0, 2*len(edits)+1), 0
	put := func(p []byte) {
		if len(p) > 0 {
			s.parts = append(s.parts, p)
			s.size += int64(len(p))
		}
	}
	for _, e := range edits {
		put(whole[at:e.Start])
		put(e.Text)
		at = e.End
	}
	put(whole[at:])
	return s
}

// open returns what is sent, from its first byte. It must be called as open of
// the body.
func (s sending) open() io.ReadCloser {
	switch {
	case s.parts == nil:
		return s.of.open()
	case s.of.inMemory():
		return io.NopCloser(bytes.NewReader(s.parts[0]))
	}
	s.of.users.Add(1)
	return &replayReader{of: s.of, parts: s.parts}
}
