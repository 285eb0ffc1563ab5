package admin

import (
	"sync"

	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
)

// Explainer explains where the requests of one handler would go.
type Explainer struct {
	Reader     *plan.Reader
	Dispatcher *dispatch.Dispatcher
}

// explainers are those that answer for the pools in use.
var explainers sync.Map // *pool.Pool -> *Explainer

// joined are all that have joined and not left.
var joined sync.Map // *Explainer -> nil

// Join makes an explainer answer for its pool, unless another one does. Its configuration may
// still be rejected.
func (x *Explainer) Join() {
	explainers.LoadOrStore(x.Dispatcher.Pool, x)
	joined.Store(x, nil)
}

// Lead makes an explainer answer for its pool. Its configuration has begun to serve.
func (x *Explainer) Lead() { explainers.Store(x.Dispatcher.Pool, x) }

// Leave ends Join and Lead, unless another explainer has taken over.
func (x *Explainer) Leave() {
	explainers.CompareAndDelete(x.Dispatcher.Pool, x)
	joined.Delete(x)
}

// explainerOf returns the explainer that answers for a pool: that of the handler which led
// last. It returns nil for a moment when a pool begins or ends.
func explainerOf(p *pool.Pool) *Explainer {
	x, _ := explainers.Load(p)
	explainer, _ := x.(*Explainer)
	return explainer
}
