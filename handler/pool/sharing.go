package pool

import (
	"maps"
	"slices"
)

// MeetUnnamed records the upstreams of a handler that names no pool. It returns those of
// the other such handlers if the handler has none in common with them.
func (s *SharedSettings) MeetUnnamed(upstreams []string) (unrelated []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !slices.ContainsFunc(upstreams, func(up string) bool { return s.unnamed[up] }) {
		unrelated = slices.Sorted(maps.Keys(s.unnamed))
	}
	if s.unnamed == nil {
		s.unnamed = make(map[string]bool, len(upstreams))
	}
	for _, up := range upstreams {
		s.unnamed[up] = true
	}
	return unrelated
}

// QueueIsIdle returns true once if the queue is configured and no worker has a limit, so
// that no request ever waits.
func (s *SharedSettings) QueueIsIdle() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.warned || s.All.MaxWaiting == 0 && s.All.MaxWait == 0 {
		return false
	}
	for _, w := range s.All.Workers {
		if w.MaxRunning != 0 {
			return false
		}
	}
	s.warned = true
	return true
}
