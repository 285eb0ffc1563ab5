package quota

import (
	"slices"
	"time"
)

// Change is a change of an account.
type Change struct {
	Key      Key           `cbor:"1,keyasint"`
	Requests int64         `cbor:"2,keyasint,omitempty"`
	Tokens   int64         `cbor:"3,keyasint,omitempty"`
	Running  int           `cbor:"4,keyasint,omitempty"` // 1: a request begins, -1: it ends
	Age      time.Duration `cbor:"5,keyasint,omitempty"` // since it began, if it ends
}

// State is how an account stands at a router.
type State struct {
	Key    Key     `cbor:"1,keyasint"`
	Levels []Level `cbor:"2,keyasint,omitempty"`
}

// Level is how much of a limit is used.
type Level struct {
	Unit   Unit   `cbor:"1,keyasint,omitempty"`
	Per    Window `cbor:"2,keyasint,omitempty"`
	Used   int64  `cbor:"3,keyasint,omitempty"`
	Period int64  `cbor:"4,keyasint,omitempty"` // the number of the part of the calendar, if it is a limit for one
}

// Apply applies a change at another router, or one of an earlier run if the router is 0. at is its time by
// this router's clock.
func (b *Book) Apply(router uint64, at time.Time, c Change) {
	if !b.Limits() {
		return
	}
	b.with(at, c.Key, func(a *account, t moment) {
		a.add(c, t)
		if router != 0 {
			b.setRunning(router, a, c.Key, b.peers[router][c.Key]+c.Running)
		}
	})
	b.changed(at, c, true)
}

// setRunning notes how many requests of an account are under way at another router. The lock is held.
func (b *Book) setRunning(router uint64, a *account, k Key, n int) {
	running := b.peers[router]
	n = max(0, n)
	if a.remote += n - running[k]; n == 0 {
		delete(running, k)
		return
	}
	if running == nil {
		if b.peers == nil {
			b.peers = make(map[uint64]map[Key]int)
		}
		running = make(map[Key]int)
		b.peers[router] = running
	}
	running[k] = n
}

// EndRouter ends the requests of a router that has ended, or begins anew. What they have reserved stays used.
func (b *Book) EndRouter(router uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for k, n := range b.peers[router] {
		if a := b.accounts[k]; a != nil {
			a.remote -= n
		}
	}
	delete(b.peers, router)
}

// States passes the states of all accounts to each, or of those that have changed within a time if it is
// not 0.
func (b *Book) States(now time.Time, within time.Duration, each func(*State)) {
	r := b.rules.Load()
	if r == nil {
		return
	}
	var all []State // each may take the journal's lock
	b.mu.Lock()
	t := b.moment(now)
	for k, a := range b.accounts {
		if within > 0 && t.book-a.touched > int64(within) {
			continue
		}
		a.follow(r, k)
		a.advance(t)
		if a.idle() {
			continue
		}
		s := State{Key: k, Levels: make([]Level, 0, len(a.limits))}
		for i, l := range a.limits {
			if m := &a.meters[i]; m.used > 0 {
				level := Level{Unit: l.Unit, Per: l.Per, Used: int64(m.used + 0.5)}
				if l.Per < 0 {
					level.Period = m.asOf
				}
				s.Levels = append(s.Levels, level)
			}
		}
		all = append(all, s)
	}
	b.mu.Unlock()
	for i := range all {
		each(&all[i])
	}
}

// Merge takes the state of an account at another router, or of an earlier run. Routers count what all of
// them use, so the larger figure is right.
func (b *Book) Merge(at time.Time, s *State) {
	changed := b.merge(at, s, func(used, theirs float64) float64 { return max(used, theirs) })
	if changed && b.Journal != nil {
		b.Journal.AccountState(at, *s)
	}
}

// Empty returns an empty book with the same limits.
func (b *Book) Empty() *Book {
	empty := new(Book)
	empty.rules.Store(b.rules.Load())
	return empty
}

// Restore takes over a book of an earlier run. If other routers share what they know, they may have sent
// the same use already.
func (b *Book) Restore(now time.Time, saved *Book, shared bool) {
	saved.States(now, 0, func(s *State) {
		b.merge(now, s, func(used, theirs float64) float64 {
			if shared {
				return max(used, theirs)
			}
			return used + theirs
		})
	})
}

func (b *Book) merge(at time.Time, s *State, join func(used, theirs float64) float64) (changed bool) {
	if !b.Limits() {
		return false
	}
	b.with(at, s.Key, func(a *account, t moment) {
		a.touched = max(a.touched, t.book)
		for _, level := range s.Levels {
			changed = a.merge(t, level, join) || changed
		}
	})
	return changed
}

// merge merges what is used of one limit. It returns whether that is more than before.
func (a *account) merge(t moment, level Level, join func(used, theirs float64) float64) (changed bool) {
	i := slices.IndexFunc(a.limits, func(l Limit) bool { return l.Unit == level.Unit && l.Per == level.Per && l.Unit != Concurrent })
	if i < 0 {
		return false
	}
	l, m := &a.limits[i], &a.meters[i]
	theirs := float64(min(max(0, level.Used), maxAmount))
	switch m.advance(l, t); {
	case l.Per > 0: // since then, some has come back
		theirs -= float64(l.Amount) * float64(m.asOf-t.book) / float64(l.Per)
	case level.Period != m.asOf:
		return false
	}
	had := m.used
	m.used = join(had, max(0, theirs))
	return m.used > had
}
