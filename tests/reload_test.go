package tests

import (
	"context"
	"fmt"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddyserver/caddy/v2"
)

// reloadConfigs returns configurations that differ in their workers and policies, with the
// first two engines in all of them, and such as Caddy must refuse.
func reloadConfigs(engines []*canned.Engine) (good, broken []string) {
	key := "affinity {\n\tmode hard\n\tkey header:X-Session-Id\n\tttl %s\n}"
	ttl := fmt.Sprintf(key, "5m")
	good = []string{
		route(engines[:4], ttl),
		route(engines[:2], fmt.Sprintf(key, "10m"), "policy least_load"),
		route(engines, ttl, "policy prefix_hash", "shadow dynamo"),
		route(engines[:3], ttl, "worker * {\nkv_tokens 100000\n}", "response_headers X-KV-") + "\nrespond /elsewhere 204",
		route(engines, ttl, "policy round_robin", "index {\nmemory 64MiB\n}", "max_body 1MiB"),
	}
	broken = []string{
		route(engines, ttl, "policy no_such_policy"),
		strings.Replace(route(engines, ttl), engines[0].Addr(), "http://a:b:c", 1),
		// It would forget every session, were it taken on.
		route(engines, "affinity {\n\tkey header:X-Session-Id\n\tttl 1s\n\tmax_sessions 1\n}") + rejected,
		route(engines[:1], ttl) + rejected,
	}
	return good, broken
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

// TestStreamsSurviveReload reloads twice a second for 8 seconds, or 60 in the long form,
// under 32 clients that stream. Each configuration has other workers and another policy than
// the one before, and Caddy refuses every third. No stream may break, no session may leave a
// worker that stays, counters must neither jump nor fall, and what Caddy takes must not grow.
func TestStreamsSurviveReload(t *testing.T) {
	takesSeconds(t)
	engines := startEngines(t, 5, canned.Pace{Words: 40, PerWord: 20 * time.Millisecond})
	good, broken := reloadConfigs(engines)
	s := startCaddy(t, good[0])
	// The server of an old config closes its idle connections, and a request may
	// be on its way on one.
	s.client.Transport.(*http.Transport).DisableKeepAlives = true
	first := s.scrape(t).value(requestsTotal)
	goroutines := runtime.NumGoroutine()
	l := &load{s: s, resends: 50}
	l.start(t.Context(), 32)
	eventually(t, "the clients to be in their stride", func() bool { return len(l.all()) >= 32 })

	reloads, looks := int(span(16, 120)), 0
	var early uint64
	running := make([]int, reloads) // goroutines at each tick
	seen := make(metrics)
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	for i := range reloads {
		<-tick.C
		if i == reloads/3 {
			early = heapInUse()
		}
		running[i] = runtime.NumGoroutine()
		if i%3 == 2 {
			if err := s.load(broken[i/3%len(broken)]); err == nil {
				t.Fatalf("broken config %d was accepted", i/3%len(broken))
			}
			continue // after a refused config Caddy shows that config's registry
		}
		if err := s.load(good[(i-i/3)%len(good)]); err != nil {
			t.Fatalf("reload %d: %v", i, err)
		}
		s.checkPage(t)
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
		if v := m.value(leases); v > 32 {
			t.Errorf("reload %d: %v leases for 32 clients", i, v)
		}
	}
	late := heapInUse()
	// How many connections are idle changes from moment to moment, and each has
	// goroutines: what stays shows in the least of several moments.
	earlyRun, lateRun := slices.Min(running[reloads/5:reloads/2]), slices.Min(running[reloads*2/3:])
	if !l.stop() {
		t.Error("requests hang")
	}
	s.mustReload(t, good[0])
	s.booksAtZero(t)
	counted, atEngines := s.scrape(t).value(requestsTotal)-first, 0
	visits := l.all()
	for _, e := range engines {
		atEngines += e.Requests()
	}
	t.Logf("%d reloads, %d requests, %v counted, %d sent again because Caddy had closed the connection. Heap %d KiB after a third, %d KiB at the end, goroutines %d and %d",
		reloads, len(visits), counted, l.resent, early>>10, late>>10, earlyRun, lateRun)
	if counted != float64(len(visits)) || atEngines != len(visits) {
		t.Errorf("%v requests were counted, %d were at the engines, %d were sent", counted, atEngines, len(visits))
	}
	judgeReloads(t, visits)
	if late > early+early/2+16<<20 || lateRun > earlyRun+earlyRun/4+100 {
		t.Errorf("the heap grew from %d to %d bytes, goroutines from %d to %d", early, late, earlyRun, lateRun)
	}
	if looks < reloads/3 {
		t.Errorf("only %d looks at the metrics", looks)
	}
	s.client.CloseIdleConnections()
	for _, e := range engines {
		e.Kill()
	}
	eventually(t, "goroutines as before", func() bool { return runtime.NumGoroutine() <= goroutines+4 })
}

// judgeReloads has all requests served, and sessions at home on the engines that
// are in all configs.
func judgeReloads(t *testing.T, visits []visit) {
	t.Helper()
	bound := make(map[string]string)
	for _, v := range visits {
		if v.fate != served {
			t.Errorf("a request %v: by %q, status %d, error %v, body %.200q", v.fate, v.engine, v.status, v.err, v.body)
		}
		if v.session == "" {
			continue
		}
		if was := bound[v.session]; (was == "e1" || was == "e2") && was != v.engine {
			t.Errorf("session %s went from %s to %s, turn %d", v.session, was, v.engine, v.turn+1)
		}
		bound[v.session] = v.engine
	}
}

// heapInUse returns the bytes of live objects.
func heapInUse() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// checkPage has each series and each help text on /metrics once. The page may be
// out of reach while the admin endpoint moves to another config.
func (s *server) checkPage(t *testing.T) {
	t.Helper()
	status, page, err := s.get(t.Context(), "http://"+s.admin+"/metrics")
	if err != nil {
		return
	}
	if status != http.StatusOK {
		t.Errorf("/metrics: status %d: %.500s", status, page)
		return
	}
	seen := make(map[string]bool)
	for line := range strings.Lines(page) {
		key, _, _ := cutLast(strings.TrimSpace(line), " ")
		if help, is := strings.CutPrefix(line, "# HELP "); is {
			key, _, _ = strings.Cut(help, " ")
			key = "# " + key
		}
		if seen[key] && key != "" && !strings.HasPrefix(line, "# TYPE") {
			t.Errorf("twice on /metrics: %s", key)
		}
		seen[key] = true
	}
}

// TestRequestsMeetReloads sends short requests at every moment of a reload, also while
// Caddy cleans up the old configuration that reads them.
func TestRequestsMeetReloads(t *testing.T) {
	takesSeconds(t)
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines))
	s.client.Transport.(*http.Transport).DisableKeepAlives = true
	before := s.scrape(t)
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
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); reloads++ {
		noError(t, s.load(route(engines)))
		time.Sleep(20 * time.Millisecond) // reloads without a pause refuse most connections
	}
	stop()
	clients.Wait()
	t.Logf("%d reloads; %d requests sent, %d sent again because Caddy had closed the connection", reloads, sent.Load(), resent.Load())
	s.wantFigures(t, before, []figure{{requestsTotal, nil, float64(sent.Load())}})
	s.booksAtZero(t)
}

