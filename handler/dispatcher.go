package handler

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

// dispatcher sends the requests of one configuration to the workers of its pool. It
// is made once and does not change.
type dispatcher struct {
	pool      *pool.Pool
	proxy     *reverseproxy.Handler // makes the attempts
	transport *upstream.Transport

	active   kvscore.Policy
	unit     string  // of its costs; empty if it compares none
	soft     bool    // leaving a session's worker has a price
	shadow   *shadow // nil if none is configured
	timeouts Timeouts
	limits   limits
	keepBody bool   // other handlers may read the body after the answer's header
	labels   string // prefix of the response headers that say how a request was routed

	probes    asker
	followUps followUps
	// speculative says that clients may ask for speculative prefills.
	speculative bool
	ctx         context.Context // ends with the configuration
	client      *upstream.Client

	lastTable atomic.Pointer[pool.Table] // of the upstreams last offered
	metrics   *metrics
	figures   *figures
	logger    *zap.Logger
}

// asker asks workers what they serve.
type asker interface {
	// Met records that a dynamic source gave a worker for a request.
	Met(*pool.Worker)
	// AskAgain asks a worker soon which models it serves, because its list is wrong.
	AskAgain(*pool.Worker)
}

// attemptOf returns what makes the round trips of a request that the dispatcher has
// begun; nil for other requests, such as health checks.
func attemptOf(ctx context.Context) http.RoundTripper {
	if rt, ok := ctx.Value(routeKey{}).(*route); ok {
		return rt
	}
	return nil
}
