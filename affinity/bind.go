package affinity

import "context"

// Attempts before a write gives up. Practice does not reach the last: see its use.
const (
	politeEvictions = 8
	maxEvictions    = 256
	maxSets         = 64
)

// write has the arguments of Bind.
type write struct {
	Want
	expect   Version
	now      int64
	idle     int64 // time since the last use, of a restored binding
	restores bool  // see Restore
}

// result is the outcome of a write.
type result uint8

const (
	written result = iota
	lost           // the condition does not hold
	refused        // ErrFull
	absent         // there is no live binding, and nothing has changed
)

// Bind implements [Store].
func (r *Ristretto) Bind(_ context.Context, key Key, expect Version, want Want) (Binding, bool, error) {
	if want.TTL <= 0 {
		return Binding{}, false, ErrTTL
	}
	want.TTL = min(want.TTL, maxTTL)
	g, ok := r.enter(key.hash())
	if !ok {
		return Binding{}, false, ErrClosed
	}
	defer g.RUnlock()
	w := write{Want: want, expect: expect, now: r.now()}

	b, res := Binding{}, absent
	if e := r.find(&key); e != nil {
		b, res = r.rebind(e, &w)
	}
	if res == absent && expect != 0 {
		res = lost
	}
	if res == absent {
		var ended []*entry
		b, res, ended = r.insert(&key, &w)
		for _, e := range ended {
			r.detach(e)
		}
	}
	if res == refused {
		return Binding{}, false, ErrFull
	}
	return b, res == written, nil
}

// rebind changes a live entry in place, so that the session always has a binding. It
// returns absent if the binding has ended. The caller holds no stripe.
func (r *Ristretto) rebind(e *entry, w *write) (Binding, result) {
	alive := r.lock(e, w.now)
	if !alive {
		e.mu.Unlock()
		return Binding{}, absent
	}
	due := e.due.Load()
	b, res := r.change(e, w)
	e.mu.Unlock()
	if res == written && w.now+int64(w.TTL) < due {
		r.roster.hasten(e)
	}
	return b, res
}

// change is rebind for a caller that holds e.mu and knows that the binding is alive.
func (r *Ristretto) change(e *entry, w *write) (Binding, result) {
	if e.version != w.expect {
		return r.binding(e), lost
	}
	replaces := e.kind == EngineBacked && e.target() != w.Target
	// The old binding's place in the queue goes to its end if that is reported, otherwise
	// to the new binding.
	spare := e.kind == EngineBacked && !replaces
	switch {
	case w.Kind == EngineBacked && !spare:
		if !r.queue.claim() {
			return Binding{}, refused
		}
	case w.Kind != EngineBacked && spare:
		r.queue.settle()
	}
	if replaces {
		r.queue.push(event{key: e.key, binding: r.binding(e), why: Replaced})
	}
	r.set(e, w)
	return r.binding(e), written
}

// next returns a version that was never used.
func (r *Ristretto) next() Version { return Version(r.version.Add(1)) }

// insert stores a new entry for a session that had no live one when last seen. It returns
// entries that have ended. The caller detaches them, because that needs their stripes and
// insert holds this one's.
func (r *Ristretto) insert(key *Key, w *write) (b Binding, res result, ended []*entry) {
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

	if w.Kind == EngineBacked && !r.queue.claim() {
		return Binding{}, refused, nil
	}
	e := &entry{key: *key, scope: w.Scope, slot: -1}
	r.set(e, w)
	b = r.binding(e)
	ok, ended := r.admit(e, w)
	if !ok {
		if w.Kind == EngineBacked {
			r.queue.settle()
			r.backed.remove(e.version)
		}
		return Binding{}, refused, ended
	}
	// From here on, another write may evict e, and reports that.

	if cur != nil && cur.key != *key {
		// Two sessions have one hash, and the cache has one place for both. The newer
		// one gets it.
		r.evict(cur, 0, w.now, force)
	}
	if r.store(s, e) || !r.withdraw(e) {
		r.recent.put(e)
		return b, written, ended
	}
	return Binding{}, refused, ended
}

// withdraw ends an admitted entry that the cache did not take. It returns false if the
// entry was accepted and has been evicted since. The caller holds the stripe.
func (r *Ristretto) withdraw(e *entry) bool {
	// The hash may still lead to an entry that has ended.
	r.cache.Del(e.key.hash())
	e.mu.Lock()
	gone := e.ended
	if !gone {
		r.finish(e, 0)
	}
	e.mu.Unlock()
	if gone {
		return false
	}
	r.roster.remove(e)
	return true
}

// admit adds the entry to the roster, evicting others as needed. It returns the evicted
// ones even if it returns false. A restored entry does not evict one that was used later.
func (r *Ristretto) admit(e *entry, w *write) (ok bool, evicted []*entry) {
	now := w.now
	for failed := 0; failed < maxEvictions; {
		added, victim, used := r.roster.add(e, now, len(evicted) > 0)
		if added {
			return true, evicted
		}
		if w.restores && used >= e.used.Load() {
			return false, evicted
		}
		p := polite
		if failed >= politeEvictions {
			p = urgent
		}
		if victim != nil && r.evict(victim, used, now, p) {
			evicted = append(evicted, victim)
			continue
		}
		// Live requests use the victim, or another call used or ended it first. That is
		// often so only if live requests use nearly all bindings.
		failed++
	}
	return false, evicted
}
