package body

import (
	"bytes"
	"io"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// Edited is what one attempt sends of a body: the body as it is, or with
// changes.
type Edited struct {
	Of    *Replay
	parts [][]byte // nil: the body as it is
	Size  int64
}

// Edit returns a body, which is one part, with changes, which are in order and
// do not overlap. All other bytes stay, and stay where they are.
func (b *Replay) Edit(edits []rawjson.Edit) Edited {
	s := Edited{Of: b, Size: b.Size}
	if len(edits) == 0 {
		return s
	}
	whole, at := b.Parts[0], 0
	if b.inMemory() {
		body := rawjson.Splice(nil, whole, edits)
		s.parts, s.Size = [][]byte{body}, int64(len(body))
		return s
	}
	s.parts, s.Size = make([][]byte, 0, 2*len(edits)+1), 0
	put := func(p []byte) {
		if len(p) > 0 {
			s.parts = append(s.parts, p)
			s.Size += int64(len(p))
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

// Open returns what is sent, from its first byte. It must be called as open of
// the body.
func (s Edited) Open() io.ReadCloser {
	switch {
	case s.parts == nil:
		return s.Of.open()
	case s.Of.inMemory():
		return io.NopCloser(bytes.NewReader(s.parts[0]))
	}
	s.Of.users.Add(1)
	return &replayReader{of: s.Of, parts: s.parts}
}
