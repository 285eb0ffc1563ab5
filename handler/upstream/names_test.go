package upstream

import (
	"errors"
	"net"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// dns is a source whose answers the test sets.
type dns struct {
	name string
	ask  func() ([]*reverseproxy.Upstream, error)
}

func (d *dns) String() string                                               { return d.name }
func (d *dns) GetUpstreams(*http.Request) ([]*reverseproxy.Upstream, error) { return d.ask() }

// TestAddressesOutliveDNS has DNS answer, fail and hang.
func TestAddressesOutliveDNS(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hangs := make(chan struct{})
		gone := &net.DNSError{IsNotFound: true}
		ok := func() ([]*reverseproxy.Upstream, error) {
			return []*reverseproxy.Upstream{{Dial: "10.0.0.1:8000"}}, nil
		}
		source, ills := &dns{name: "engines:8000"}, 0
		rp := &reverseproxy.Handler{DynamicUpstreams: source}
		KeepNames(rp, func(error) { ills++ })
		for _, c := range []struct {
			name  string
			ask   func() ([]*reverseproxy.Upstream, error)
			known bool
			err   error
			ills  int
			takes time.Duration
		}{
			{"fails at once", func() ([]*reverseproxy.Upstream, error) { return nil, errors.ErrUnsupported }, false, errors.ErrUnsupported, 0, 0},
			{"answers", ok, true, nil, 0, 0},
			{"fails", func() ([]*reverseproxy.Upstream, error) { return nil, errors.ErrUnsupported }, true, nil, 1, 0},
			{"hangs", func() ([]*reverseproxy.Upstream, error) { <-hangs; return nil, gone }, true, nil, 2, slowDNS},
			{"still hangs", ok, true, nil, 3, 0},
			{"has no such name", func() ([]*reverseproxy.Upstream, error) { return nil, gone }, false, gone, 3, 0},
			{"answers again", ok, true, nil, 3, 0},
		} {
			if c.name == "has no such name" {
				close(hangs)
			}
			synctest.Wait()
			source.ask = c.ask
			begin := time.Now()
			ups, err := rp.DynamicUpstreams.GetUpstreams(new(http.Request))
			if (len(ups) == 1) != c.known || !errors.Is(err, c.err) || ills != c.ills || time.Since(begin) != c.takes {
				t.Errorf("DNS %s: %d addresses, error %v, ill %d times, after %v", c.name, len(ups), err, ills, time.Since(begin))
			}
		}
		source.name = "{backend}:8000" // each request has its own
		rp.DynamicUpstreams = source
		if KeepNames(rp, nil); rp.DynamicUpstreams != source {
			t.Error("addresses of one request are kept for others")
		}
	})
}
