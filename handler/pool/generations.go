package pool

// generations is a map that forgets the entries put longest ago. The zero value is empty.
type generations[K comparable, V any] struct {
	new, old map[K]V // old is dropped when new is full
}

// put makes an entry the newest. At least size entries are kept, and at most twice as many. put
// returns whether it began a new half, and dropped the older one.
func (g *generations[K, V]) put(key K, v V, size int) (turned bool) {
	if turned = g.new == nil || len(g.new) >= size; turned {
		g.new, g.old = make(map[K]V), g.new
	}
	g.new[key] = v
	delete(g.old, key)
	return turned
}

// get returns an entry, and whether it is among the older half.
func (g *generations[K, V]) get(key K) (v V, known, aging bool) {
	if v, known = g.new[key]; known {
		return v, true, false
	}
	v, known = g.old[key]
	return v, known, known
}

func (g *generations[K, V]) remove(key K) {
	delete(g.new, key)
	delete(g.old, key)
}

func (g *generations[K, V]) count() int { return len(g.new) + len(g.old) }
