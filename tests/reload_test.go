package tests

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"

	"github.com/caddyserver/caddy/v2"
)

// configs are the site blocks of TestStreamsSurviveReload.
type configs struct {
	good, broken []string
}

func reloadConfigs(engines []*canned.Engine) configs {
	key := "affinity {\n\tmode hard\n\tkey header:X-Session-Id\n\tttl %s\n}"
	ttl := fmt.Sprintf(key, "5m")
	// A module that fails only when it is provisioned, after kv_router was.
	elsewhere := "\nreverse_proxy /elsewhere 127.0.0.1:1 {\n\ttransport http {\n\t\ttls_trust_pool file /nonexistent/ca.pem\n\t}\n}"
	return configs{
		good: []string{
			route(engines, ttl),
			route(engines, ttl, "response_headers X-KV-", "max_body 1MiB"),
			route(engines, fmt.Sprintf(key, "10m"), "policy dynamo {\n\ttemperature 0\n}"),
			route(engines, ttl) + "\nrespond /elsewhere 204",
		},
		broken: []string{
			route(engines, ttl, "policy no_such_policy"),
			strings.Replace(route(engines, ttl), engines[0].Addr(), "http://a:b:c", 1),
			// It would forget every session, were it taken on.
			route(engines, "affinity {\n\tkey header:X-Session-Id\n\tttl 1s\n\tmax_sessions 1\n}") + elsewhere,
			route(engines[:1], ttl) + elsewhere,
		},
	}
}

// counters returns the series of kv_router that may only grow.
func (m metrics) counters() metrics {
	out := make(metrics)
	for series, v := range m {
		name, _, _ := strings.Cut(series, "{")
		if !strings.HasPrefix(name, "caddy_kv_router_") {
			continue
		}
		for _, suffix := range []string{"_total", "_count", "_bucket"} {
			if strings.HasSuffix(name, suffix) {
				out[series] = v
			}
		}
	}
	return out
}

// TestStreamsSurviveReload reloads twice a second for 10 seconds, or 30 in the long form,
// while 8 clients stream. Caddy rejects every third configuration. No stream may break, no
// session may move, and the counters must neither jump nor fall.
func TestStreamsSurviveReload(t *testing.T) {
	if testing.Short() {
		t.Skip("takes 10 s")
	}
	engines := startEngines(t, 4, canned.Pace{Words: 40, PerWord: 20 * time.Millisecond})
	cfgs := reloadConfigs(engines)
	s := startCaddy(t, cfgs.good[0])
	// The server of an old config closes its idle connections, and a request may
	// be on its way on one.
	s.client.Transport.(*http.Transport).DisableKeepAlives = true
	first := s.scrape(t).value(requestsTotal)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()

	var sent, resent atomic.Int64
	var clients sync.WaitGroup
	for i := range 8 {
		clients.Go(func() {
			bound := make(map[string]string)
			for n := 0; ctx.Err() == nil; n++ {
				session := fmt.Sprintf("client-%d-session-%d", i, n%4)
				c := ask(fmt.Sprintf("%s, request %d", session, n)).streamed()
				sent.Add(1)
				a := s.chat(t.Context(), c, "X-Session-Id", session)
				for try := 0; a.status == 0 && try < 3; try++ {
					// Caddy closed the listener that the connection waited at: not a
					// matter of the handler, which must not have counted it.
					resent.Add(1)
					a = s.chat(t.Context(), c, "X-Session-Id", session)
				}
				if !a.ok() || len(strings.Fields(a.text)) != 40 {
					t.Errorf("%s: status %d, error %v, whole %v, words %d", session, a.status, a.err, a.whole, len(strings.Fields(a.text)))
					continue
				}
				if was := bound[session]; was != "" && was != a.engine() {
					t.Errorf("%s moved from %s to %s", session, was, a.engine())
				}
				bound[session] = a.engine()
			}
		})
	}

	seen := make(metrics)
	looks := 0
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	reloads := int(span(10*time.Second, 30*time.Second) / (500 * time.Millisecond))
	for i := range reloads {
		<-tick.C
		if i%3 == 2 {
			if err := s.load(cfgs.broken[i/3%len(cfgs.broken)]); err == nil {
				t.Fatalf("broken config %d was accepted", i/3%len(cfgs.broken))
			}
			continue
		}
		if err := s.load(cfgs.good[i%len(cfgs.good)]); err != nil {
			t.Fatalf("reload %d: %v", i, err)
		}
		// Not after a refused config: then Caddy shows that config's registry.
		m := s.scrape(t)
		if m == nil {
			continue
		}
		looks++
		now := m.counters()
		for series, was := range seen {
			if v, there := now[series]; !there || v < was {
				t.Errorf("reload %d: %s went from %v to %v (there: %v)", i, series, was, v, there)
			}
		}
		seen = now
		if v := m.value(leases); v > 8 {
			t.Errorf("reload %d: %v leases for 8 clients", i, v)
		}
	}
	stop()
	clients.Wait()

	if err := s.reload(cfgs.good[0]); err != nil {
		t.Fatal(err)
	}
	s.booksAtZero(t)
	m := s.scrape(t)
	counted := m.value(requestsTotal) - first
	t.Logf("%d requests sent, %v counted, %d sent again because Caddy had closed the connection, %v sessions, %d looks at the metrics",
		sent.Load(), counted, resent.Load(), m.value(sessions), looks)
	if counted != float64(sent.Load()) {
		t.Errorf("%v requests were counted, %d were sent", counted, sent.Load())
	}
	atEngines := 0
	for _, e := range engines {
		atEngines += e.Requests()
	}
	if int64(atEngines) != sent.Load() {
		t.Errorf("the engines were sent %d requests, the clients sent %d", atEngines, sent.Load())
	}
	if v := m.value(sessions); v != 32 {
		t.Errorf("%v sessions, want 32", v)
	}
	if looks < reloads/3 {
		t.Errorf("only %d looks at the metrics", looks)
	}
}

