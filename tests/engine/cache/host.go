package cache

import "container/list"

// Host is a slower tier behind a cache, as SGLang's HiCache in pinned memory of the
// host. It holds a copy of each block that became findable until it has no room. The
// least recently used block goes first, and the parent of a block that it holds is
// held.
type Host struct {
	capacity int
	byKey    map[Key]*hostBlock
	used     *list.List // the least recently used first; a block is before its parent
	puts     uint64
	listener Listener
}

// hostBlock is one block of the slower tier.
type hostBlock struct {
	key    Key
	parent *hostBlock // nil for the first of a prompt
	place  *list.Element
	put    uint64 // the latest put that needs it
}

// NewHost returns an empty tier. The listener may be nil. It is not told when the cache
// is cleared, as the cache's own is.
func NewHost(blocks int, l Listener) *Host {
	return &Host{capacity: blocks, byKey: make(map[Key]*hostBlock), used: list.New(), listener: l}
}

// held returns how many leading keys the tier holds.
func (h *Host) held(keys []Key) int {
	for i, k := range keys {
		if h.byKey[k] == nil {
			return i
		}
	}
	return len(keys)
}

// put copies a run into the tier as far as there is room, and marks it used with all
// that comes before it. It does nothing if the tier lacks the run's parent.
func (h *Host) put(e Stored) {
	parent := h.byKey[e.Parent]
	if parent == nil && !e.First || len(e.Keys) == 0 {
		return
	}
	h.puts++
	for b := parent; b != nil; b = b.parent {
		b.put = h.puts
	}
	size, there := len(e.Tokens)/len(e.Keys), 0
	for ; there < len(e.Keys) && h.byKey[e.Keys[there]] != nil; there++ {
		parent = h.byKey[e.Keys[there]]
		parent.put = h.puts
	}
	added := there
	for ; added < len(e.Keys) && h.makeRoom(); added++ {
		b := &hostBlock{key: e.Keys[added], parent: parent, put: h.puts}
		b.place = h.used.PushBack(b)
		h.byKey[b.key] = b
		parent = b
	}
	for b := parent; b != nil; b = b.parent {
		h.used.MoveToBack(b.place)
	}
	if added == there || h.listener == nil {
		return
	}
	if there > 0 {
		e.First, e.Parent = false, e.Keys[there-1]
	}
	e.Keys, e.Tokens = e.Keys[there:added], e.Tokens[there*size:added*size]
	h.listener.Stored(e)
}

// makeRoom evicts a block if the tier is full. It returns false if that is one which the
// present put needs.
func (h *Host) makeRoom() bool {
	if len(h.byKey) < h.capacity {
		return true
	}
	front := h.used.Front()
	if front == nil {
		return false
	}
	b := front.Value.(*hostBlock)
	if b.put == h.puts {
		return false
	}
	h.used.Remove(front)
	delete(h.byKey, b.key)
	if h.listener != nil {
		h.listener.Removed(b.key)
	}
	return true
}

func (h *Host) clear() {
	clear(h.byKey)
	h.used.Init()
}
