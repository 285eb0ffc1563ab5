package tests

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"

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
