package tests

import (
	"fmt"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// twoSites returns a site with one block of directives below /a and one below
// /b.
func twoSites(a, b string) string {
	return fmt.Sprintf("handle_path /a/* {\n%s\n}\nhandle_path /b/* {\n%s\n}", a, b)
}

// TestBareHandlerLeavesItsPoolAsItIs has one handler that describes the workers and one
// that only names their pool. The settings of the first apply to both, whichever serves
// first.
func TestBareHandlerLeavesItsPoolAsItIs(t *testing.T) {
	const room = 2000 // tokens
	for _, order := range []string{"ab", "ba"} {
		t.Run(order, func(t *testing.T) {
			engines := startEngines(t, 2, canned.Pace{})
			ids := map[string]string{"e1": "7", "e2": "8"}
			pool := "pool described-" + order
			full := route(engines, pool, "response_headers X-KV-", affinity("hard"), fmt.Sprintf("worker * {\nkv_tokens %d\n}", room),
				fmt.Sprintf("worker %s {\nid 7\n}\nworker %s {\nid 8\n}", engines[0].Addr(), engines[1].Addr()))
			s := startCaddy(t, twoSites(full, route(engines, pool, "response_headers X-KV-", affinity("hard"))))
			home := ""
			for i := range 12 {
				path := "/" + order[i%2:i%2+1] + "/v1/chat/completions"
				c := ask(strings.Repeat("some words ", 200))
				a := s.post(t.Context(), path, c.body(), "X-Session-Id", "one")
				if !a.ok() || a.header.Get("X-KV-Worker") != ids[a.engine()] {
					t.Errorf("%s: status %d from %s as worker %q, want %s", path, a.status, a.engine(), a.header.Get("X-KV-Worker"), ids[a.engine()])
				}
				if home != "" && (a.engine() != home || a.header.Get("X-KV-Reason") != "session" || a.header.Get("X-KV-Overlap-Blocks") == "0") {
					t.Errorf("%s: from %s, reason %q, %q blocks overlap; want the session's %s and its cache", path,
						a.engine(), a.header.Get("X-KV-Reason"), a.header.Get("X-KV-Overlap-Blocks"), home)
				}
				home = a.engine()
				// others, to fill the caches
				other := ask(fmt.Sprintf("question %d", i) + strings.Repeat(" more words", 200))
				if a := s.post(t.Context(), path, other.body()); !a.ok() {
					t.Errorf("%s: status %d, error %v", path, a.status, a.err)
				}
			}
			s.booksAtZero(t)
			for _, e := range engines {
				cached := s.scrape(t).value("caddy_kv_router_worker_cached_tokens", `pool="described-`+order+`"`, `worker="`+e.Addr()+`"`)
				if cached == 0 || cached > room {
					t.Errorf("%s is thought to hold %v tokens, has room for %d", e.Name(), cached, room)
				}
			}
		})
	}
}
