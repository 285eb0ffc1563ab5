package affinity

import "context"

// maxEvictions is the number of attempts to make room before a write gives up.
const maxEvictions = 256

// write has the arguments of Bind.
type write struct {
	Want
	expect   Version
	now      int64
	idle     int64   // time since the last use, of a restored binding
	restores bool    // see Restore
	version  Version // of another router's binding, which reports the end of what it replaces; 0: a new one
}

// result is the outcome of a write.
type result uint8

const (
	absent result = iota // there is no live binding, and nothing has changed
	written
	lost    // the condition does not hold
	refused // ErrFull
)

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
	if !r.enter() {
		return Binding{}, false, ErrClosed
	}
	defer r.leave()
	w, res := write{Want: want, expect: expect, now: r.now()}, absent
	if e := r.find(&key); e != nil {
		r.visit(e, w.now, func() { b, res = r.rebind(e, &w) })
	}
	if res == absent && expect == 0 {
		b, res = r.insert(&key, &w)
	}
	if res == refused {
		return Binding{}, false, ErrFull
	}
	if res == written && r.journal != nil {
		r.journal.Bound(key, want, b.Version)
	}
	return b, res == written, nil
}

// rebind changes a live entry in place, so that the session always has a binding. The caller
// holds e.mu.
func (r *Bindings) rebind(e *entry, w *write) (Binding, result) {
	if e.version != w.expect {
		return r.binding(e), lost
	}
	if e.kind == EngineBacked && e.target() != w.Target && w.version == 0 {
		r.queue.push(&event{key: e.key, binding: r.binding(e), why: Replaced})
	}
	due := e.due.Load()
	if e.set(w, r.versionOf(w)); e.due.Load() < due {
		r.roster.hasten(e)
	}
	return r.binding(e), written
}

// versionOf returns the version that a write gives the binding. A new one was never used.
func (r *Bindings) versionOf(w *write) Version {
	if w.version != 0 {
		return w.version
	}
	return Version(r.version.Add(1))
}

// find returns the session's entry or nil. The entry may have ended.
func (r *Bindings) find(key *Key) *entry {
	if e, _ := r.cache.Get(key.hash()); e != nil && e.key == *key {
		return e
	}
	return nil
}

// insert stores a new entry for a session that had no live one when last seen.
func (r *Bindings) insert(key *Key, w *write) (Binding, result) {
	r.writes.Lock()
	defer r.writes.Unlock()
	cur, _ := r.cache.Get(key.hash())
	if cur != nil && cur.key == *key {
		cur.mu.Lock()
		b, ended := r.binding(cur), cur.ended
		cur.mu.Unlock()
		if !ended { // another call has bound the session meanwhile, and the caller expects none
			return b, lost
		}
	}
	e := &entry{key: *key, scope: w.Scope, slot: -1}
	e.set(w, r.versionOf(w))
	b := r.binding(e)
	if !r.admit(e, w) {
		return Binding{}, refused
	}
	if cur != nil && cur.key != *key {
		// Two sessions have one hash, and the cache has one place for both. The newer
		// one gets it.
		r.evict(cur, w.now, true)
	}
	// Ristretto queues a new key, and drops it if the queue is full. It finds the key after Wait.
	for !r.cache.Set(key.hash(), e, 1) {
		r.cache.Wait()
	}
	r.cache.Wait()
	return b, written
}

// admit adds the entry to the roster, evicting others as needed. A restored entry does not evict one
// that was used later. The caller holds writes.
func (r *Bindings) admit(e *entry, w *write) bool {
	evicted := 0
	for failed := 0; failed < maxEvictions; {
		added, victim := r.roster.add(e, w.now, evicted)
		switch {
		case added:
			return true
		case victim == nil: // the sample had none of the scope
			failed++
		case w.restores && victim.used.Load() >= e.used.Load():
			return false
		case r.evict(victim, w.now, false):
			r.forget(victim)
			evicted++
		default:
			// Live requests use the victim, or another call ended it first. That is often
			// so only if live requests use nearly all bindings.
			failed++
		}
	}
	return false
}