// meetRejected has clients make requests while Caddy loads a site many times, and rejects it for its second listener. Its
// first one may serve some of them before.
func (s *server) meetRejected(t *testing.T, site string, request func(ctx context.Context), look func()) {
	t.Helper()
	taken := listen(t)
	defer taken.Close()
	rejected, err := adapt(s.caddyfile(site) + fmt.Sprintf("http://%s {\nrespond hi\n}\n", taken.Addr()))
	noError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	defer clients.Wait()
	defer stop()
	for range 4 {
		clients.Go(func() {
			for ctx.Err() == nil {
				s.client.CloseIdleConnections() // else the old listener's connections serve all
				request(ctx)
			}
		})
	}
	for range 15 {
		if caddy.Load(rejected, true) == nil {
			t.Fatal("Caddy accepts a listener on a port that is taken")
		}
		time.Sleep(20 * time.Millisecond)
		look()
	}
}

// TestRequestToARejectedConfigChangesNothing has clients during loads of a configuration that Caddy rejects.
func TestRequestToARejectedConfigChangesNothing(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines, maxRunning(50)))
	s.meetRejected(t, route(engines, maxRunning(7)), func(ctx context.Context) { s.chat(ctx, ask("hi")) }, func() {
		if w := s.worker(t, engines[0].Addr()); w.Load.Max == nil || *w.Load.Max != 50 {
			t.Fatalf("max_running after a rejected load: %v, want 50", w.Load.Max)
		}
	})
}

// TestPoolIsSharedByName has two sites with one pool, whose options stand in both or in a global block. Each
// knows what the other one served.
func TestPoolIsSharedByName(t *testing.T) {
	key := "affinity {\n\tmode hard\n\tkey header:X-Session-Id\n}"
	for name, global := range map[string]bool{"Both": false, "Global": true} {
		t.Run(name, func(t *testing.T) {
			engines := startEngines(t, 4, canned.Pace{})
			directive, globals := route(engines, "pool shared", key), ""
			if global {
				proxy := strings.Replace(route(engines), "kv_router", "reverse_proxy", 1)
				directive, globals = "kv_router {\npool shared\n}", "kv_router shared {\n"+key+"\n"+proxy+"\n}"
			}
			s := startCaddy(t, fmt.Sprintf("handle_path /a/* {\n%s\n}\nhandle_path /b/* {\n%s\n}", directive, directive), globals)
			for i := range 12 {
				c := ask(fmt.Sprintf("question %d", i))
				id := fmt.Sprintf("s-%d", i)
				a := s.post(t.Context(), "/a/v1/chat/completions", c.body(), "X-Session-Id", id)
				b := s.post(t.Context(), "/b/v1/chat/completions", c.body(), "X-Session-Id", id)
				if !a.ok() || !b.ok() || a.engine() != b.engine() {
					t.Errorf("session %d: %s through one site, %s through the other (status %d, %d)", i, a.engine(), b.engine(), a.status, b.status)
				}
			}
			equal(t, s.scrape(t).value(sessions, `pool="shared"`), 12, "sessions")
			s.booksAtZero(t)
			if !global {
				return
			}
			s.globals = strings.Replace(s.globals, "kv_router shared {", "kv_router shared {\nworker * {\nmax_running 7\n}", 1)
			s.mustReload(t, "handle_path /a/* {\n"+directive+"\n}")
			eventually(t, "max_running of the reloaded block", func() bool {
				var w adminWorker
				s.api(t, http.MethodGet, "/pools/shared/workers/"+engines[0].Addr(), nil, &w)
				return w.Load.Max != nil && *w.Load.Max == 7
			})
		})
	}
}
