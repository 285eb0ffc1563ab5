package affinity

import "context"

// maxEvictions is the number of attempts to make room before a write gives up.
const maxEvictions = 256

type write struct {
	Want
	now      int64
	idle     int64   // time since the last use, of a restored binding
	restores bool    // see Restore
	version  Version // of another router's binding, which reports the end of what it replaces; 0: a new one
}

// Bind binds the session if its present binding has the version expect, or for 0, if it has no
// binding. It returns the new binding and true. If there is no room, it evicts another session's
// binding.
//
// Bind to the same target renews the binding and reports no end, even if the kind changes. A
// caller that makes an EngineBacked binding RouterOnly must release the engine's session itself.
func (r *Bindings) Bind(_ context.Context, key Key, expect Version, want Want) (b Binding, bound bool, err error) {
	if want.TTL <= 0 {
		return Binding{}, false, ErrTTL
	}
	want.TTL = min(want.TTL, maxTTL)
	b, bound, err = r.bind(&key, expect, want)
	if bound && r.journal != nil {
		r.journal.Bound(key, want, b.Version)
	}
	return b, bound, err
}

func (r *Bindings) bind(key *Key, expect Version, want Want) (b Binding, bound bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	w := write{Want: want, now: r.now()}
	switch e := r.find(key, w.now); {
	case e != nil && e.version != expect:
		return r.binding(e), false, nil
	case e != nil:
		return r.rebind(e, &w), true, nil
	case expect != 0:
		return Binding{}, false, nil
	}
	if b, bound = r.insert(key, &w); !bound {
		err = ErrFull
	}
	return b, bound, err
}

func (r *Bindings) rebind(e *entry, w *write) Binding {
	if e.kind == EngineBacked && e.target() != w.Target && w.version == 0 {
		r.queue.push(&event{key: e.key, binding: r.binding(e), why: Replaced})
	}
	due := e.due
	if e.set(w, r.versionOf(w)); e.due < due {
		r.roster.hasten(e)
	}
	return r.binding(e)
}

// versionOf returns the version that a write gives the binding. A new one was never used.
func (r *Bindings) versionOf(w *write) Version {
	if w.version != 0 {
		return w.version
	}
	r.version++
	return r.version
}

// insert stores a new entry for a session that has no live one. It returns false if there is no room, or the
// store is closed.
func (r *Bindings) insert(key *Key, w *write) (Binding, bool) {
	e := &entry{key: *key, scope: w.Scope}
	e.set(w, r.versionOf(w))
	if r.closed || !r.admit(e, w) {
		return Binding{}, false
	}
	if cur, _ := r.cache.Get(key.hash()); cur != nil {
		// Two sessions have one hash, and the cache has one place for both. The newer
		// one gets it.
		r.evict(cur, w.now, true)
	}
	// Ristretto queues a new key, and drops it if the queue is full. It finds the key after Wait.
	for !r.cache.Set(key.hash(), e, 1) {
		r.cache.Wait()
	}
	r.cache.Wait()
	return r.binding(e), true
}

// admit adds the entry to the roster, evicting others as needed. A restored entry does not evict one
// that was used later.
func (r *Bindings) admit(e *entry, w *write) bool {
	evicted := 0
	for failed := 0; failed < maxEvictions; {
		added, victim := r.roster.add(e, w.now, evicted)
		switch {
		case added:
			return true
		case victim == nil: // the sample had none of the scope
			failed++
		case w.restores && victim.used >= e.used:
			return false
		case r.evict(victim, w.now, false):
			evicted++
		default: // often only if live requests use nearly all bindings
			failed++
		}
	}
	return false
}
