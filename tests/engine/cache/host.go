package cache

import "container/list"

// Host is a slower tier behind a cache, as SGLang's HiCache in pinned memory of the
// host. It holds a copy of each block that became findable until it has no room. The
// least recently used block goes first, and the parent of a block that it holds is
// held.
type Host struct {
	blocks   int
	byKey    map[Key]*hostBlock
	used     *list.List // the least recently used first; a block is before its parent
	listener Listener
}

// hostBlock is one block of the slower tier.
type hostBlock struct {
	key    Key
	parent *hostBlock // nil for the first of a prompt
	place  *list.Element
}

// NewHost returns an empty tier. The listener is not told when the cache is cleared, as the
// cache's own is.
func NewHost(blocks int, l Listener) *Host {
	return &Host{blocks: blocks, byKey: make(map[Key]*hostBlock), used: list.New(), listener: l}
}

// held returns how many leading keys the tier holds.
func (h *Host) held(keys []Key) (n int) {
	for n < len(keys) && h.byKey[keys[n]] != nil {
		n++
	}
	return n
}

// put copies a run into the tier as far as there is room, and marks it used with all
// that comes before it. It does nothing if the tier lacks the run's parent.
func (h *Host) put(e Stored) {
	last := h.byKey[e.Parent]
	if last == nil && !e.First || len(e.Keys) == 0 {
		return
	}
	there := h.held(e.Keys)
	if there > 0 {
		last = h.byKey[e.Keys[there-1]]
	}
	for b := last; b != nil; b = b.parent {
		h.used.MoveToBack(b.place)
	}
	added := there
	for ; added < len(e.Keys) && h.makeRoom(last); added++ {
		b := &hostBlock{key: e.Keys[added], parent: last}
		if last == nil {
			b.place = h.used.PushBack(b)
		} else {
			b.place = h.used.InsertBefore(b, last.place)
		}
		h.byKey[b.key], last = b, b
	}
	if e = e.slice(there, added); len(e.Keys) > 0 {
		h.listener.Stored(e)
	}
}

// makeRoom evicts a block if the tier is full. It returns false if that would be last, behind
// which more is to come: then all others are before it.
func (h *Host) makeRoom(last *hostBlock) bool {
	if len(h.byKey) < h.blocks {
		return true
	}
	b := h.used.Front().Value.(*hostBlock)
	if b == last {
		return false
	}
	h.used.Remove(b.place)
	delete(h.byKey, b.key)
	h.listener.Removed(b.key)
	return true
}

func (h *Host) clear() {
	clear(h.byKey)
	h.used.Init()
}
