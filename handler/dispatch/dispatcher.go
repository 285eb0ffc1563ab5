package dispatch

import (
	"context"
	"net/http"
	"sync/atomic"

	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Dispatcher sends the requests of one configuration to the workers of its pool. It
// is made once and does not change.
type Dispatcher struct {
	Pool      *pool.Pool
	Proxy     *reverseproxy.Handler // makes the attempts
	Transport *upstream.Transport

	Policy   kvscore.Policy
	Soft     bool    // leaving a session's worker has a price
	Shadow   *shadow // nil if none is configured
	Timeouts Timeouts
	Limits   Limits
	KeepBody bool   // other handlers may read the body after the answer's header
	Labels   string // prefix of the response headers that say how a request was routed

	Probes    asker
	FollowUps followUps
	// Speculative says that clients may ask for speculative prefills.
	Speculative bool
	Context     context.Context // ends with the configuration
	Client      *upstream.Client

	lastTable atomic.Pointer[pool.Table] // of the upstreams last offered
	Metrics   *Metrics
	Figures   *Figures
	Logger    *zap.Logger
}

// asker asks workers what they serve.
type asker interface {
	// Met records that a dynamic source gave a worker for a request.
	Met(*pool.Worker)
	// AskAgain asks a worker soon which models it serves, because its list is wrong.
	AskAgain(*pool.Worker)
}

// AttemptOf returns what makes the round trips of a request that the dispatcher has
// begun; nil for other requests, such as health checks.
func AttemptOf(ctx context.Context) http.RoundTripper {
	if rt, ok := ctx.Value(routeKey{}).(*Dispatch); ok {
		return rt
	}
	return nil
}
