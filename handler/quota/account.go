package quota

import (
	"time"
)

// Key names an account: a tenant, in a class that has limits of its own, or in all others.
type Key struct {
	Tenant uint64 `cbor:"1,keyasint,omitempty"`
	Class  uint64 `cbor:"2,keyasint,omitempty"`
}

// account is what one tenant has used. The book's lock guards it.
type account struct {
	name       string // its first shownName bytes; empty if only other routers have seen it
	rules      *rules // whose limits these are
	limits     []Limit
	meters     []meter // of limits, by position
	running    int     // requests under way here
	remote     int     // and at other routers
	typical    float64 // tokens of its answers
	touched    int64   // when it last changed, in the book's time
	refused    uint64
	reportedAt int64 // when a refusal was last reported
}

// meter is how much of one limit is used. The zero value is none.
type meter struct {
	used float64
	// asOf is when used was right: the book's time, or the number of the part of the calendar.
	asOf int64
}

// moment is a time, as meters compare it.
type moment struct {
	time.Time
	book int64 // nanoseconds since the book began; a clock that jumps does not move it
}

// advance gives back what has come back by a time. A time before the last one changes nothing.
func (m *meter) advance(l *Limit, t moment) {
	if l.Per < 0 {
		// one before is a clock that is set back; more, one that was wrong
		if n, _ := l.Per.period(t.Time); n > m.asOf || n < m.asOf-1 {
			*m = meter{asOf: n}
		}
		return
	}
	if t.book > m.asOf {
		m.used = max(0, m.used-float64(l.Amount)*float64(t.book-m.asOf)/float64(l.Per))
		m.asOf = t.book
	}
}

// wait returns the time until at most a given number of a limit is used.
func (m *meter) wait(l *Limit, t moment, most float64) time.Duration {
	switch {
	case m.used <= most:
		return 0
	case l.Per < 0:
		_, end := l.Per.period(t.Time)
		return end.Sub(t.Time)
	case l.Amount == 0:
		return time.Duration(l.Per)
	}
	return time.Duration((m.used - most) / float64(l.Amount) * float64(l.Per))
}

// follow takes the limits of new rules. What was used of a limit for the same time stays used.
func (a *account) follow(r *rules, k Key) {
	if a.rules == r {
		return
	}
	limits := r.limitsOf(k)
	meters := make([]meter, len(limits))
	for i := range limits {
		for j := range a.limits {
			if a.limits[j].Unit == limits[i].Unit && a.limits[j].Per == limits[i].Per {
				meters[i] = a.meters[j]
			}
		}
	}
	a.rules, a.limits, a.meters = r, limits, meters
}

// advance brings all meters to a time.
func (a *account) advance(t moment) {
	for i := range a.meters {
		if l := &a.limits[i]; l.Unit != Concurrent {
			a.meters[i].advance(l, t)
		}
	}
}

// add adds to what is used. A refund for a request that began in an earlier part of the calendar is
// none in this one.
func (a *account) add(c Change, t moment) {
	a.touched = max(a.touched, t.book)
	for i := range a.meters {
		l, m := &a.limits[i], &a.meters[i]
		if l.Unit == Concurrent {
			continue
		}
		n := c.Tokens
		if l.Unit == Requests {
			n = c.Requests
		}
		m.advance(l, t)
		if n < 0 && l.Per < 0 {
			if began, _ := l.Per.period(t.Time.Add(-c.Age)); began < m.asOf {
				continue
			}
		}
		m.used = max(0, m.used+float64(n))
	}
}

// used returns the largest part of a limit that is used. The meters are those of now.
func (a *account) used() (part float64) {
	for i, l := range a.limits {
		n := a.meters[i].used
		if l.Unit == Concurrent {
			n = float64(a.running + a.remote)
		}
		part = max(part, n/float64(max(1, l.Amount)))
	}
	return part
}

// idle returns whether the account says nothing that a new one does not. Its meters are those of now.
func (a *account) idle() bool {
	for i := range a.meters {
		if a.meters[i].used > 0 {
			return false
		}
	}
	return a.running == 0 && a.remote == 0
}
