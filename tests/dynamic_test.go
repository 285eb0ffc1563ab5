package tests

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/miekg/dns"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

func init() { caddy.RegisterModule(new(listed)) }

// listed is a source of dynamic upstreams: the list that the test has set.
type listed struct{}

// theList is where the sources of all configurations look.
var theList struct {
	mu      sync.Mutex
	addrs   []string
	lookUps int
}

// CaddyModule returns the Caddy module information.
func (*listed) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.reverse_proxy.upstreams.listed", New: func() caddy.Module { return new(listed) }}
}

// UnmarshalCaddyfile implements caddyfile.Unmarshaler.
func (*listed) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	return nil
}

// GetUpstreams implements reverseproxy.UpstreamSource.
func (*listed) GetUpstreams(*http.Request) ([]*reverseproxy.Upstream, error) {
	theList.mu.Lock()
	defer theList.mu.Unlock()
	theList.lookUps++
	ups := make([]*reverseproxy.Upstream, len(theList.addrs))
	for i, a := range theList.addrs {
		ups[i] = &reverseproxy.Upstream{Dial: a}
	}
	return ups, nil
}

// list sets the upstreams, and starts to count look-ups anew.
func list(addrs ...string) {
	theList.mu.Lock()
	defer theList.mu.Unlock()
	theList.addrs, theList.lookUps = addrs, 0
}

func lookUps() int {
	theList.mu.Lock()
	defer theList.mu.Unlock()
	return theList.lookUps
}

// dynamicSite returns a site whose upstreams are the list's.
func dynamicSite(block ...string) string {
	return "kv_router {\nresponse_headers X-KV-\n" + strings.Join(block, "\n") + "\nreverse_proxy {\ndynamic listed\n}\n}"
}

// TestDynamicUpstreamsMayBeNone has no upstreams, then one that is dead, then
// one that works. A look-up may be a DNS query: a request that nobody can serve
// must not repeat it.
func TestDynamicUpstreamsMayBeNone(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	dead := freeAddr(t)
	s := startCaddy(t, dynamicSite())
	for range 3 {
		list()
		start := time.Now()
		if a := s.chat(t.Context(), ask("x")); a.status != http.StatusServiceUnavailable || lookUps() > 2 {
			t.Errorf("without upstreams: status %d, error %v after %v and %d look-ups; want 503 and at most 2", a.status, a.err, time.Since(start), lookUps())
		}
		list(dead)
		status, _, err := s.get(t.Context(), s.url+"/v1/models")
		if status != http.StatusServiceUnavailable || lookUps() > 3 {
			t.Errorf("GET with a dead one: status %d, error %v, %d look-ups; want 503 and at most 3", status, err, lookUps())
		}
		list(dead)
		if a := s.chat(t.Context(), ask("x")); a.status != http.StatusServiceUnavailable || lookUps() > 3 {
			t.Errorf("POST with a dead one: status %d, error %v, %d look-ups; want 503 and at most 3", a.status, a.err, lookUps())
		}
		list(engines[0].Addr())
		s.mustChat(t, ask("x"))
		equal(t, lookUps(), 1, "look-ups for a request that is served at once")
		list(dead, engines[0].Addr())
		s.mustChat(t, ask("x"))
	}
	s.booksAtZero(t)
}

// TestPlaceholderStandsForSeveralWorkers has one upstream whose address is said
// by each request: what is known of one engine is not said of the other.
func TestPlaceholderStandsForSeveralWorkers(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, "kv_router {http.request.header.X-Dial} {\nresponse_headers X-KV-\n}")
	c := ask(strings.Repeat("some words ", 300))
	for i, want := range []struct {
		engine int
		warm   bool
	}{{0, false}, {0, true}, {1, false}, {1, true}, {0, true}} {
		e := engines[want.engine]
		a := s.mustChat(t, c, "X-Dial", e.Addr())
		equal(t, a.engine(), e.Name(), "the engine of request %d", i)
		if warm := a.header.Get("X-KV-Overlap-Blocks") != "0"; warm != want.warm {
			t.Errorf("request %d: overlap %s blocks, want some: %v", i, a.header.Get("X-KV-Overlap-Blocks"), want.warm)
		}
	}
	s.booksAtZero(t)
}

