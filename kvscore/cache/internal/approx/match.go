package approx

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
}

// minShared is the least number of chains that continue from a shared prefix. Fewer may be
// the turns and branches of one conversation.
const minShared = 8

func (m *Match) reset(slots int) {
	if cap(m.Held) < slots || cap(m.InUse) < slots || cap(m.Tokens) < slots {
		m.Held, m.InUse, m.Tokens = make([]int32, slots), make([]int32, slots), make([]int64, slots)
	}
	m.Held, m.InUse, m.Tokens = m.Held[:slots], m.InUse[:slots], m.Tokens[:slots]
	clear(m.Held)
	clear(m.InUse)
	clear(m.Tokens)
	m.Known, m.KnownTokens, m.Counted = 0, 0, false
	m.Blocks, m.Arrivals = 0, 0
	m.SharedTokens, m.SharedArrivals, m.SharedHolders = 0, 0, 0
}

// Match finds how much of a chain each slot has, in one walk of the trie. The slices in m
// get one element for each slot up to the highest declared one. Match does not change the
// index, and allocates only to enlarge m's slices.
func (x *Index) Match(c *Chain, m *Match) {
	m.reset(len(x.slots))
	blocks := c.Blocks
	var up *run
	n, above, end := 0, int64(0), int64(0) // blocks of up that match, and milli-tokens before and after them
	for m.Blocks < len(blocks) {
		r := x.runs[start{up, c.Root, blocks[m.Blocks]}]
		if r == nil {
			break
		}
		if up != nil && !r.heldAs(up) {
			m.write(up, n, above)
		}
		n, above = Common(r.hashes, blocks[m.Blocks:]), end
		end = m.reach(r, n, above, c)
		m.Blocks += n
		if up = r; n < len(r.hashes) {
			m.Arrivals = 0
			break
		}
		m.Arrivals = int(r.arrivals)
		if m.Arrivals >= minShared {
			m.SharedTokens, m.SharedArrivals, m.SharedHolders = end, m.Arrivals, len(r.holds)-int(r.partial)
		}
	}
	if up != nil {
		m.write(up, n, above)
	}
}

// heldAs reports whether the same slots hold, and use, all of two runs. A slot that does so with a run
// does so with the one above.
func (r *run) heldAs(up *run) bool {
	return len(r.holds) == len(up.holds) && r.used == up.used && r.partial+up.partial == 0
}

// write writes what slots hold up to the first n blocks of a run. above is the milli-tokens above the run.
func (m *Match) write(r *run, n int, above int64) {
	for _, h := range r.holds {
		switch {
		case h.lost:
		case int(h.n) < n:
			m.Held[h.slot], m.Tokens[h.slot] = r.start+h.n, above+h.tokens()
		default:
			m.Held[h.slot], m.Tokens[h.slot] = r.start+int32(n), m.KnownTokens
			if h.refs > 0 {
				m.InUse[h.slot] = r.start + int32(n)
			}
		}
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
