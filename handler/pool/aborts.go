package pool

import (
	"strings"
	"sync"
	"time"
)

// Aborts are the ids of requests that clients have aborted lately by a request of its own. What then
// breaks is no fault, and does not go on elsewhere.
type Aborts struct {
	mu  sync.Mutex
	ids map[string]time.Time // when
	all time.Time            // when all were
}

const (
	maxAborts  = 4096
	maxAborted = 256 // bytes of an id
	// abortLasts is how long after an abort its request may end.
	abortLasts = time.Minute
)

// Note records an abort. The empty id means all requests.
func (a *Aborts) Note(t time.Time, id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case id == "":
		a.all = t
	case len(id) <= maxAborted:
		if a.ids == nil || len(a.ids) >= maxAborts {
			a.ids = make(map[string]time.Time)
		}
		a.ids[id] = t
	}
}

// Has returns whether a request that began at a time was aborted. SGLang aborts all whose ids begin
// with the one that is named.
func (a *Aborts) Has(t, begun time.Time, id string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	lately := func(at time.Time) bool { return at.After(begun) && t.Sub(at) < abortLasts }
	if lately(a.all) {
		return true
	}
	for aborted, at := range a.ids {
		if strings.HasPrefix(id, aborted) && lately(at) {
			return true
		}
	}
	return false
}