// TestRequestsMeetReloads sends short requests at every moment of a reload, also while
// Caddy cleans up the old configuration that reads them.
func TestRequestsMeetReloads(t *testing.T) {
	if testing.Short() {
		t.Skip("takes 4 s")
	}
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines))
	s.client.Transport.(*http.Transport).DisableKeepAlives = true
	before := s.scrape(t).value(requestsTotal)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var sent, resent atomic.Int64
	var clients sync.WaitGroup
	for range 8 {
		clients.Go(func() {
			for ctx.Err() == nil {
				sent.Add(1)
				a := s.chat(t.Context(), ask("quick"))
				for try := 0; a.status == 0 && try < 50; try++ { // Caddy closed its listener
					resent.Add(1)
					a = s.chat(t.Context(), ask("quick"))
				}
				if !a.ok() {
					t.Errorf("status %d, error %v, body %.200q", a.status, a.err, a.body)
				}
			}
		})
	}
	reloads := 0
	for end := time.Now().Add(4 * time.Second); time.Now().Before(end); reloads++ {
		if err := s.load(route(engines)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Millisecond) // reloads without a pause refuse most connections
	}
	stop()
	clients.Wait()
	counted := s.scrape(t).value(requestsTotal) - before
	t.Logf("%d reloads; %d requests sent, %v counted, %d sent again because Caddy had closed the connection", reloads, sent.Load(), counted, resent.Load())
	if counted != float64(sent.Load()) {
		t.Errorf("%v requests were counted, %d were sent", counted, sent.Load())
	}
	s.booksAtZero(t)
}

// TestRefusedConfigChangesNothing has bound sessions and loads a configuration that fails
// in another module. Its pool settings would discard the sessions.
func TestRefusedConfigChangesNothing(t *testing.T) {
	engines := startEngines(t, 4, canned.Pace{})
	cfgs := reloadConfigs(engines)
	s := startCaddy(t, cfgs.good[0])
	bound := make([]string, 20)
	header := func(i int) []string { return []string{"X-Session-Id", fmt.Sprintf("s-%d", i)} }
	for i := range bound {
		bound[i] = s.mustChat(t, ask(fmt.Sprintf("first question of %d", i)), header(i)...).engine()
	}
	for _, broken := range cfgs.broken {
		if s.reload(broken) == nil {
			t.Fatalf("accepted:\n%s", broken)
		}
		for i := range bound {
			if e := s.mustChat(t, ask(fmt.Sprintf("another question of %d", i)), header(i)...).engine(); e != bound[i] {
				t.Errorf("session %d moved from %s to %s", i, bound[i], e)
			}
		}
	}
	if err := s.reload(cfgs.good[1]); err != nil {
		t.Fatal(err)
	}
	for i := range bound {
		if e := s.mustChat(t, ask(fmt.Sprintf("last question of %d", i)), header(i)...).engine(); e != bound[i] {
			t.Errorf("session %d moved from %s to %s with a good config", i, bound[i], e)
		}
	}
}

// TestRequestToARejectedConfigChangesNothing has clients during loads of a configuration
// whose second listener has no port. Its first listener may serve some of them before.
func TestRequestToARejectedConfigChangesNothing(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines, maxRunning(50)))
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	rejected, err := adapt(s.caddyfile(route(engines, maxRunning(7))) + fmt.Sprintf("http://%s {\nrespond hi\n}\n", taken.Addr()))
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	defer clients.Wait()
	defer stop()
	for range 4 {
		clients.Go(func() {
			for ctx.Err() == nil {
				s.client.CloseIdleConnections() // else the old listener's connections serve all
				s.chat(ctx, ask("hi"))
			}
		})
	}
	for i := range 15 {
		if caddy.Load(rejected, true) == nil {
			t.Fatal("Caddy accepts a listener on a port that is taken")
		}
		time.Sleep(20 * time.Millisecond)
		if w := s.limited(t, engines[0].Addr()); w.Load.Max == nil || *w.Load.Max != 50 {
			t.Fatalf("max_running after rejected load %d: %v, want 50", i, w.Load.Max)
		}
	}
}

// TestPoolIsSharedByName has two sites with one pool. Each knows what the other one
// served.
func TestPoolIsSharedByName(t *testing.T) {
	engines := startEngines(t, 4, canned.Pace{})
	key := "affinity {\n\tmode hard\n\tkey header:X-Session-Id\n}"
	s := startCaddy(t, fmt.Sprintf("handle_path /a/* {\n%s\n}\nhandle_path /b/* {\n%s\n}",
		route(engines, "pool shared", key), route(engines, "pool shared", key)))
	for i := range 12 {
		c := ask(fmt.Sprintf("question %d", i))
		id := fmt.Sprintf("s-%d", i)
		a := s.post(t.Context(), "/a/v1/chat/completions", c.body(), "X-Session-Id", id)
		b := s.post(t.Context(), "/b/v1/chat/completions", c.body(), "X-Session-Id", id)
		if !a.ok() || !b.ok() || a.engine() != b.engine() {
			t.Errorf("session %d: %s through one site, %s through the other (status %d, %d)", i, a.engine(), b.engine(), a.status, b.status)
		}
	}
	if v := s.scrape(t).value(sessions, `pool="shared"`); v != 12 {
		t.Errorf("%v sessions, want 12", v)
	}
	s.booksAtZero(t)
}
