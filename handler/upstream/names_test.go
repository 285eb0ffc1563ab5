package upstream

import (
	"errors"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// dns is a source whose answers the test sets.
type dns struct {
	ask func() ([]*reverseproxy.Upstream, error)
}

func (d *dns) String() string                                               { return "not Caddy's own" }
func (d *dns) GetUpstreams(*http.Request) ([]*reverseproxy.Upstream, error) { return d.ask() }

// TestAddressesOutliveDNS has DNS answer, fail and hang.
func TestAddressesOutliveDNS(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hangs := make(chan struct{})
		gone := &net.DNSError{IsNotFound: true}
		ok := func() ([]*reverseproxy.Upstream, error) {
			return []*reverseproxy.Upstream{{Dial: "10.0.0.1:8000"}}, nil
		}
		source, ills := new(dns), 0
		n := &names{UpstreamSource: source, known: new(atomic.Pointer[[]string]), fails: func(error) { ills++ }}
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
			{"fails within the grace period of an empty cache", func() ([]*reverseproxy.Upstream, error) { return nil, nil }, true, nil, 2, 0},
			{"hangs", func() ([]*reverseproxy.Upstream, error) { <-hangs; return nil, gone }, true, nil, 3, slowDNS},
			{"still hangs", ok, true, nil, 4, 0},
			{"has no such name", func() ([]*reverseproxy.Upstream, error) { return nil, gone }, false, gone, 4, 0},
			{"answers again", ok, true, nil, 4, 0},
			{"has no such name with a search domain, and fails", func() ([]*reverseproxy.Upstream, error) { return nil, gone }, true, nil, 5, 0},
		} {
			switch c.name {
			case "has no such name":
				close(hangs)
			case "has no such name with a search domain, and fails":
				n.alone = &dns{func() ([]*reverseproxy.Upstream, error) { return nil, errors.ErrUnsupported }}
			}
			synctest.Wait()
			source.ask = c.ask
			begin := time.Now()
			ups, err := n.GetUpstreams(new(http.Request))
			if (len(ups) == 1) != c.known || !errors.Is(err, c.err) || ills != c.ills || time.Since(begin) != c.takes {
				t.Errorf("DNS %s: %d addresses, error %v, ill %d times, after %v", c.name, len(ups), err, ills, time.Since(begin))
			}
		}
	})
}

// TestAddressesOutliveReloads has DNS fail after a reload, and after the last configuration.
func TestAddressesOutliveReloads(t *testing.T) {
	keep := func(name string) (*reverseproxy.Handler, func()) {
		rp := &reverseproxy.Handler{DynamicUpstreams: &reverseproxy.AUpstreams{Name: name, Port: "8000"}}
		return rp, KeepNames(rp, func(error) {})
	}
	asks := func(rp *reverseproxy.Handler, d *dns) bool {
		n, ok := rp.DynamicUpstreams.(*names)
		if !ok {
			t.Fatalf("the source is %T", rp.DynamicUpstreams)
		}
		if a, ok := n.alone.(reverseproxy.AUpstreams); !ok || !strings.HasSuffix(a.Name, "s.") {
			t.Errorf("a search domain may be added to %+v", n.alone)
		}
		n.UpstreamSource, n.alone = d, nil
		ups, _ := n.GetUpstreams(new(http.Request))
		return len(ups) == 1
	}
	fails := &dns{func() ([]*reverseproxy.Upstream, error) { return nil, errors.ErrUnsupported }}
	first, forgetFirst := keep("engines")
	asks(first, &dns{func() ([]*reverseproxy.Upstream, error) {
		return []*reverseproxy.Upstream{{Dial: "10.0.0.1:8000"}}, nil
	}})
	second, forgetSecond := keep("engines")
	forgetFirst()
	if !asks(second, fails) {
		t.Error("a reload loses the addresses")
	}
	other, forgetOther := keep("others")
	if asks(other, fails) {
		t.Error("a name has the addresses of another one")
	}
	forgetOther()
	forgetSecond()
	last, forgetLast := keep("engines")
	if asks(last, fails) {
		t.Error("addresses are kept without a configuration")
	}
	forgetLast()
}

// TestSourcesStay keeps no addresses of sources that may depend on the request.
func TestSourcesStay(t *testing.T) {
	for _, source := range []reverseproxy.UpstreamSource{
		nil, new(dns), new(reverseproxy.MultiUpstreams), &reverseproxy.AUpstreams{Name: "{backend}", Port: "8000"},
		&reverseproxy.SRVUpstreams{Name: "{backend}"},
	} {
		rp := &reverseproxy.Handler{DynamicUpstreams: source}
		KeepNames(rp, nil)()
		if rp.DynamicUpstreams != source {
			t.Errorf("addresses of %T for one request are kept for others", source)
		}
	}
}
