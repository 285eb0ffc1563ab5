package affinity

import (
	"bytes"
	"math"
	"slices"
	"time"
)

// run sweeps and reports until the store is closed.
func (r *Bindings) run(sweep time.Duration) {
	defer close(r.stopped)
	ticker := time.NewTicker(sweep)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			r.sweep()
		case <-r.wake:
			r.Reported()
		case <-r.stop:
			return
		}
	}
}

// ended is the end of a binding.
type ended struct {
	key     Key
	binding Binding
	why     Reason
}

const maxEnds = 1 << 14

// report has OnExpire get the end of an engine's session, unless too many wait. The caller holds mu.
func (r *Bindings) report(e *entry, why Reason) {
	if e.Kind != EngineBacked || r.onExpire == nil || len(r.pending) == maxEnds {
		return
	}
	r.pending = append(r.pending, ended{e.key, r.binding(e), why})
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Reported returns when OnExpire has got the ends that happened before.
func (r *Bindings) Reported() {
	r.reporting.Lock()
	defer r.reporting.Unlock()
	for {
		r.mu.Lock()
		list := r.pending
		if len(list) > 0 {
			r.pending = list[1:]
		}
		r.mu.Unlock()
		if len(list) == 0 {
			return
		}
		r.onExpire(list[0].key, list[0].binding, list[0].why)
	}
}

// sweep ends overdue entries, to save memory and to report ends in time. Reads never return
// an overdue binding, swept or not.
func (r *Bindings) sweep() {
	r.pass(true, func(*entry, int64) {}, func() bool { return true })
}

// pass calls each with the live entries, or with the overdue ones that are in use only. It ends the other
// overdue ones. After each part of up to chunkSize it calls after, and ends if that returns false. It
// returns whether it has passed on everything. It holds the lock for one part only.
func (r *Bindings) pass(overdue bool, each func(e *entry, now int64), after func() bool) bool {
	now := r.now()
	buf := make([]*entry, 0, chunkSize)
	for end := math.MaxInt; end > 0; {
		r.mu.Lock()
		if r.closed {
			r.mu.Unlock()
			return false
		}
		buf, end = r.roster.chunk(end, now, overdue, buf[:0])
		for _, e := range buf {
			if r.lives(e, now) {
				each(e, now)
			}
		}
		r.mu.Unlock()
		if !after() {
			return false
		}
	}
	return true
}

// List returns up to limit live bindings with keys greater than after, ordered by key. Start with
// the zero Key and continue with the last key of a full page. It reads the whole store for every
// page and is meant for administration.
func (r *Bindings) List(after Key, limit int) (page []Entry) {
	var keys []Key
	r.pass(false, func(e *entry, _ int64) {
		if compare(e.key, after) > 0 {
			keys = append(keys, e.key)
		}
	}, func() bool { return true })
	slices.SortFunc(keys, compare)
	for _, key := range slices.Compact(keys) { // a pass may visit an entry twice
		if len(page) == limit {
			break
		}
		if b, ok := r.Peek(key); ok {
			page = append(page, Entry{Key: key, Binding: b})
		}
	}
	return page
}

func compare(a, b Key) int { return bytes.Compare(a[:], b[:]) }
