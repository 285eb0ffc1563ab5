package kvscore

import "github.com/caddy-kvrouter/kvrouter/kvscore/cache"

// Target is one data-parallel rank of one worker. The router selects, binds, scores and
// indexes targets. A worker without data parallelism has only rank 0.
type Target = cache.Target

// TargetRef is a target with a pointer to its load, for lists that many requests choose
// from: see [Scheduler.Refs]. If the pointer is nil or stale, the scheduler looks the
// target up with each use.
type TargetRef struct {
	Target
	load *load
}

// Refs returns references to targets, for use with this scheduler only. They always stay valid.
func (s *Scheduler) Refs(targets ...Target) []TargetRef {
	s.mu.Lock()
	defer s.mu.Unlock()
	refs := make([]TargetRef, len(targets))
	for i, t := range targets {
		refs[i] = TargetRef{t, s.targets[t]}
	}
	return refs
}

// loadOf returns the load of a target, nil if the target is not known.
// The lock is held.
func (s *Scheduler) loadOf(t TargetRef) *load {
	if ld := t.load; ld != nil && !ld.forgotten {
		return ld
	}
	return s.targets[t.Target]
}
