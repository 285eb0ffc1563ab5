// Package textmap knows the token blocks of texts: which blocks of tokens an engine makes of the
// beginning of a prompt of text. It learns them from prompts whose blocks of text and of tokens are
// both known.
//
// It does not tokenize, and does not know which engine holds a block. All methods are safe for
// concurrent use.
//
// # Texts
//
// As in package approx, a text is a root and the content hashes of its full blocks. Only texts with
// equal roots can have equal tokens. Texts are the paths of a compressed
// trie. Each run of the trie has some text blocks, and the token blocks that follow those of the run
// above.
//
// # Borders
//
// Blocks of tokens do not end where blocks of text end. As soon as two texts have parted somewhere, it
// is known how many token blocks are certain there: as many as both have in common. Until then the
// engine's counts of tokens are divided among the text blocks, and a text counts as parting in the middle
// of one.
//
// # Memory
//
// The map stays within a number of bytes. A block of text takes 8 bytes, a block of tokens 8, and a
// run about 200. A full map evicts the ends of texts that were not used for long.
package textmap

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/approx"
)

// Map is the token blocks of texts. Make it with [New].
type Map struct {
	mu       sync.RWMutex
	runs     map[start]*run
	list     []*run // in no order, for eviction
	hand     int
	memory   int64
	bytes    int64
	contrary uint64
}

// run is an edge of the trie: text blocks without a branch in between.
//
// The token blocks up to the end of a run are the first base ones of the run above, and its own.
// Where a text parts from another one whose tokens it does not share to the end, its base is less
// than the other has.
type run struct {
	text   []uint64
	tokens []uint64
	up     *run // nil at the top
	root   uint64
	base   int32
	// certain is how many token blocks all texts begin with that have all of the run's text, as far as the
	// map has seen them.
	certain int32
	end     int32 // tokens up to the end of the text, about
	kids    int32
	place   int32 // in the list
	used    atomic.Bool
}

// start leads to the run that begins with a block: below another one, or at the top.
type start struct {
	up          *run // nil at the top
	root, block uint64
}

func (r *run) begin() start { return start{r.up, r.root, r.text[0]} }

// runBytes is the memory of a run with its places in the map and in the list.
const runBytes = 160 + 48

// Text is a text, and how many tokens its blocks have.
type Text struct {
	// Root is what must be equal for two texts to share tokens, the size of token blocks included.
	Root   uint64
	Blocks []uint64
	// Weights are the tokens in a block, by its kind.
	Weights approx.Weights
	// BlockTokens is the number of tokens in a token block.
	BlockTokens int
}

// New returns an empty map that keeps at most memory bytes.
func New(memory int64) *Map {
	return &Map{runs: make(map[start]*run), memory: memory}
}

// SetMemory changes the bound in bytes. [Map.Step] evicts the rest.
func (m *Map) SetMemory(bytes int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.memory = bytes
}

// Size is the size of a map.
type Size struct {
	Bytes int64
	// Contradictions counts texts whose tokens were not those that the map took for certain.
	Contradictions uint64
}

// Size returns the size of all that the map keeps.
func (m *Map) Size() Size {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return Size{m.bytes, m.contrary}
}

// Find appends to dst the token blocks with which texts begin that begin as t. Where no text has parted before,
// it can be one or two blocks off. The blocks come in pieces, which do not change. Find also returns how many
// there are, and the number of text blocks that the map knows.
func (m *Map) Find(t *Text, dst [][]uint64) (pieces [][]uint64, certain, n int) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	var last *run
	for n < len(t.Blocks) {
		r := m.runs[start{last, t.Root, t.Blocks[n]}]
		if r == nil {
			break
		}
		last = r
		k := approx.Common(r.text, t.Blocks[n:])
		if n += k; k < len(r.text) {
			certain = int(min(r.certain, r.within(t, k)))
			break
		}
		certain = int(r.certain)
	}
	if last == nil {
		return dst, 0, 0
	}
	if !last.used.Load() {
		last.used.Store(true)
	}
	certain = max(0, min(certain, int(last.base)+len(last.tokens)))
	return last.appendTo(dst, certain), certain, n
}

// before returns the tokens before the run, about.
func (r *run) before() int32 {
	if r.up == nil {
		return 0
	}
	return r.up.end
}

// within returns how many token blocks are certain behind the first k text blocks of the run, about.
func (r *run) within(t *Text, k int) int32 {
	start := float64(r.before())
	length := max(0, float64(r.end)-start)
	first, all := t.Weights.Sum(r.text[:k]), t.Weights.Sum(r.text)
	if all == 0 {
		return r.base
	}
	at := length*float64(first)/float64(all) + length/float64(len(r.text))/2
	return min(max(r.base, int32((start+at)/float64(t.BlockTokens))), r.base+int32(len(r.tokens))) //nolint:gosec // a number of blocks
}

// appendTo appends the first n token blocks of those up to the end of the run.
func (r *run) appendTo(dst [][]uint64, n int) [][]uint64 {
	from := len(dst)
	for ; r != nil; r = r.up {
		if base := int(r.base); n > base {
			dst = append(dst, r.tokens[:n-base])
			n = base
		}
	}
	slices.Reverse(dst[from:])
	return dst
}

func (m *Map) use(bytes int) { m.bytes += int64(bytes) }

// Step evicts after the memory was lowered. work bounds the runs that it visits. It reports whether
// more is left.
func (m *Map) Step(work int) (more bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.shrink(work)
}

// shrink evicts until the map is within its memory. It reports whether work was too little.
func (m *Map) shrink(work int) (more bool) {
	for m.bytes > m.memory && len(m.list) > 0 {
		if work--; work < 0 {
			return true
		}
		if m.hand++; m.hand >= len(m.list) {
			m.hand = 0
		}
		if r := m.list[m.hand]; r.kids == 0 && !r.used.Swap(false) {
			m.remove(r)
		}
	}
	return false
}

// remove takes out a run without runs below.
func (m *Map) remove(r *run) {
	delete(m.runs, r.begin())
	last := m.list[len(m.list)-1]
	m.list[r.place], last.place = last, r.place
	m.list = m.list[:len(m.list)-1]
	if r.up != nil {
		r.up.kids--
	}
	m.use(-runBytes - 8*(cap(r.text)+cap(r.tokens)))
}
