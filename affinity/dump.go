package affinity

import (
	"time"
)

// Saved is a binding as it survives its store. In CBOR it lacks the target.
type Saved struct {
	Key Key `cbor:"1,keyasint"`
	Want
	// Idle is the time since the last use, 0 while a request uses the binding.
	Idle time.Duration `cbor:"2,keyasint,omitempty"`
	// Version is that of the binding, 0 if it is unknown.
	Version Version `cbor:"3,keyasint,omitempty"`
}

// Dump passes all live bindings to each, in no order and in parts of up to 1,024. It holds no
// lock meanwhile, so that requests do not wait: what changes during the call may be
// missing, or come twice. The parts share their memory. Dump ends early if each returns
// false. It returns whether it has passed on everything.
func (r *Bindings) Dump(each func([]Saved) bool) bool {
	part := make([]Saved, 0, chunkSize)
	return r.pass(false, func(e *entry, now int64) {
		one := Saved{Key: e.key, Want: r.binding(e).Want, Version: e.version}
		if !r.uses(e) {
			one.Idle = time.Duration(max(0, now-e.used))
		}
		part = append(part, one)
	}, func() bool {
		open := len(part) == 0 || each(part)
		part = part[:0]
		return open
	})
}

// Restore binds a session as it was before, if it has no binding now. The time to live
// continues from the last use. Restore returns false if the session has a binding, or if its time is
// over. It does the same if the store is full of bindings that were used later.
func (r *Bindings) Restore(s *Saved) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	w := r.saved(s)
	w.restores = true
	if w.idle >= int64(w.TTL) || r.find(&s.Key, w.now) != nil {
		return false
	}
	_, done := r.insert(&s.Key, &w)
	return done
}

// Follow takes over a binding that another router has made, if its version is greater than that of
// the session's own. If both are equal, all routers keep the greater target. Follow returns
// whether it has taken over the binding, and does not call the Journal. Only another session of an
// engine replaces an engine's session.
func (r *Bindings) Follow(s *Saved) bool {
	if s.TTL <= 0 || s.Idle >= s.TTL || s.Version == 0 || s.Version > r.lastVersion() {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	w := r.saved(s)
	e := r.find(&s.Key, w.now)
	if e == nil {
		_, done := r.insert(&s.Key, &w)
		return done
	}
	later := e.version < w.version || e.version == w.version && e.Target.Less(w.Target)
	if !later || w.EngineSession == "" && e.Kind == EngineBacked { // a router without the engine's session cannot end it
		return false
	}
	r.rebind(e, &w)
	return true
}

// saved returns the write of a saved binding. Further versions are greater than its own. The caller
// holds mu.
func (r *Bindings) saved(s *Saved) write {
	w := write{Want: s.Want, now: r.now(), idle: int64(max(0, s.Idle))}
	if s.Version <= r.lastVersion() {
		w.version = s.Version
	}
	w.TTL = min(w.TTL, maxTTL)
	r.version = max(r.version, w.version)
	return w
}

// lastVersion bounds the versions of others and of earlier runs. They are times in nanoseconds: one
// that cannot be right would make all further ones too great.
func (r *Bindings) lastVersion() Version {
	return Version(max(0, r.start.AddDate(10, 0, 0).UnixNano())) //nolint:gosec // not negative
}

// FollowUse restarts the time to live of a session that another router has used.
func (r *Bindings) FollowUse(key Key) { r.with(&key, (*entry).slide) }

// FollowEnd ends a binding that another router has ended, unless the session has a later one. It
// ends any of an engine's session, without a report: the other router has closed it.
func (r *Bindings) FollowEnd(key Key, v Version) {
	r.with(&key, func(e *entry, _ int64) bool {
		return (e.version <= v || e.Kind == EngineBacked) && r.finish(e, 0)
	})
}

// Changes returns a number that grows with each Bind.
func (r *Bindings) Changes() Version {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.version
}

// Skip makes all further versions greater than v. The owner passes a version above all of an
// earlier run, so that none recurs if the wall clock has gone back. Skip ignores a version that
// cannot be right.
func (r *Bindings) Skip(v Version) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if v <= r.lastVersion() {
		r.version = max(r.version, v)
	}
}
