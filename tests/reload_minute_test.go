package tests

import (
	"net/http"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// changingConfigs returns configs that differ in their workers and policies,
// and such as must be refused. The first two engines are in all of them.
func changingConfigs(engines []*canned.Engine) configs {
	key := "affinity {\n\tmode hard\n\tkey header:X-Session-Id\n}"
	broken := reloadConfigs(engines).broken
	return configs{
		good: []string{
			route(engines[:4], key),
			route(engines[:2], key, "policy least_load"),
			route(engines, key, "policy prefix_hash", "shadow dynamo"),
			route(engines[:3], key, "worker * {\nkv_tokens 100000\n}", "response_headers X-KV-"),
			route(engines[:5], key, "policy round_robin", "index {\nmemory 64MiB\n}"),
		},
		broken: broken,
	}
}

// TestReloadEverySecond reloads every second for 15 seconds, or a minute in the
// long form, under 64 clients that stream. Each config has other workers and
// another policy than the one before, and each third is refused. No stream may
// break, no session may leave a worker that stays, and what Caddy takes must not
// grow with the reloads.
func TestReloadEverySecond(t *testing.T) {
	if testing.Short() {
		t.Skip("takes 15 s")
	}
	engines := startEngines(t, 6, canned.Pace{Words: 40, PerWord: 20 * time.Millisecond})
	cfgs := changingConfigs(engines)
	s := startCaddy(t, cfgs.good[0])
	s.client.Transport.(*http.Transport).DisableKeepAlives = true
	first := s.scrape(t).value(requestsTotal)
	goroutines := runtime.NumGoroutine()
	l := &load{s: s, resends: 50}
	l.start(t.Context(), 64)

	reloads := int(span(15*time.Second, time.Minute) / time.Second)
	var early uint64
	good, running := 0, make([]int, reloads) // goroutines at each tick
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for i := range reloads {
		<-tick.C
		if i == reloads/3 {
			early = heapInUse()
		}
		running[i] = runtime.NumGoroutine()
		if i%3 == 2 {
			if err := s.load(cfgs.broken[i/3%len(cfgs.broken)]); err == nil {
				t.Fatalf("broken config %d was accepted", i/3%len(cfgs.broken))
			}
			continue
		}
		good++
		if err := s.load(cfgs.good[good%len(cfgs.good)]); err != nil {
			t.Fatalf("reload %d: %v", i, err)
		}
		s.checkPage(t)
	}
	late := heapInUse()
	// How many connections are idle changes from moment to moment, and each has
	// goroutines: what stays shows in the least of several moments.
	earlyRun, lateRun := slices.Min(running[reloads/5:reloads/2]), slices.Min(running[reloads*2/3:])
	if !l.stop(10 * time.Second) {
		t.Error("requests hang")
	}
	if err := s.reload(cfgs.good[0]); err != nil {
		t.Fatal(err)
	}
	s.booksAtZero(t)
	counted := s.scrape(t).value(requestsTotal) - first
	visits := l.all()
	t.Logf("%d reloads, %d requests, %v counted, %d sent again because Caddy had closed the connection. Heap %d KiB after a third, %d KiB at the end, goroutines %d and %d",
		reloads, len(visits), counted, l.resent, early>>10, late>>10, earlyRun, lateRun)
	if counted != float64(len(visits)) {
		t.Errorf("%v requests were counted, %d were sent", counted, len(visits))
	}
	judgeReloads(t, visits)
	if late > early+early/2+16<<20 {
		t.Errorf("the heap grew from %d to %d bytes", early, late)
	}
	if lateRun > earlyRun+earlyRun/4+100 {
		t.Errorf("under load, goroutines grew from %d to %d", earlyRun, lateRun)
	}
	s.client.CloseIdleConnections()
	for _, e := range engines {
		e.Kill()
	}
	eventually(t, 10*time.Second, "goroutines as before", func() bool { return runtime.NumGoroutine() <= goroutines+4 })
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
