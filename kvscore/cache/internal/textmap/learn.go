package textmap

import (
	"math"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/approx"
)

// Learn records the token blocks of a text that ends past blocks behind its last full block. An engine
// has counted its tokens; tokens are the full blocks of them.
func (m *Map) Learn(t *Text, past float64, tokens []uint64, count int64) {
	if len(t.Blocks) == 0 || len(tokens) == 0 || count > math.MaxInt32 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var up *run
	n, common := 0, 0 // text blocks passed, and token blocks that are equal so far
	for n < len(t.Blocks) {
		r := m.runs[start{up, t.Root, t.Blocks[n]}]
		if r == nil {
			break
		}
		if common >= int(r.base) {
			common = int(r.base) + approx.Common(r.tokens, tokens[min(int(r.base), len(tokens)):])
		}
		k := approx.Common(r.text, t.Blocks[n:])
		if n += k; k < len(r.text) {
			r = m.split(r, k, common, t)
		}
		if r.certain > int32(common) { //nolint:gosec // a number of blocks
			if r.certain > int32(common)+2 && (n < len(t.Blocks) || common < len(tokens)) { //nolint:gosec // as above
				m.contrary++
			}
			r.certain = int32(common) //nolint:gosec // as above
		}
		r.used.Store(true)
		up = r
	}
	end := int32(max(0, float64(count)-past*t.Weights.Mean(t.Blocks))) //nolint:gosec // a prompt's length
	if n < len(t.Blocks) {
		m.grow(up, t, n, tokens, common, end)
	} else if up.end = end; common < len(tokens) && up.kids == 0 { // the same text, and other tokens or more
		up.base = min(up.base, int32(common)) //nolint:gosec // as above
		own := tokens[up.base:]
		m.use(8 * (len(own) - cap(up.tokens)))
		up.tokens = append(make([]uint64, 0, len(own)), own...)
		up.certain = int32(len(tokens)) //nolint:gosec // as above
	}
	m.shrink(learnWork)
}

// learnWork bounds the runs that one lesson visits to evict others.
const learnWork = 4096

// grow adds the rest of a text from block n on, of whose token blocks the first common are those
// of the run above.
func (m *Map) grow(up *run, t *Text, n int, tokens []uint64, common int, end int32) {
	if up != nil {
		up.kids++
	}
	r := &run{
		text: append([]uint64(nil), t.Blocks[n:]...), tokens: append([]uint64(nil), tokens[common:]...),
		up: up, root: t.Root, base: int32(common), certain: int32(len(tokens)), end: end, //nolint:gosec // a number of blocks
	}
	m.add(r)
}

func (m *Map) add(r *run) {
	r.place = int32(len(m.list)) //nolint:gosec // the memory bounds the runs
	r.used.Store(true)
	m.runs[r.begin()] = r
	m.list = append(m.list, r)
	m.use(runBytes + 8*(cap(r.text)+cap(r.tokens)))
}

// split divides a run after its first k text blocks, and returns the new one, which is the upper. It
// gets the token blocks that a text has in common which ends or parts there.
func (m *Map) split(low *run, k, common int, t *Text) *run {
	at := low.within(t, k)
	before, size := low.before(), int32(t.BlockTokens) //nolint:gosec // a block has thousands of tokens at most
	end := max(before, int32(common)*size+(size-(low.end-before)/int32(len(low.text)))/2)
	certain := int32(common) //nolint:gosec // a number of blocks
	if certain > low.base {
		at = certain
	}
	delete(m.runs, low.begin())
	m.use(-8 * (cap(low.text) + cap(low.tokens)))
	cut := at - low.base
	up := &run{
		text: append([]uint64(nil), low.text[:k]...), tokens: append([]uint64(nil), low.tokens[:cut]...),
		up: low.up, root: low.root, base: low.base, certain: certain, end: end, kids: 1,
	}
	low.text, low.tokens = append([]uint64(nil), low.text[k:]...), append([]uint64(nil), low.tokens[cut:]...)
	low.up, low.base = up, at
	m.use(8 * (cap(low.text) + cap(low.tokens)))
	m.add(up)
	m.runs[low.begin()] = low
	return up
}
