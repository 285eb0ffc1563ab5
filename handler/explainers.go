package handler

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
)

// explainer explains where the requests of one handler would go.
type explainer struct {
	*dispatch.Dispatcher
	reader *plan.Reader
	config *pool.SharedSettings // identifies the configuration
	served atomic.Bool          // the handler had a request
}

// explainers are those of the handlers in use, in the order in which they joined, and
// by pool the one that answers.
var explainers = struct {
	mu      sync.Mutex
	all     []*explainer
	current map[*pool.Pool]*explainer
}{current: make(map[*pool.Pool]*explainer)}

// join makes an explainer one of its pool's.
func (x *explainer) join() {
	explainers.mu.Lock()
	defer explainers.mu.Unlock()
	explainers.all = append(explainers.all, x)
}

// leave is the end of join.
func (x *explainer) leave() {
	explainers.mu.Lock()
	defer explainers.mu.Unlock()
	explainers.all = slices.DeleteFunc(explainers.all, func(o *explainer) bool { return o == x })
	if explainers.current[x.Pool] == x {
		delete(explainers.current, x.Pool)
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
	if slices.Contains(explainers.all, x) && yes(explainers.current[x.Pool]) {
		explainers.current[x.Pool] = x
	}
}

// explainerOf returns the explainer that answers for a pool: of those in use, the one
// whose handler was the last to serve its first request. If no handler of the active
// configuration has served a request, it is any of them. Before a configuration is
// active, it is the oldest one, because newer configurations may be rejected. It is
// nil for a moment when a pool begins or ends.
func explainerOf(p *pool.Pool) *explainer {
	explainers.mu.Lock()
	defer explainers.mu.Unlock()
	if x := explainers.current[p]; x != nil {
		return x
	}
	if i := slices.IndexFunc(explainers.all, func(x *explainer) bool { return x.Pool == p }); i >= 0 {
		return explainers.all[i]
	}
	return nil
}
