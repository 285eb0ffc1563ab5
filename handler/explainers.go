package handler

import (
	"slices"
	"sync"
	"sync/atomic"
)

// explainer explains where the requests of one handler would go.
type explainer struct {
	*dispatcher
	reader *reader
	config *sharedSettings // identifies the configuration
	served atomic.Bool     // the handler had a request
}

// explainers are those of the handlers in use, by pool.
var explainers = registry{pools: make(map[*pool]*registered)}

type registry struct {
	mu    sync.Mutex
	pools map[*pool]*registered
}

type registered struct {
	all     []*explainer // in the order in which they joined
	current *explainer   // the one that answers, see follow; nil while none does
}

// join makes an explainer one of its pool's.
func (x *explainer) join() {
	explainers.mu.Lock()
	defer explainers.mu.Unlock()
	of := explainers.pools[x.pool]
	if of == nil {
		of = new(registered)
		explainers.pools[x.pool] = of
	}
	of.all = append(of.all, x)
}

// leave is the end of join.
func (x *explainer) leave() {
	explainers.mu.Lock()
	defer explainers.mu.Unlock()
	of := explainers.pools[x.pool]
	if of == nil {
		return
	}
	of.all = slices.DeleteFunc(of.all, func(o *explainer) bool { return o == x })
	if of.current == x {
		of.current = nil
	}
	if len(of.all) == 0 {
		delete(explainers.pools, x.pool)
	}
}

// lead makes an explainer whose configuration begins to serve the one that answers,
// unless another one of that configuration is.
func (x *explainer) lead() {
	x.answerIf(func(current *explainer) bool { return current == nil || current.config != x.config })
}

// follow makes an explainer the one that answers, with the first request of its
// handler.
func (x *explainer) follow() {
	if !x.served.Load() && x.served.CompareAndSwap(false, true) {
		x.answerIf(func(*explainer) bool { return true })
	}
}

// answerIf makes an explainer the one that answers, if its configuration has not ended
// and the condition on the current one holds.
func (x *explainer) answerIf(yes func(current *explainer) bool) {
	explainers.mu.Lock()
	defer explainers.mu.Unlock()
	if of := explainers.pools[x.pool]; of != nil && slices.Contains(of.all, x) && yes(of.current) {
		of.current = x
	}
}

// explainerOf returns the explainer that answers for a pool: of those in use, the one
// whose handler was the last to serve its first request. If no handler of the active
// configuration has served a request, it is any of them. Before a configuration is
// active, it is the oldest one, because newer configurations may be rejected. It is
// nil for a moment when a pool begins or ends.
func explainerOf(p *pool) *explainer {
	explainers.mu.Lock()
	defer explainers.mu.Unlock()
	switch of := explainers.pools[p]; {
	case of == nil:
		return nil
	case of.current != nil:
		return of.current
	default:
		return of.all[0]
	}
}
