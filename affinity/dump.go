package affinity

import (
	"context"
	"time"
)

// Saved is a binding as it survives its store.
type Saved struct {
	Key Key
	Want
	// Idle is the time since the last use, 0 while a request uses the binding.
	Idle time.Duration
}

// Dump passes all live bindings to each, in no order and in parts of up to 1,024. It holds no
// lock meanwhile, so that requests do not wait: what changes during the call may be
// missing, or come twice. The parts share their memory. Dump ends early if each returns
// false. It returns whether it has passed on everything.
func (r *Ristretto) Dump(each func([]Saved) bool) bool {
	buf, part := make([]*entry, 0, chunkSize), make([]Saved, 0, chunkSize)
	for end := r.roster.size(); end > 0; {
		buf, end = r.roster.chunk(end, buf[:0])
		var open bool
		if part, open = r.save(buf, part[:0]); !open || len(part) > 0 && !each(part) {
			return false
		}
	}
	return true
}

// save appends the bindings of live entries to part. It returns false if the store is closed.
// It enters for one chunk only, so that Close does not wait for a whole pass.
func (r *Ristretto) save(chunk []*entry, part []Saved) ([]Saved, bool) {
	g, ok := r.enter(0)
	if !ok {
		return nil, false
	}
	defer g.RUnlock()
	now := r.now()
	for _, e := range chunk {
		alive := r.lock(e, now)
		b, used := r.binding(e), e.used.Load()
		e.mu.Unlock()
		if !alive {
			continue
		}
		one := Saved{Key: e.key, Want: b.Want}
		if !r.inUse(e, b.Version) {
			one.Idle = time.Duration(max(0, now-used))
		}
		part = append(part, one)
	}
	return part, true
}

// Restore binds a session as it was before, if it has no binding now. The time to live
// continues from the last use. Restore returns false without an error if the session has a
// binding, or if its time is over. It does the same if the store is full of bindings that were
// used later.
func (r *Ristretto) Restore(_ context.Context, s *Saved) (bool, error) {
	if s.TTL <= 0 {
		return false, ErrTTL
	}
	g, ok := r.enter(s.Key.hash())
	if !ok {
		return false, ErrClosed
	}
	defer g.RUnlock()
	w := write{Want: s.Want, now: r.now(), idle: int64(max(0, s.Idle)), restores: true}
	w.TTL = min(w.TTL, maxTTL)
	if s.Idle >= w.TTL {
		return false, nil
	}
	if e := r.find(&s.Key); e != nil {
		alive := r.lock(e, w.now)
		e.mu.Unlock()
		if alive {
			return false, nil
		}
	}
	_, res, ended := r.insert(&s.Key, &w)
	for _, e := range ended {
		r.detach(e)
	}
	return res == written, nil
}

// Changes returns a number that grows with each Bind.
func (r *Ristretto) Changes() Version { return Version(r.version.Load()) }

// Skip makes all further versions greater than v. The owner passes a version above all of an
// earlier run, so that none recurs if the wall clock has gone back.
func (r *Ristretto) Skip(v Version) {
	for {
		now := r.version.Load()
		if now >= uint64(v) || r.version.CompareAndSwap(now, uint64(v)) {
			return
		}
	}
}
