package approx

import "math/bits"

// Match is the answer of [Index.Match]. Reuse it: its slices are kept.
type Match struct {
	// Held is, by slot, how many leading blocks of the chain the slot holds:
	// computed there, or being computed by a request sent there.
	Held []int32
	// Tokens is, by slot, the milli-tokens of these blocks. An engine has counted them if a
	// prompt ended there (see [Index.RecordCount]); otherwise they are estimated.
	Tokens []int64
	// InUse is, by slot, how many leading blocks requests in flight use there.
	InUse []int32
	// Blocks is the greatest of all Held and InUse: where the match ends.
	Blocks int
	// Known is the length of the known prefix in blocks. It exceeds Blocks if a known
	// prompt ended a part of a block later. KnownTokens is the same prefix in
	// milli-tokens.
	Known       float64
	KnownTokens int64
	// Counted is whether an engine counted KnownTokens. Otherwise they are estimated.
	Counted bool
	// Holders is the number of slots that hold all of Blocks; 0 if Blocks is 0.
	Holders int
	// Arrivals is the number of earlier chains whose match ended at the same place.
	//
	// It distinguishes a common stem from a conversation's own history. After a system
	// prompt, every new chain diverges at the same block. The second chain finds 0 there,
	// the third 1, the fourth 2. The next turn of a conversation ends its match where its
	// last turn ended, and no other chain does. A high number therefore means a prefix
	// that is worth having on several slots, a low one the prefix of one user.
	//
	// Acquire counts; Touch and Match do not. An identical prompt also counts, at its end.
	// A count is lost when no slot has the block before it. 0 if nothing matches.
	Arrivals int
	// The shared prefix is the longest prefix of the match after which at least 8 chains
	// continue differently. SharedTokens is its length in milli-tokens, 0 if there is
	// none. SharedArrivals counts these chains as Arrivals does, SharedHolders the slots
	// that hold all of it.
	SharedTokens                  int64
	SharedArrivals, SharedHolders int

	live []pair // slots that hold, and use, all so far
}

// minShared is the least number of chains that continue from a shared prefix. Fewer may be
// the turns and branches of one conversation.
const minShared = 8

func (m *Match) reset(slots int) {
	words := (slots + 63) / 64
	if cap(m.Held) < slots || cap(m.InUse) < slots || cap(m.Tokens) < slots || cap(m.live) < words {
		m.Held, m.InUse, m.Tokens = make([]int32, slots), make([]int32, slots), make([]int64, slots)
		m.live = make([]pair, words)
	}
	m.Held, m.InUse, m.Tokens, m.live = m.Held[:slots], m.InUse[:slots], m.Tokens[:slots], m.live[:words]
	clear(m.Held)
	clear(m.InUse)
	clear(m.Tokens)
	m.Known, m.KnownTokens, m.Counted = 0, 0, false
	m.Blocks, m.Arrivals, m.Holders = 0, 0, 0
	m.SharedTokens, m.SharedArrivals, m.SharedHolders = 0, 0, 0
	for w := range m.live {
		m.live[w] = pair{^uint64(0), ^uint64(0)}
	}
}

// Match finds how much of a chain each slot has, in one walk of the trie. The slices in m
// get one element for each slot up to the highest declared one. Match does not change the
// index, and allocates only to enlarge m's slices.
func (x *Index) Match(c *Chain, m *Match) {
	m.reset(len(x.slots))
	blocks := c.Blocks
	before := int64(0) // milli-tokens above the run
	var up *run
	for m.Blocks < len(blocks) {
		r := x.runs[start{up, c.Root, blocks[m.Blocks]}]
		if r == nil {
			break
		}
		n := Common(r.hashes, blocks[m.Blocks:])
		at, tokens := m.Blocks, m.KnownTokens
		end := m.reach(r, n, before, c)
		m.Holders = m.narrow(r, n, at, tokens, before)
		m.Blocks += n
		if n < len(r.hashes) {
			m.Arrivals = 0
			break
		}
		m.Arrivals = int(r.arrivals)
		if m.Arrivals >= minShared {
			m.SharedTokens, m.SharedArrivals, m.SharedHolders = end, m.Arrivals, m.Holders
		}
		up, before = r, end
	}
	m.finish()
}

