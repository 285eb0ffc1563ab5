package approx

// ages are a slot's tokens by when they were touched, in groups. They tell how much an engine must have
// had room for to keep what it used long ago.
type ages struct {
	sums   [ageGroups]int64 // milli-tokens, the oldest group first
	n      int
	oldest uint32 // the number of the oldest group
}

// ageGroups is how many groups there are. A new one begins when the last one has ageShare of what the slot
// holds; then the two oldest become one.
const ageGroups, ageShare = 64, 32

// group returns the place of a group by its number. The oldest has what older ones had.
func (a *ages) group(number uint32) int { return max(0, int(int32(number-a.oldest))) } //nolint:gosec // wraps around

// add adds milli-tokens to what the slot holds, which are part of a hold.
func (s *slot) add(h *hold, tokens int64) {
	s.used.Add(tokens)
	s.ages.sums[s.ages.group(h.age)] += tokens
}

// renew puts a hold into the newest group.
func (s *slot) renew(h *hold) {
	a := &s.ages
	if a.n == 0 || a.sums[a.n-1] > s.used.Load()/ageShare {
		if a.n == ageGroups {
			a.sums[1] += a.sums[0]
			copy(a.sums[:], a.sums[1:])
			a.oldest++
			a.n--
		}
		a.sums[a.n] = 0
		a.n++
	}
	newest := a.oldest + uint32(a.n) - 1 //nolint:gosec // small
	if !h.lost && h.age != newest {
		a.sums[a.group(h.age)] -= h.tokens()
		a.sums[a.n-1] += h.tokens()
	}
	h.age = newest
}

// newer returns the milli-tokens in the groups that are newer than a hold's.
func (s *slot) newer(h *hold) (sum int64) {
	for _, n := range s.ages.sums[s.ages.group(h.age)+1 : max(s.ages.n, 1)] {
		sum += n
	}
	return sum
}