// TestAddressOfARequestSpoilsNoMetrics has clients fill in the upstream. Some values are
// not addresses. The metrics page, which is all of Caddy's, must stay available.
func TestAddressOfARequestSpoilsNoMetrics(t *testing.T) {
	f := startFake(t, nil)
	s := startCaddy(t, "kv_router {\nreverse_proxy {header.X-Up}\n}")
	for _, up := range []string{f.Addr() + "\xff", "\xff:9", "no address", f.Addr() + "-65535"} {
		if a := s.chat(t.Context(), simChat("x"), "X-Up", up); a.ok() {
			t.Errorf("%q was answered", up)
		}
		if s.scrape(t) == nil {
			t.Fatalf("after %q there are no metrics", up)
		}
	}
	s.mustChat(t, simChat("x"), "X-Up", f.Addr())
	s.booksAtZero(t)
}

// startEnginesOnAddresses starts n engines on one port of 127.0.0.1, 127.0.0.2
// and so on, as A records know engines, until the test ends.
func startEnginesOnAddresses(t testing.TB, n int, pace canned.Pace) (engines []*canned.Engine, port uint16) {
	t.Helper()
	for range 20 {
		first := netip.MustParseAddrPort(freeAddr(t))
		port, engines = first.Port(), nil
		for i := range n {
			e, err := canned.StartAt(fmt.Sprintf("e%d", i+1), netip.AddrPortFrom(loopback(i), port).String())
			if err != nil {
				t.Log(err)
				break
			}
			t.Cleanup(e.Kill)
			e.SetPace(pace)
			engines = append(engines, e)
		}
		if len(engines) == n {
			return engines, port
		}
		if len(engines) == 1 {
			t.Skip("the loopback has one address only")
		}
	}
	t.Fatal("no port is free on all addresses")
	return nil, 0
}

// loopback returns the address of the ith engine of startEnginesOnAddresses.
func loopback(i int) netip.Addr { return netip.AddrFrom4([4]byte{127, 0, 0, byte(1 + i)}) }

// loopbacks returns those of the first n engines.
func loopbacks(n int) []netip.Addr {
	out := make([]netip.Addr, n)
	for i := range out {
		out[i] = loopback(i)
	}
	return out
}

// dnsServer is a DNS server on loopback whose answers a test sets. Their order
// is another one each time.
type dnsServer struct {
	addr  string
	close func()
	mu    sync.Mutex
	ips   map[string][]netip.Addr
	ill   func(name string) bool
}

// startDNS starts a DNS server that knows no name yet.
func startDNS(t testing.TB) *dnsServer {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	noError(t, err)
	n := &dnsServer{addr: conn.LocalAddr().String(), ips: make(map[string][]netip.Addr)}
	srv := &dns.Server{PacketConn: conn, Handler: dns.HandlerFunc(n.answer)}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = srv.ActivateAndServe() // it ends with the connection
	}()
	n.close = func() {
		conn.Close()
		<-ended
	}
	t.Cleanup(n.close)
	return n
}

// setA sets the addresses of a name.
func (n *dnsServer) setA(name string, ips ...netip.Addr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.ips[name] = ips
}

// setIll lets the server fail at the questions for which ill is true; nil ends
// it.
func (n *dnsServer) setIll(ill func(name string) bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.ill = ill
}

func (n *dnsServer) answer(w dns.ResponseWriter, q *dns.Msg) {
	n.mu.Lock()
	defer n.mu.Unlock()
	m := new(dns.Msg)
	m.SetReply(q)
	if len(q.Question) != 1 {
		return
	}
	name := q.Question[0].Name
	key := strings.ToLower(strings.TrimSuffix(name, "."))
	if n.ill != nil && n.ill(key) {
		m.Rcode = dns.RcodeServerFailure
		w.WriteMsg(m)
		return
	}
	head := dns.RR_Header{Name: name, Rrtype: q.Question[0].Qtype, Class: dns.ClassINET}
	ips := n.ips[key]
	switch {
	case ips == nil:
		m.Rcode = dns.RcodeNameError
	case head.Rrtype == dns.TypeA:
		for _, ip := range ips {
			m.Answer = append(m.Answer, &dns.A{Hdr: head, A: ip.AsSlice()})
		}
	}
	rand.Shuffle(len(m.Answer), func(i, j int) { m.Answer[i], m.Answer[j] = m.Answer[j], m.Answer[i] })
	w.WriteMsg(m)
}

// dynamicSource returns Caddy's dynamic upstreams of A records.
func dynamicSource(n *dnsServer, name string, port uint16) string {
	return fmt.Sprintf("dynamic a {\nname %s\nport %d\nrefresh 200ms\nresolvers %s\nversions ipv4\n}", name, port, n.addr)
}
