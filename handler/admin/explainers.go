package admin

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
)

// Explainer explains where the requests of one handler would go.
type Explainer struct {
	*dispatch.Dispatcher
	Reader *plan.Reader
	Config *pool.SharedSettings // identifies the configuration
	served atomic.Bool          // the handler had a request
}

// explainers are those of the handlers in use, in the order in which they joined, and
// by pool the one that answers.
var explainers = struct {
	mu      sync.Mutex
	all     []*Explainer
	current map[*pool.Pool]*Explainer
}{current: make(map[*pool.Pool]*Explainer)}

// Join adds an explainer to its pool's.
func (x *Explainer) Join() {
	explainers.mu.Lock()
	defer explainers.mu.Unlock()
	explainers.all = append(explainers.all, x)
}

// Leave undoes Join.
func (x *Explainer) Leave() {
	explainers.mu.Lock()
	defer explainers.mu.Unlock()
	explainers.all = slices.DeleteFunc(explainers.all, func(o *Explainer) bool { return o == x })
	if explainers.current[x.Pool] == x {
		delete(explainers.current, x.Pool)
	}
}

// Lead makes an explainer whose configuration begins to serve the one that answers,
// unless another one of that configuration is.
func (x *Explainer) Lead() { x.lead(false) }

// Follow makes an explainer the one that answers, with the first request of its
// handler.
func (x *Explainer) Follow() {
	if !x.served.Load() && x.served.CompareAndSwap(false, true) {
		x.lead(true)
	}
}

// lead does nothing if the configuration of x has ended.
func (x *Explainer) lead(always bool) {
	explainers.mu.Lock()
	defer explainers.mu.Unlock()
	current := explainers.current[x.Pool]
	if slices.Contains(explainers.all, x) && (always || current == nil || current.Config != x.Config) {
		explainers.current[x.Pool] = x
	}
}

// explainerOf returns the explainer that answers for a pool: that of the handler which
// was the last to serve its first request. If no handler of the active configuration
// has served one, it is any of them. Before a configuration is active, it is the oldest,
// because newer ones may be rejected. It is nil for a moment when a pool begins or ends.
func explainerOf(p *pool.Pool) *Explainer {
	explainers.mu.Lock()
	defer explainers.mu.Unlock()
	if x := explainers.current[p]; x != nil {
		return x
	}
	if i := slices.IndexFunc(explainers.all, func(x *Explainer) bool { return x.Pool == p }); i >= 0 {
		return explainers.all[i]
	}
	return nil
}