// narrow writes what slots hold that do not hold all of a run's first n blocks, and returns how
// many do. The run begins at a block; tokens are those of all holders up to there, and before
// those without a count's part of a block.
func (m *Match) narrow(r *run, n, at int, tokens, before int64) (holders int) {
	for w := range m.live {
		live, now := &m.live[w], r.marks.at(w)
		if gone := live.held &^ now.held; gone != 0 {
			live.held &= now.held
			m.drop(w, gone, at, tokens)
		}
		if gone := live.used &^ now.used; gone != 0 {
			live.used &= now.used
			m.release(w, gone, at)
		}
		holders += bits.OnesCount64(live.held)
	}
	if r.partial == 0 {
		return holders
	}
	for _, h := range r.holds {
		w, bit := int(h.slot/64), uint64(1)<<(h.slot%64)
		live := &m.live[w]
		if int(h.n) >= n && !h.lost || live.held&bit == 0 {
			continue
		}
		live.held &^= bit
		holders--
		if h.lost {
			m.drop(w, bit, at, tokens)
			m.release(w, live.used&bit, at)
			live.used &^= bit
		} else {
			m.drop(w, bit, at+int(h.n), before+int64(h.n)*int64(r.weight))
		}
	}
	return holders
}

// drop writes what slots hold whose match has ended.
func (m *Match) drop(word int, gone uint64, at int, tokens int64) {
	for ; gone != 0 && at > 0; gone &= gone - 1 {
		i := word*64 + bits.TrailingZeros64(gone)
		if i >= len(m.Held) {
			return
		}
		m.Held[i], m.Tokens[i] = int32(at), tokens
	}
}

func (m *Match) release(word int, gone uint64, at int) {
	for ; gone != 0 && at > 0; gone &= gone - 1 {
		if i := word*64 + bits.TrailingZeros64(gone); i < len(m.InUse) {
			m.InUse[i] = int32(at)
		}
	}
}

// finish writes what the remaining slots hold: all of the match.
func (m *Match) finish() {
	for w := range m.live {
		m.drop(w, m.live[w].held, m.Blocks, m.KnownTokens)
		m.release(w, m.live[w].used, m.Blocks)
	}
}

// reach extends the known length of the chain by the first n blocks of a run. before is the
// milli-tokens before the run. It returns the milli-tokens at the end of these blocks.
func (m *Match) reach(r *run, n int, before int64, c *Chain) (end int64) {
	if n < len(r.hashes) {
		upper, _ := c.Weights.divide(r, n)
		end = before + int64(n)*int64(upper)
	} else {
		end = r.end(before)
	}
	m.Known, m.KnownTokens, m.Counted = float64(m.Blocks+n), end, false
	if n == len(r.hashes) && r.count > 0 {
		if past := r.pastBlocks(); m.Known+past <= c.length() {
			m.Known += past
			m.KnownTokens, m.Counted = int64(r.count)*1000, true
		}
	}
	return end
}

// Common returns the length of the common prefix.
func Common(a, b []uint64) int {
	n := min(len(a), len(b))
	a, b = a[:n], b[:n]
	i := 0
	for i+64 <= n && *(*[64]uint64)(a[i:]) == *(*[64]uint64)(b[i:]) { // with vector instructions
		i += 64
	}
	for ; i+8 <= n; i += 8 {
		p, q := (*[8]uint64)(a[i:]), (*[8]uint64)(b[i:])
		if (p[0]^q[0])|(p[1]^q[1])|(p[2]^q[2])|(p[3]^q[3])|(p[4]^q[4])|(p[5]^q[5])|(p[6]^q[6])|(p[7]^q[7]) != 0 {
			break
		}
	}
	for ; i < n; i++ {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}
