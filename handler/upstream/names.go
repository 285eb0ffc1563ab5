package upstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// names is a source of upstreams that asks DNS. While DNS fails or is slow, requests get the
// addresses that it gave last: Caddy's own sources have none then, and block all requests.
type names struct {
	reverseproxy.UpstreamSource
	alone reverseproxy.UpstreamSource // the same without search domains
	known *atomic.Pointer[[]string]   // the addresses that DNS gave last; nil if there are none
	fails func(error)
	stale atomic.Bool               // the source's cache is
	asked singleflight.Group        // the look-up for all requests that wait
	begun atomic.Pointer[time.Time] // of that look-up; nil if none is under way
}

// allKnown has names.known by the source's configuration, so that it outlives a reload.
var allKnown = caddy.NewUsagePool()

// slowDNS is how long a look-up may take while addresses are known.
const slowDNS = 500 * time.Millisecond

var (
	errSlowDNS = fmt.Errorf("no answer within %v", slowDNS)
	errNoneDNS = errors.New("no addresses") // SRV's grace_period, after the cache was reset
)

// KeepNames has a provisioned proxy keep the addresses of its dynamic upstreams while DNS fails, until
// forget is called, and calls fails then. Sources whose name depends on the request stay as they are.
func KeepNames(rp *reverseproxy.Handler, fails func(error)) (forget func()) {
	n := &names{UpstreamSource: rp.DynamicUpstreams, fails: fails}
	var name string
	switch s := rp.DynamicUpstreams.(type) {
	case *reverseproxy.AUpstreams:
		name = s.String()
		alone := *s
		alone.Name = strings.TrimSuffix(s.Name, ".") + "."
		n.alone = alone
	case *reverseproxy.SRVUpstreams:
		name = s.String()
		alone := *s
		alone.Name, alone.GracePeriod = strings.TrimSuffix(s.Name, ".")+".", 0
		n.alone = alone
	}
	config, err := json.Marshal(rp.DynamicUpstreams)
	if name == "" || err != nil || strings.Contains(caddy.NewReplacer().ReplaceKnown(name, ""), "{") {
		return func() {}
	}
	key := fmt.Sprintf("%T %s", rp.DynamicUpstreams, config)
	known, _ := allKnown.LoadOrStore(key, new(atomic.Pointer[[]string]))
	n.known, _ = known.(*atomic.Pointer[[]string])
	rp.DynamicUpstreams = n
	return func() { _, _ = allKnown.Delete(key) }
}

// GetUpstreams implements reverseproxy.UpstreamSource.
func (n *names) GetUpstreams(r *http.Request) ([]*reverseproxy.Upstream, error) {
	left := slowDNS
	if begun := n.begun.Load(); begun != nil {
		left -= time.Since(*begun)
	}
	var late <-chan time.Time
	if n.known.Load() != nil {
		late = time.After(left)
	}
	var answered <-chan singleflight.Result
	if late == nil || left > 0 { // else more and more requests would wait in vain
		answered = n.asked.DoChan("", func() (any, error) { return nil, n.ask(context.WithoutCancel(r.Context())) })
	}
	err := errSlowDNS
	select {
	case answer := <-answered:
		err = answer.Err
	case <-late:
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
	dials := n.known.Load()
	if dials == nil {
		return nil, err
	}
	if err != nil {
		n.fails(err)
	}
	ups := make([]*reverseproxy.Upstream, len(*dials)) // each request has its own
	for i, dial := range *dials {
		ups[i] = &reverseproxy.Upstream{Dial: dial}
	}
	return ups, nil
}

// ask asks DNS. With an error, the addresses that it gave before stay, unless the name has none any more.
func (n *names) ask(ctx context.Context) error {
	n.begun.Store(new(time.Now()))
	defer n.begun.Store(nil)
	r := new(http.Request).WithContext(context.WithValue(ctx, caddy.ReplacerCtxKey, caddy.NewReplacer()))
	if s, ok := n.UpstreamSource.(reverseproxy.CachingUpstreamSource); ok && n.stale.Swap(false) {
		_ = s.ResetCache(r) // then the cached ones are as good
	}
	ups, err := n.UpstreamSource.GetUpstreams(r)
	if isNotFound(err) && n.alone != nil { // maybe only with a search domain: Go hides that the name itself failed
		ups, err = n.alone.GetUpstreams(r)
	}
	switch {
	case isNotFound(err):
		n.known.Store(nil)
	case err == nil && len(ups) == 0:
		return errNoneDNS
	case err == nil:
		dials := make([]string, len(ups))
		for i, up := range ups {
			dials[i] = up.Dial
		}
		n.known.Store(&dials)
	}
	return err
}

func isNotFound(err error) bool {
	of, ok := errors.AsType[*net.DNSError](err)
	return ok && of.IsNotFound
}

// ResetCache implements reverseproxy.CachingUpstreamSource. It does not wait for a look-up.
func (n *names) ResetCache(*http.Request) error {
	n.stale.Store(true)
	return nil
}
