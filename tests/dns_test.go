package tests

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/miekg/dns"
)

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
	addr    string
	close   func()
	mu      sync.Mutex
	ips     map[string][]netip.Addr
	targets map[string][]target
	ill     func(name string) bool
	asked   int
}

// target is what an SRV record leads to.
type target struct {
	name string
	port uint16
}

// startDNS starts a DNS server that knows no name yet.
func startDNS(t testing.TB) *dnsServer {
	t.Helper()
	return startDNSAt(t, "127.0.0.1:0")
}

// startDNSAt is startDNS at an address.
func startDNSAt(t testing.TB, addr string) *dnsServer {
	t.Helper()
	conn, err := net.ListenPacket("udp", addr)
	if err != nil {
		t.Fatal(err)
	}
	n := &dnsServer{addr: conn.LocalAddr().String(), ips: make(map[string][]netip.Addr), targets: make(map[string][]target)}
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

// setSRV sets the targets of a service's name.
func (n *dnsServer) setSRV(name string, targets ...target) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.targets[name] = targets
}

// setIll lets the server fail at the questions for which ill is true; nil ends
// it.
func (n *dnsServer) setIll(ill func(name string) bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.ill = ill
}

// questions returns how many were asked so far.
func (n *dnsServer) questions() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.asked
}

func (n *dnsServer) answer(w dns.ResponseWriter, q *dns.Msg) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.asked++
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
	ips, targets := n.ips[key], n.targets[key]
	switch {
	case ips == nil && targets == nil:
		m.Rcode = dns.RcodeNameError
	case head.Rrtype == dns.TypeA:
		for _, ip := range ips {
			m.Answer = append(m.Answer, &dns.A{Hdr: head, A: ip.AsSlice()})
		}
	case head.Rrtype == dns.TypeSRV:
		for _, t := range targets {
			m.Answer = append(m.Answer, &dns.SRV{Hdr: head, Port: t.port, Target: t.name + "."})
		}
	}
	rand.Shuffle(len(m.Answer), func(i, j int) { m.Answer[i], m.Answer[j] = m.Answer[j], m.Answer[i] })
	w.WriteMsg(m)
}

// refreshes is how often the dynamic upstreams of these tests are looked up.
const refreshes = 200 * time.Millisecond

// dynamicSource returns Caddy's dynamic upstreams, of A or SRV records.
func dynamicSource(kind string, n *dnsServer, name string, port uint16) string {
	lines := []string{"dynamic " + kind + " {", "name " + name, "refresh " + refreshes.String(), "resolvers " + n.addr}
	if kind == "a" {
		lines = append(lines, "port "+strconv.Itoa(int(port)), "versions ipv4")
	}
	return strings.Join(append(lines, "}"), "\n")
}

// TestScaleByDNS lets DNS answers take a pool from two engines to six and to
// three, in another order each time. Meanwhile 24 clients hold streamed
// conversations. No request may fail. Sessions and conversations stay with the
// engines that stay, and new engines are used. Engines that are gone get
// nothing more, but finish their requests.
func TestScaleByDNS(t *testing.T) {
	takesSeconds(t)
	kinds := []string{"srv"} // the fault table has the other kind
	if inLong {
		kinds = append(kinds, "a")
	}
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) { scaleByDNS(t, kind) })
	}
}

func scaleByDNS(t *testing.T, kind string) {
	engines, port := startEnginesOnAddresses(t, 6, canned.Pace{Words: 20, FirstToken: 20 * time.Millisecond, PerWord: 4 * time.Millisecond})
	n := startDNS(t)
	name := fmt.Sprintf("%s%d.engines.test", kind, port)
	publish := func(k int) {
		if kind == "a" {
			n.setA(name, loopbacks(k)...)
			return
		}
		var targets []target
		for i := range k {
			host := fmt.Sprintf("e%d.%s", i+1, name)
			n.setA(host, loopback(i))
			targets = append(targets, target{host, port})
		}
		n.setSRV(name, targets...)
	}
	publish(2)
	s := startCaddy(t, "kv_router {\nresponse_headers X-KV-\npolicy warmest\n"+affinity("hard")+"\nreverse_proxy {\n"+dynamicSource(kind, n, name, port)+
		"\ntransport http {\nresolvers "+n.addr+"\n}\n}\n}")
	l := &load{s: s, turns: 12}
	l.start(t.Context(), 24)
	phase := span(time.Second, 5*time.Second)
	time.Sleep(phase)
	publish(6)
	grown := time.Now()
	eventually(t, 10*time.Second, "all six engines are used", func() bool {
		for _, e := range engines {
			if e.Requests() == 0 {
				return false
			}
		}
		return true
	})
	t.Logf("new engines are used after %v", time.Since(grown).Round(time.Millisecond))
	time.Sleep(phase)
	publish(3)
	shrunk := time.Now()
	time.Sleep(phase)
	if !l.stop(5 * time.Second) {
		t.Error("requests hang")
	}
	s.booksAtZero(t)

	visits := l.all()
	for _, v := range visits {
		if v.fate != served {
			t.Errorf("a request %v: by %q, status %d, error %v, body %.200q", v.fate, v.engine, v.status, v.err, v.body)
		}
	}
	judgeHomes(t, visits, shrunk)
	counts := make(map[string]int)
	for _, v := range visits {
		if v.begun.After(grown) && v.begun.Before(shrunk) {
			counts[v.engine]++
		}
	}
	t.Logf("%d requests; with six engines %v; %d questions to the name server", len(visits), counts, n.questions())
	for _, e := range engines[3:] {
		j := e.Journal()
		// A look-up that is under way when the answer changes has the answer of before.
		if last := j[len(j)-1].At; last.After(shrunk.Add(refreshes + 300*time.Millisecond)) {
			t.Errorf("%s was sent a request %v after it was gone", e.Name(), last.Sub(shrunk))
		}
	}
	var ws []adminWorker
	s.api(t, http.MethodGet, defaultPool+"/workers", nil, &ws)
	if len(ws) != 6 {
		t.Errorf("%d workers, want six: those that are gone are remembered for a while", len(ws))
	}
	for _, w := range ws {
		if w.Static || w.Cache.Cached == 0 {
			t.Errorf("worker %s: static %v, %d tokens cached", w.Dial, w.Static, w.Cache.Cached)
		}
	}
}

// judgeHomes looks where later turns went. Requests with a session must stay.
// Requests without one must nearly always stay, unless their engine was one
// that went. The cache model of the engine must have its blocks.
func judgeHomes(t *testing.T, visits []visit, shrunk time.Time) {
	t.Helper()
	gone := map[string]bool{"e4": true, "e5": true, "e6": true}
	last := make(map[int]visit) // by client
	stayed, moved, cold := 0, 0, 0
	for _, v := range visits {
		was := last[v.client]
		last[v.client] = v
		if v.turn == 0 || was.engine == "" {
			continue
		}
		if gone[was.engine] && v.begun.After(shrunk) {
			continue
		}
		if v.engine != was.engine {
			if v.session != "" {
				t.Errorf("session %s went from %s to %s at turn %d", v.session, was.engine, v.engine, v.turn+1)
			}
			moved++
			continue
		}
		stayed++
		if v.header.Get("X-KV-Overlap-Blocks") == "0" {
			cold++
		}
	}
	t.Logf("%d later turns at home, %d elsewhere, %d at home without overlap", stayed, moved, cold)
	if moved*20 > stayed {
		t.Errorf("%d later turns went elsewhere, %d stayed", moved, stayed)
	}
	if cold > 0 {
		t.Errorf("%d later turns came to an engine that is not known to hold any of them", cold)
	}
}
