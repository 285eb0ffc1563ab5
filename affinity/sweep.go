package affinity

import (
	"bytes"
	"context"
	"slices"
	"sort"
	"time"
)

// sweepLoop runs until Close.
func (r *Ristretto) sweepLoop(every time.Duration) {
	defer close(r.swept)
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			r.sweep()
		case <-r.stop:
			return
		}
	}
}

// sweep ends overdue entries, to save memory and to report ends in time. Reads never return
// an overdue binding, swept or not.
func (r *Ristretto) sweep() {
	now := r.now()
	r.recent.fit(r.roster.size())
	buf := make([]*entry, 0, chunkSize)
	for end := r.roster.size(); end > 0; {
		buf, end = r.roster.overdue(end, now, buf[:0])
		if len(buf) > 0 && !r.expireAll(buf, now) {
			return
		}
	}
}

// expireAll returns false if the store is closed. It enters for one chunk only, so that
// Close does not wait for a whole pass.
func (r *Ristretto) expireAll(chunk []*entry, now int64) bool {
	g, ok := r.enter(0)
	if !ok {
		return false
	}
	defer g.RUnlock()
	for _, e := range chunk {
		if r.expire(e, now) {
			r.detach(e)
		}
	}
	return true
}

// List implements [Store].
func (r *Ristretto) List(_ context.Context, after Key, limit int) ([]Entry, error) {
	g, ok := r.enter(0)
	if !ok {
		return nil, ErrClosed
	}
	defer g.RUnlock()
	if limit <= 0 {
		return nil, nil
	}

	// The smallest keys so far, in order. Few entries of a long pass are inserted.
	var page []Entry
	now := r.now()
	buf := make([]*entry, 0, chunkSize)
	for end := r.roster.size(); end > 0; {
		buf, end = r.roster.chunk(end, buf[:0])
		for _, e := range buf {
			if compare(&e.key, &after) <= 0 || len(page) == limit && compare(&e.key, &page[limit-1].Key) > 0 {
				continue
			}
			page = r.insertEntry(page, e, now, limit)
		}
	}
	return page, nil
}

func compare(a, b *Key) int { return bytes.Compare(a[:], b[:]) }

// insertEntry puts a live entry at its place in the page. A session can come twice, see
// [roster.chunk]; the later binding replaces the earlier one.
func (r *Ristretto) insertEntry(page []Entry, e *entry, now int64, limit int) []Entry {
	live := r.lock(e, now)
	b := r.binding(e)
	e.mu.Unlock()
	if !live {
		return page
	}
	i := sort.Search(len(page), func(i int) bool { return compare(&page[i].Key, &e.key) >= 0 })
	if i < len(page) && page[i].Key == e.key {
		page[i].Binding = b
		return page
	}
	if len(page) == limit {
		page = page[:limit-1]
	}
	return slices.Insert(page, i, Entry{Key: e.key, Binding: b})
}
