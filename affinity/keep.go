package affinity

import (
	"context"
	"math/rand/v2"
	"time"
)

// keepLoop runs until Close.
func (s *Sessions) keepLoop() {
	defer close(s.done)
	ticker := time.NewTicker(keepInterval)
	defer ticker.Stop()
	for {
		select {
		case t := <-ticker.C:
			s.keep(t)
		case <-s.stop:
			return
		}
	}
}

// keep restarts the time to live of the bindings that live requests use. An error is not
// reported: the next pass comes before the time to live ends. It begins with any shard, so that
// a slow store does not always neglect the same sessions.
func (s *Sessions) keep(now time.Time) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*keepInterval)
	defer cancel()
	var due []Entry
	for i, first := 0, rand.IntN(len(s.shards)); i < len(s.shards); i++ { //nolint:gosec // only a beginning
		due = s.shards[(first+i)%len(s.shards)].untouched(now, due[:0])
		for _, e := range due {
			if _, _, _ = s.Touch(ctx, e.Key, e.Version); ctx.Err() != nil {
				return
			}
		}
	}
}

// untouched appends the bindings whose time to live must restart.
func (sh *shard) untouched(now time.Time, list []Entry) []Entry {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	for key, a := range sh.active {
		if a.version != 0 && now.Sub(a.touched) >= a.ttl/4 {
			a.touched = now
			list = append(list, Entry{Key: key, Binding: Binding{Version: a.version}})
		}
	}
	return list
}
