package upstream

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// names is a source of upstreams that asks DNS. While DNS fails or is slow, requests get the
// addresses that it gave last: Caddy's own sources have none then, and block all requests.
type names struct {
	reverseproxy.UpstreamSource
	fails func(error)
	stale atomic.Bool // the source's cache is

	mu    sync.Mutex
	known []string // addresses that DNS gave last
	asked *lookUp  // the one under way; nil if there is none
}

// lookUp is a question to DNS. Its answer is set before done is closed.
type lookUp struct {
	begun time.Time
	done  chan struct{}
	dials []string
	err   error
}

// slowDNS is how long a look-up may take while addresses are known.
const slowDNS = 500 * time.Millisecond

var errSlowDNS = fmt.Errorf("no answer within %v", slowDNS)

// KeepNames has a provisioned proxy keep the addresses of its dynamic upstreams while DNS fails, and
// calls fails then. Sources whose name depends on the request stay as they are.
func KeepNames(rp *reverseproxy.Handler, fails func(error)) {
	s, ok := rp.DynamicUpstreams.(fmt.Stringer) // those of A and SRV records
	if ok && !strings.Contains(caddy.NewReplacer().ReplaceKnown(s.String(), ""), "{") {
		rp.DynamicUpstreams = &names{UpstreamSource: rp.DynamicUpstreams, fails: fails}
	}
}

// GetUpstreams implements reverseproxy.UpstreamSource.
func (n *names) GetUpstreams(r *http.Request) ([]*reverseproxy.Upstream, error) {
	n.mu.Lock()
	dials, l := n.known, n.asked
	if l == nil {
		l = &lookUp{begun: time.Now(), done: make(chan struct{})}
		n.asked = l
		go n.ask(context.WithoutCancel(r.Context()), l)
	}
	n.mu.Unlock()
	var late <-chan time.Time
	if dials != nil {
		late = time.After(slowDNS - time.Since(l.begun))
	}
	select {
	case <-l.done:
		dials = l.dials
		if l.err != nil {
			return nil, l.err
		}
	case <-late:
		n.fails(errSlowDNS)
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
	ups := make([]*reverseproxy.Upstream, len(dials)) // each request has its own
	for i, dial := range dials {
		ups[i] = &reverseproxy.Upstream{Dial: dial}
	}
	return ups, nil
}

// ask asks DNS, for all requests that wait.
func (n *names) ask(ctx context.Context, l *lookUp) {
	r := new(http.Request).WithContext(context.WithValue(ctx, caddy.ReplacerCtxKey, caddy.NewReplacer()))
	if s, ok := n.UpstreamSource.(reverseproxy.CachingUpstreamSource); ok && n.stale.Swap(false) {
		_ = s.ResetCache(r) // then the cached ones are as good
	}
	ups, err := n.UpstreamSource.GetUpstreams(r)
	n.mu.Lock()
	defer n.mu.Unlock()
	var of *net.DNSError
	switch {
	case err == nil:
		n.known = make([]string, len(ups))
		for i, up := range ups {
			n.known[i] = up.Dial
		}
	case n.known != nil && (!errors.As(err, &of) || !of.IsNotFound):
		n.fails(err)
	default: // the name has no addresses any more, or they were never known
		n.known, l.err = nil, err
	}
	l.dials, n.asked = n.known, nil
	close(l.done)
}

// ResetCache implements reverseproxy.CachingUpstreamSource. It does not wait for a look-up.
func (n *names) ResetCache(*http.Request) error {
	n.stale.Store(true)
	return nil
}
