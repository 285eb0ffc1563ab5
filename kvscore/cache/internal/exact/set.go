package exact

import (
	"math/bits"
	"slices"
)

// A column stands for a target in all sets. A target that is cleared gets another one, so that
// Clear need not visit any block. The old column is used again once no set has it.

// set is a set of columns. It does not change.
type set struct {
	word uint64    // columns 0 to 63
	more *[]uint64 // 64 columns each; nil if there are none
}

func (s set) at(w int) uint64 {
	if w == 0 {
		return s.word
	}
	if s.more == nil || w > len(*s.more) {
		return 0
	}
	return (*s.more)[w-1]
}

func (s set) words() int {
	if s.more == nil {
		return 1
	}
	return 1 + len(*s.more)
}

func (s set) has(column int) bool {
	return column >= 0 && s.at(column/64)>>(column%64)&1 != 0
}

func (s set) isZero() bool { return s == set{} }

func (s set) equal(o set) bool {
	return s.word == o.word && (s.more == o.more || s.more != nil && o.more != nil && slices.Equal(*s.more, *o.more))
}

// toggled returns the set with a column added, or without it if it was there.
func (s set) toggled(column int) set {
	if column < 64 {
		return set{s.word ^ 1<<column, s.more}
	}
	more := make([]uint64, max(s.words()-1, column/64))
	if s.more != nil {
		copy(more, *s.more)
	}
	more[column/64-1] ^= 1 << (column % 64)
	return makeSet(s.word, more)
}

// without returns the set without the columns of another.
func (s set) without(o set) set {
	if s.more == nil {
		return set{word: s.word &^ o.word}
	}
	more := slices.Clone(*s.more)
	for i := range more {
		more[i] &^= o.at(i + 1)
	}
	return makeSet(s.word&^o.word, more)
}

// makeSet drops words without columns at the end.
func makeSet(word uint64, more []uint64) set {
	for len(more) > 0 && more[len(more)-1] == 0 {
		more = more[:len(more)-1]
	}
	if len(more) == 0 {
		return set{word: word}
	}
	return set{word, &more}
}

// overlaps reports whether two sets have a column in common.
func (s set) overlaps(o set) bool {
	if s.word&o.word != 0 {
		return true
	}
	for w := 1; w < s.words(); w++ {
		if s.at(w)&o.at(w) != 0 {
			return true
		}
	}
	return false
}

// each calls f with every column that is also in another set.
func (s set) each(in set, f func(column int)) {
	for w := range s.words() {
		for v := s.at(w) & in.at(w); v != 0; v &= v - 1 {
			f(w*64 + bits.TrailingZeros64(v))
		}
	}
}

// columns is a state of the columns that readers see. It does not change.
type columns struct {
	valid   set     // those of targets
	sharing set     // of these, those of targets that have reported a block in the shared tier
	target  []int32 // by column
	targets int     // highest number of a target, plus 1
}

// assign gives a target a column.
func (x *Index) assign(target int) {
	c := *x.columns.Load()
	column := len(c.target)
	if len(x.freeColumns) > 0 {
		column, x.freeColumns = x.freeColumns[0], x.freeColumns[1:]
	}
	c.target = slices.Clone(c.target)
	for column >= len(c.target) {
		c.target = append(c.target, -1)
	}
	c.target[column] = int32(target)
	c.valid = c.valid.toggled(column)
	c.targets = max(c.targets, target+1)
	x.owners[target].column = column
	x.columns.Store(&c)
}

// share records that a target has reported a block in the shared tier.
func (x *Index) share(target int) {
	c := *x.columns.Load()
	if column := x.owners[target].column; !c.sharing.has(column) {
		c.sharing = c.sharing.toggled(column)
		x.columns.Store(&c)
	}
}

// Clear records that the target's engine has lost all blocks, or that the number has a new
// owner. It takes effect at once. [Index.Step] reclaims the memory.
func (x *Index) Clear(target int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if target < 0 || target >= len(x.owners) {
		return
	}
	o := &x.owners[target]
	if column := o.column; column >= 0 {
		c := *x.columns.Load()
		c.valid = c.valid.toggled(column)
		if c.sharing.has(column) {
			c.sharing = c.sharing.toggled(column)
		}
		x.columns.Store(&c)
		x.dirty = x.dirty.toggled(column)
	}
	x.memory.repeats -= int64(len(o.repeats)) * repeatBytes
	*o = owner{column: -1}
}
