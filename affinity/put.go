package affinity

import (
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// Attempts before a write gives up. Practice does not reach them: see their uses.
const (
	politeEvictions = 8
	maxEvictions    = 1024
	maxSets         = 64
)

// write has the arguments of Put or CompareAndSwap.
type write struct {
	target kvscore.Target
	ttl    time.Duration
	kind   Kind
	now    int64

	// A conditional write needs a binding of version old, or no binding if old is 0.
	conditional bool
	old         uint64
}

// result is the outcome of a write.
type result uint8

const (
	written result = iota
	lost           // the condition does not hold
	refused        // ErrFull
	absent         // there is no live binding, and nothing has changed
)

// Put implements [Store]. A time to live of more than 100 years counts as 100.
func (r *Ristretto) Put(session string, t kvscore.Target, ttl time.Duration, kind Kind) (Binding, error) {
	b, _, err := r.write(session, write{target: t, ttl: ttl, kind: kind})
	return b, err
}

// CompareAndSwap implements [Store].
func (r *Ristretto) CompareAndSwap(session string, old uint64, t kvscore.Target, ttl time.Duration, kind Kind) (Binding, bool, error) {
	return r.write(session, write{target: t, ttl: ttl, kind: kind, conditional: true, old: old})
}

func (r *Ristretto) write(session string, w write) (Binding, bool, error) {
	if w.ttl <= 0 {
		return Binding{}, false, ErrTTL
	}
	w.ttl = min(w.ttl, maxTTL)
	h := r.hash(session)
	g, ok := r.enter(h)
	if !ok {
		return Binding{}, false, ErrClosed
	}
	defer g.RUnlock()
	w.now = r.now()

	b, res := Binding{}, absent
	if e := r.find(h, session); e != nil {
		b, res = r.rebind(e, &w)
		if res == absent && r.expire(e, w.now) {
			r.detach(e)
		}
	}
	if res == absent && w.conditional && w.old != 0 {
		res = lost
	}
	if res == absent {
		var ended []*entry
		b, res, ended = r.insert(h, session, &w)
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
// returns absent for an overdue entry and does not change it.
func (r *Ristretto) rebind(e *entry, w *write) (Binding, result) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ended || e.due.Load() <= w.now {
		return Binding{}, absent
	}
	if w.conditional && e.version != w.old {
		return r.binding(e), lost
	}
	replaces := e.kind == EngineBacked && e.target != w.target
	// The old binding's place in the queue goes to its end if that is reported, otherwise
	// to the new binding.
	spare := e.kind == EngineBacked && !replaces
	switch {
	case w.kind == EngineBacked && !spare:
		if !r.queue.claim(e.cost()) {
			return Binding{}, refused
		}
	case w.kind != EngineBacked && spare:
		r.queue.settle(e.cost())
	}
	if replaces {
		r.queue.push(event{session: e.session, binding: r.binding(e), why: Replaced})
	}
	e.set(w, r.version.Add(1))
	return r.binding(e), written
}

// insert stores a new entry for a session that had no live one when last seen. It returns
// entries that have ended. The caller detaches them, because that needs their stripes and
// insert holds this one's.
func (r *Ristretto) insert(h uint64, session string, w *write) (b Binding, res result, ended []*entry) {
	s := r.stripe(h)
	s.Lock()
	defer s.Unlock()

	cur, found := r.cache.Get(h)
	if found && cur.session == session {
		if b, res = r.rebind(cur, w); res != absent {
			return b, res, nil
		}
		if r.expire(cur, w.now) {
			ended = append(ended, cur)
		}
	}

	e := &entry{session: strings.Clone(session), hash: h, slot: -1}
	e.set(w, r.version.Add(1))
	b = r.binding(e)
	if w.kind == EngineBacked && !r.queue.claim(e.cost()) {
		return Binding{}, refused, ended
	}
	ok, evicted := r.admit(e, w.now)
	ended = append(ended, evicted...)
	if !ok {
		if w.kind == EngineBacked {
			r.queue.settle(e.cost())
		}
		return Binding{}, refused, ended
	}
	// From here on, another write may evict e, and reports that.

	if found && cur.session != session {
		// Two sessions have one hash, and the cache has one place for both. The newer
		// one gets it.
		r.evict(cur, 0, w.now, true)
	}
	if r.store(e) || !r.withdraw(e) {
		return b, written, ended
	}
	return Binding{}, refused, ended
}

// withdraw ends an admitted entry that the cache did not take. It returns false if the
// entry was accepted and has been evicted since. The caller holds the stripe.
func (r *Ristretto) withdraw(e *entry) bool {
	// The hash may still lead to an entry that insert has ended.
	r.cache.Del(e.hash)
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
// ones even if it returns false.
func (r *Ristretto) admit(e *entry, now int64) (ok bool, evicted []*entry) {
	var freed int64
	for failed := 0; failed < maxEvictions; {
		a, victim, used := r.roster.add(e, now, freed)
		switch {
		case a == admitted:
			return true, evicted
		case a == tooLarge:
			return false, evicted
		case victim != nil && r.evict(victim, used, now, failed >= politeEvictions):
			evicted = append(evicted, victim)
			freed += victim.cost()
		default:
			// Another call used or ended the victim first. Either is progress, so only
			// very many concurrent calls can make this fail often.
			failed++
		}
	}
	return false, evicted
}

// store puts the entry into the cache. It returns true once the cache finds it, or false if
// ristretto did not take it. The caller holds the stripe.
//
// Ristretto replaces a value at once, but queues a new key and drops it if the queue is
// full. store waits for every new key, so the queue holds about one item per goroutine.
func (r *Ristretto) store(e *entry) bool {
	for range maxSets {
		if !r.cache.Set(e.hash, e, 1) {
			r.cache.Wait()
			continue
		}
		if cur, ok := r.cache.Get(e.hash); ok && cur == e {
			return true
		}
		r.cache.Wait()
		cur, ok := r.cache.Get(e.hash)
		return ok && cur == e
	}
	return false
}
