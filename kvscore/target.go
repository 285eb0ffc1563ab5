package kvscore

import "strconv"

// Target is what is selected, bound, scored and indexed: one data-parallel
// rank of one worker. Workers without data parallelism have the one rank 0.
type Target struct {
	// Worker is the worker's id, configured or derived from its address.
	Worker uint64
	// Rank is the data-parallel rank inside the worker.
	Rank uint32
}

// TargetRef is a target with a short cut to its books, for lists that are chosen
// from again and again: see [Scheduler.Refs]. Without the short cut, and where it
// has become stale, a scheduler looks the target up.
type TargetRef struct {
	Target
	load *load
}

// Refs returns references to targets for the use with this scheduler alone. They
// stay valid whatever is declared or forgotten, but those of targets that are not
// known now, or are forgotten later, cost a look-up with each use.
func (s *Scheduler) Refs(targets []Target) []TargetRef {
	s.mu.Lock()
	defer s.mu.Unlock()
	refs := make([]TargetRef, len(targets))
	for i, t := range targets {
		refs[i] = TargetRef{t, s.targets[t]}
	}
	return refs
}

// loadOf returns the books behind a reference, nil if the target is not known.
// The lock is held.
func (s *Scheduler) loadOf(t TargetRef) *load {
	if ld := t.load; ld != nil && !ld.forgotten {
		return ld
	}
	return s.targets[t.Target]
}

// String returns worker/rank, both in decimal.
func (t Target) String() string {
	return strconv.FormatUint(t.Worker, 10) + "/" + strconv.FormatUint(uint64(t.Rank), 10)
}
