package tests

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

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
	if testing.Short() {
		t.Skip("takes 10 s")
	}
	for _, kind := range []string{"a", "srv"} {
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
	phase := span(1500*time.Millisecond, 5*time.Second)
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
