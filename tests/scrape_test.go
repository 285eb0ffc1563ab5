package tests

import (
	"strconv"
	"strings"
	"testing"
	"time"
)

// metrics is one look at Caddy's /metrics: series, as written there, to value.
type metrics map[string]float64

// scrape reads /metrics. It returns nil when the page cannot be read, as may
// happen while the admin endpoint moves from one config to the next.
func (s *server) scrape(t testing.TB) metrics {
	t.Helper()
	status, page, err := s.get(t.Context(), "http://"+s.admin+"/metrics")
	if err != nil || status != 200 {
		return nil
	}
	m := make(metrics)
	for line := range strings.Lines(page) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		series, value, ok := cutLast(line, " ")
		if !ok {
			t.Fatalf("a line of /metrics without a value: %q", line)
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			t.Fatalf("a line of /metrics with a bad value: %q", line)
		}
		m[series] = v
	}
	return m
}

func cutLast(s, sep string) (string, string, bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

// sum adds up the series of a name whose labels contain all of the given ones,
// each written as name="value". It returns whether there was any.
func (m metrics) sum(name string, labels ...string) (float64, bool) {
	total, found := 0.0, false
next:
	for series, v := range m {
		base, rest, _ := strings.Cut(series, "{")
		if base != name {
			continue
		}
		for _, l := range labels {
			if !strings.Contains("{"+rest, "{"+l) && !strings.Contains(rest, ","+l) {
				continue next
			}
		}
		total, found = total+v, true
	}
	return total, found
}

// value is sum, with zero for a series that is not there.
func (m metrics) value(name string, labels ...string) float64 {
	v, _ := m.sum(name, labels...)
	return v
}

// The names of the metrics that the tests look at.
const (
	requestsTotal  = "caddy_kv_router_requests_total"
	leases         = "caddy_kv_router_leases"
	leasesExpired  = "caddy_kv_router_leases_expired_total"
	workerRequests = "caddy_kv_router_worker_requests"
	workerPrefill  = "caddy_kv_router_worker_prefill_tokens"
	workerBlocks   = "caddy_kv_router_worker_blocks"
	sessions       = "caddy_kv_router_sessions"
	retriesTotal   = "caddy_kv_router_retries_total"
)

// booksAtZero waits until no lease is left and no worker has load. It fails the
// test if that does not happen or the metrics are missing.
func (s *server) booksAtZero(t testing.TB) {
	t.Helper()
	var last metrics
	zero := func() bool {
		last = s.scrape(t)
		for _, name := range []string{leases, workerRequests, workerPrefill, workerBlocks} {
			if v, found := last.sum(name); !found || v != 0 {
				return false
			}
		}
		return true
	}
	for deadline := time.Now().Add(2 * time.Second); !zero(); time.Sleep(20 * time.Millisecond) {
		if time.Now().Before(deadline) {
			continue
		}
		for _, name := range []string{leases, workerRequests, workerPrefill, workerBlocks} {
			v, found := last.sum(name)
			t.Errorf("%s = %v (there: %v), want 0", name, v, found)
		}
		return
	}
	if n := last.value(leasesExpired); n != 0 {
		t.Errorf("%s = %v: leases had leaked", leasesExpired, n)
	}
}
