package tests

import (
	"fmt"
	"net/http"
	"testing"
)

// TestAddressOfARequestSpoilsNoMetrics has clients fill in the upstream. Some
// values are not addresses, and there are more of them than the router tells
// apart. The page of metrics, which is all of Caddy's, must stay, and stay
// short.
func TestAddressOfARequestSpoilsNoMetrics(t *testing.T) {
	f := startFake(t, nil)
	s := startCaddy(t, "kv_router {\nreverse_proxy {header.X-Up}\n}")
	for _, up := range []string{f.addr() + "\xff", "\xff:9", "no address", f.addr() + "-65535"} {
		if a := s.chat(t.Context(), simChat("x"), "X-Up", up); a.ok() {
			t.Errorf("%q was answered", up)
		}
		if s.scrape(t) == nil {
			t.Fatalf("after %q there are no metrics", up)
		}
	}
	n := 1500
	for i := range n {
		s.chat(t.Context(), simChat("x"), "X-Up", fmt.Sprintf("127.1.%d.%d:9", i/250, i%250))
	}
	m, known := s.scrape(t), 0
	for series := range m {
		if len(series) > 40 && series[:34] == "caddy_kv_router_worker_available{p" {
			known++
		}
	}
	if known < 500 || known > 1024 {
		t.Errorf("%d workers are in the metrics after %d addresses", known, n)
	}
	for range 3 { // those that are not told apart are served, too
		if a := s.chat(t.Context(), simChat("x"), "X-Up", f.addr()); a.status != http.StatusOK {
			t.Errorf("status %d, error %v", a.status, a.err)
		}
	}
	if _, found := m.sum("caddy_kv_router_incidents", `condition="more workers than are told apart"`); !found {
		t.Error("nobody is told that there are too many")
	}
	if v := s.scrape(t).value(leases); v != 0 {
		t.Errorf("%v leases are left", v)
	}
}
