package journal

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// groupBlocks is how many blocks of the router are one block of a trace.
const groupBlocks = 8

// traced is a request, as a trace for tests/replay has it.
type traced struct {
	at      time.Time
	length  float64 // blocks of the router
	T       float64 `json:"t"` // seconds since the first
	In      int     `json:"in"`
	Out     int64   `json:"out"`
	Session int     `json:"s"`
	Turn    int     `json:"k"`
	Think   float64 `json:"think"` // -1 is unknown
	IDs     []int   `json:"h"`
}

type tracer struct {
	requests       []traced
	tokens, length float64
	ids            map[uint64]int // of prompts up to a block, by their hash
	sessions       map[*Prompt]int
	turns          []int // by session
	blocks         []uint64
	unknown        int
}

// Trace writes the requests in the log at a path as a trace for tests/replay. It tells when they
// arrived, how long prompts and answers were, and which prompts begin alike. Prompts are numbers that
// begin at 0, which lead back to no text and to no hash. A prompt that goes on from an earlier one,
// or from its answer, is a turn of its session. The requests must have ended, and their prompts be
// known. Trace returns their number, and that of the others.
//
// All prompts have as many tokens for a block of the router as they have on average.
func Trace(path string, to io.Writer) (requests, others int, err error) {
	t := tracer{ids: make(map[uint64]int), sessions: make(map[*Prompt]int)}
	found := false
	for _, name := range []string{path + older, path} {
		f, err := os.Open(name) //nolint:gosec // the operator's
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return 0, 0, err
		}
		found = true
		_, _, err = Read(f, func(r *Record) bool {
			if end, over := r.Body.(*End); over {
				t.add(r.Booking, end)
			}
			return true
		})
		_ = f.Close()
		if err != nil {
			return 0, 0, fmt.Errorf("reading %s: %w", name, err)
		}
	}
	switch {
	case !found:
		return 0, 0, fmt.Errorf("reading %s: %w", path, os.ErrNotExist)
	case len(t.requests) == 0:
		return 0, t.unknown, fmt.Errorf("%s has no requests with known prompts", path)
	}
	return len(t.requests), t.unknown, t.write(to)
}

func (t *tracer) add(b *Booking, e *End) {
	p := b.Prompt
	if p == nil || !e.Computed || b.Tokens <= 0 {
		t.unknown++
		return
	}
	one := traced{at: b.At, length: float64(p.Len()) + float64(p.Past), Out: max(1, e.Output), Think: -1, IDs: []int{}}
	session, known := t.sessions[p.Continues()]
	if !known {
		session = len(t.turns)
		t.turns = append(t.turns, 0)
	}
	one.Session, one.Turn = session, t.turns[session]
	t.turns[session]++
	t.sessions[p] = session
	if e.Answer != nil {
		t.sessions[e.Answer] = session
	}
	t.blocks = p.Append(t.blocks[:0])
	hash := cache.Mix(p.Root)
	for g := range slices.Chunk(t.blocks, groupBlocks) {
		if len(g) < groupBlocks {
			break
		}
		hash = span(hash, g)
		id, known := t.ids[hash]
		if !known {
			id = len(t.ids)
			t.ids[hash] = id
		}
		one.IDs = append(one.IDs, id)
	}
	t.tokens, t.length = t.tokens+float64(b.Tokens), t.length+one.length
	t.requests = append(t.requests, one)
}

func (t *tracer) write(to io.Writer) error {
	slices.SortStableFunc(t.requests, func(a, b traced) int { return a.at.Compare(b.at) })
	block := max(1, math.Round(groupBlocks*t.tokens/max(t.length, 1)))
	w := bufio.NewWriter(to)
	out := json.NewEncoder(w)
	err := out.Encode(map[string]any{"name": "journal", "block": int(block), "closed": false})
	for i := range t.requests {
		one := &t.requests[i]
		one.T, one.In = one.at.Sub(t.requests[0].at).Seconds(), max(1, int(one.length/groupBlocks*block))
		one.IDs = one.IDs[:min(len(one.IDs), one.In/int(block))]
		err = errors.Join(err, out.Encode(one))
	}
	return errors.Join(err, w.Flush())
}
