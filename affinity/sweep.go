package affinity

import (
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
	buf := make([]*entry, 0, chunkSize)
	for end, _ := r.roster.size(); end > 0; {
		buf, end = r.roster.chunk(end, buf[:0])
		if !r.sweepChunk(buf, now) {
			return
		}
	}
}

// sweepChunk returns false if the store is closed. It enters for one chunk only, so that
// Close does not wait for a whole pass.
func (r *Ristretto) sweepChunk(chunk []*entry, now int64) bool {
	g, ok := r.enter(0)
	if !ok {
		return false
	}
	defer g.RUnlock()
	for _, e := range chunk {
		if e.due.Load() <= now && r.expire(e, now) {
			r.detach(e)
		}
	}
	return true
}

// List implements [Store].
func (r *Ristretto) List(after string, limit int) []Entry {
	g, ok := r.enter(0)
	if !ok || limit <= 0 {
		if ok {
			g.RUnlock()
		}
		return nil
	}
	defer g.RUnlock()

	// The smallest sessions so far, in order. Few entries of a long pass are inserted.
	var page []Entry
	now := r.now()
	buf := make([]*entry, 0, chunkSize)
	for end, _ := r.roster.size(); end > 0; {
		buf, end = r.roster.chunk(end, buf[:0])
		for _, e := range buf {
			if e.session <= after || len(page) == limit && e.session > page[limit-1].Session {
				continue
			}
			page = r.insertEntry(page, e, now, limit)
		}
	}
	return page
}

// Range implements [Store].
func (r *Ristretto) Range(f func(Entry) bool) {
	g, ok := r.enter(0)
	if !ok {
		return
	}
	defer g.RUnlock()
	now := r.now()
	buf := make([]*entry, 0, chunkSize)
	for end, _ := r.roster.size(); end > 0; {
		buf, end = r.roster.chunk(end, buf[:0])
		for _, e := range buf {
			e.mu.Lock()
			live := !e.ended && e.due.Load() > now
			b := r.binding(e)
			e.mu.Unlock()
			if live && !f(Entry{Session: e.session, Binding: b}) {
				return
			}
		}
	}
}

// insertEntry puts a live entry at its place in the page. A session can come twice, see
// [roster.chunk]; the later binding replaces the earlier one.
func (r *Ristretto) insertEntry(page []Entry, e *entry, now int64, limit int) []Entry {
	e.mu.Lock()
	live := !e.ended && e.due.Load() > now
	b := r.binding(e)
	e.mu.Unlock()
	if !live {
		return page
	}
	i := sort.Search(len(page), func(i int) bool { return page[i].Session >= e.session })
	if i < len(page) && page[i].Session == e.session {
		page[i].Binding = b
		return page
	}
	if len(page) == limit {
		page = page[:limit-1]
	}
	page = append(page, Entry{})
	copy(page[i+1:], page[i:])
	page[i] = Entry{Session: e.session, Binding: b}
	return page
}
