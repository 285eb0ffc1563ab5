package affinity

import "sync"

// backed remembers what only EngineBacked bindings have, by their versions. It is beside the
// entries, which have no pointers: the garbage collector need not read a million of them.
type backed struct {
	mu sync.Mutex
	of map[Version]engineSession
}

// engineSession is an EngineBacked binding's session and the engine's id of it.
type engineSession struct {
	key Key
	id  string
}

func (b *backed) add(v Version, key Key, id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.of == nil {
		b.of = make(map[Version]engineSession)
	}
	b.of[v] = engineSession{key, id}
}

func (b *backed) remove(v Version) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.of, v)
}

func (b *backed) id(v Version) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.of[v].id
}

// keys returns the sessions that meet a condition.
func (b *backed) keys(meets func(id string) bool) (keys []Key) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.of {
		if meets(s.id) {
			keys = append(keys, s.key)
		}
	}
	return keys
}

// EngineBacked returns the sessions with an EngineBacked binding. Some may end meanwhile.
func (r *Ristretto) EngineBacked() []Key {
	return r.backed.keys(func(string) bool { return true })
}

// WithEngineSession returns the sessions whose EngineBacked binding has an engine's id. It
// reads all such bindings.
func (r *Ristretto) WithEngineSession(id string) []Key {
	return r.backed.keys(func(other string) bool { return other == id })
}
