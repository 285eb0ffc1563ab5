package cache

import "github.com/caddy-kvrouter/kvrouter/kvscore/cache/internal/approx"

// Chain is a chain that a target holds, in the form in which it survives the router. Part is
// consecutive blocks of it, and MaxChain the greatest length of one that is read, in blocks.
type (
	Chain = approx.Held
	Part  = approx.Part
)

// MaxChain is the greatest length of a chain that a [Walk] reads, in blocks.
const MaxChain = approx.MaxHeld

// Walk is a pass over the approximate cache models of all targets: see [Caches.Read]. The zero
// value is a new pass.
type Walk struct {
	// Chains are those of the last step, with the target of each in Targets.
	Chains  []Chain
	Targets []Target

	walk  approx.Walk
	batch approx.Batch
}

// Hurry makes the walk pass over what it has not read, except for what was used since it began.
func (w *Walk) Hurry() { w.walk.Hurry() }

// Read reads the next part of what the targets hold, the most recently used first. It keeps
// other changes waiting for about 0.1 ms. The results are valid until the next call. It returns
// false at the end of the pass.
func (c *Caches) Read(w *Walk) (more bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	more = w.walk.Next(c.sent, &w.batch)
	w.Chains, w.Targets = w.Chains[:0], w.Targets[:0]
	for _, held := range w.batch.Chains {
		if held.Slot < len(c.slots) && c.slots[held.Slot] != nil {
			w.Chains, w.Targets = append(w.Chains, held), append(w.Targets, c.slots[held.Slot].target)
		}
	}
	return more
}

// Restore records that the target has held a chain since before the router knew it. The chain is
// older than all that the target holds, and displaces nothing. It returns how many tokens it has
// added. It adds none if the target is full or unknown, or has lost its cache meanwhile.
// The chain must be valid: see Chain.Valid.
func (c *Caches) Restore(t Target, held *Chain) (tokens int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.slotOf(t)
	if s == nil || s.losses > 0 {
		return 0
	}
	before := c.sent.Used(s.number)
	c.sent.Restore(s.number, held)
	return max(0, c.sent.Used(s.number)-before)
}
