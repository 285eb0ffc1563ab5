package affinity

import "context"

// Attempts before a write gives up. Practice does not reach them: see their uses.
const (
	maxEvictions = 256
	maxSets      = 64
)

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
func (r *Ristretto) Bind(_ context.Context, key Key, expect Version, want Want) (b Binding, bound bool, err error) {
	if want.TTL <= 0 {
		return Binding{}, false, ErrTTL
	}
	want.TTL = min(want.TTL, maxTTL)
	g, ok := r.enter(key.hash())
	if !ok {
		return Binding{}, false, ErrClosed
	}
	defer g.RUnlock()
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
func (r *Ristretto) rebind(e *entry, w *write) (Binding, result) {
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
func (r *Ristretto) versionOf(w *write) Version {
	if w.version != 0 {
		return w.version
	}
	return Version(r.version.Add(1))
}

// insert stores a new entry for a session that had no live one when last seen. The caller holds
// no stripe.
func (r *Ristretto) insert(key *Key, w *write) (Binding, result) {
	b, res, evicted := r.insertInStripe(key, w)
	for _, e := range evicted { // each has a stripe of its own
		r.detach(e)
	}
	return b, res
}

// insertInStripe is insert without detaching the entries that it has evicted.
func (r *Ristretto) insertInStripe(key *Key, w *write) (b Binding, res result, evicted []*entry) {
	h := key.hash()
	s := r.stripe(h)
	s.Lock()
	defer s.Unlock()

	cur := r.lookup(s, h)
	if cur != nil && cur.key == *key {
		cur.mu.Lock()
		if !cur.ended {
			// Another call has bound the session meanwhile, and the caller expects none.
			b = r.binding(cur)
			cur.mu.Unlock()
			return b, lost, nil
		}
		cur.mu.Unlock()
	}

	e := &entry{key: *key, scope: w.Scope, slot: -1}
	e.set(w, r.versionOf(w))
	b = r.binding(e)
	ok, evicted := r.admit(e, w)
	if !ok {
		return Binding{}, refused, evicted
	}
	// From here on, another write may evict e, and reports that.

	if cur != nil && cur.key != *key {
		// Two sessions have one hash, and the cache has one place for both. The newer
		// one gets it.
		r.evict(cur, w.now, true)
	}
	if r.store(s, e) || !r.withdraw(e) {
		return b, written, evicted
	}
	return Binding{}, refused, evicted
}

// withdraw ends an admitted entry that the cache did not take. It returns false if the
// entry was accepted and has been evicted since. The caller holds the stripe.
func (r *Ristretto) withdraw(e *entry) bool {
	// The hash may still lead to an entry that has ended.
	r.cache.Del(e.key.hash())
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ended {
		return false
	}
	r.finish(e, 0)
	return true
}

// admit adds the entry to the roster, evicting others as needed. It returns the evicted
// ones even if it returns false. A restored entry does not evict one that was used later.
func (r *Ristretto) admit(e *entry, w *write) (ok bool, evicted []*entry) {
	for failed := 0; failed < maxEvictions; {
		added, victim := r.roster.add(e, w.now, len(evicted))
		switch {
		case added:
			return true, evicted
		case victim == nil: // the sample had none of the scope
			failed++
		case w.restores && victim.used.Load() >= e.used.Load():
			return false, evicted
		case r.evict(victim, w.now, false):
			evicted = append(evicted, victim)
		default:
			// Live requests use the victim, or another call ended it first. That is often
			// so only if live requests use nearly all bindings.
			failed++
		}
	}
	return false, evicted
}
