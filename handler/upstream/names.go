package upstream

import (
	"context"
	"encoding/json"
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
	known *atomic.Pointer[[]string] // the addresses that DNS gave last; nil if there are none
	fails func(error)
	stale atomic.Bool // the source's cache is

	mu    sync.Mutex
	asked *lookUp // the one under way; nil if there is none
}

// allKnown has names.known by the source's configuration, so that it outlives a reload.
var allKnown = caddy.NewUsagePool()

// lookUp is a question to DNS. Its answer is set before done is closed.
type lookUp struct {
	begun time.Time
	done  chan struct{}
	dials *[]string // nil if there are none
	err   error     // the dials are those of an earlier answer
}

// slowDNS is how long a look-up may take while addresses are known.
const slowDNS = 500 * time.Millisecond

var (
	errSlowDNS = fmt.Errorf("no answer within %v", slowDNS)
	errNoneDNS = errors.New("no addresses") // SRV's grace_period, after the cache was reset
)

// KeepNames has a provisioned proxy keep the addresses of its dynamic upstreams while DNS fails, until
// forget is called, and calls fails then. Sources whose name depends on the request stay as they are.
func KeepNames(rp *reverseproxy.Handler, fails func(error)) (forget func()) {
	var name string
	switch s := rp.DynamicUpstreams.(type) {
	case *reverseproxy.AUpstreams:
		name = s.String()
	case *reverseproxy.SRVUpstreams:
		name = s.String()
	}
	config, err := json.Marshal(rp.DynamicUpstreams)
	if name == "" || err != nil || strings.Contains(caddy.NewReplacer().ReplaceKnown(name, ""), "{") {
		return func() {}
	}
	key := fmt.Sprintf("%T %s", rp.DynamicUpstreams, config)
	n := &names{UpstreamSource: rp.DynamicUpstreams, fails: fails}
	known, _ := allKnown.LoadOrStore(key, new(atomic.Pointer[[]string]))
	n.known, _ = known.(*atomic.Pointer[[]string])
	rp.DynamicUpstreams = n
	return func() { _, _ = allKnown.Delete(key) }
}

// GetUpstreams implements reverseproxy.UpstreamSource.
func (n *names) GetUpstreams(r *http.Request) ([]*reverseproxy.Upstream, error) {
	n.mu.Lock()
	dials, l := n.known.Load(), n.asked
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
		if dials = l.dials; dials == nil {
			return nil, l.err
		} else if l.err != nil {
			n.fails(l.err)
		}
	case <-late:
		n.fails(errSlowDNS)
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
	ups := make([]*reverseproxy.Upstream, len(*dials)) // each request has its own
	for i, dial := range *dials {
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
	if err == nil && len(ups) == 0 {
		err = errNoneDNS
	}
	var of *net.DNSError
	switch l.dials, l.err = n.known.Load(), err; {
	case err == nil:
		dials := make([]string, len(ups))
		for i, up := range ups {
			dials[i] = up.Dial
		}
		l.dials = &dials
		n.known.Store(l.dials)
	case errors.As(err, &of) && of.IsNotFound: // the name has no addresses any more
		l.dials = nil
		n.known.Store(nil)
	}
	n.mu.Lock()
	n.asked = nil
	n.mu.Unlock()
	close(l.done)
}

// ResetCache implements reverseproxy.CachingUpstreamSource. It does not wait for a look-up.
func (n *names) ResetCache(*http.Request) error {
	n.stale.Store(true)
	return nil
}
