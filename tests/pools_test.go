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

// TestHandlersOfOnePoolMustAgree has two handlers with contradicting settings of one pool.
// The error names the setting and both values.
func TestHandlersOfOnePoolMustAgree(t *testing.T) {
	s := startCaddy(t, "respond 204")
	for _, v := range []struct {
		name, a, b string
		want       []string // in the error; none if they agree
	}{
		{"BlockSize", "a:1 {\nindex {\nblock_size 16\n}\n}", "a:1 {\nindex {\nblock_size 32\n}\n}", []string{"block_size", "16", "32"}},
		{"TextBlock", "a:1 {\nindex {\ntext_block 48\n}\n}", "a:1 {\nindex {\ntext_block 128\n}\n}", []string{"text_block", "48", "128"}},
		{"Memory", "a:1 {\nindex {\nmemory 3MiB\n}\n}", "a:1 {\nindex {\nmemory 5MiB\n}\n}", []string{"index memory", "3145728", "5242880"}},
		{"TTL", "a:1 {\naffinity {\nttl 3m\n}\n}", "a:1 {\naffinity {\nttl 7m\n}\n}", []string{"ttl", "3m", "7m"}},
		{"MaxSessions", "a:1 {\naffinity {\nmax_sessions 11\n}\n}", "a:1 {\naffinity {\nmax_sessions 13\n}\n}", []string{"max_sessions", "11", "13"}},
		{"WorkerID", "a:1 {\nworker a:1 {\nid 7\n}\n}", "a:1 {\nworker a:1 {\nid 8\n}\n}", []string{"worker a:1", "id", "7", "8"}},
		{"Room", "a:1 {\nworker a:1 {\nkv_tokens 17\n}\n}", "a:1 {\nworker a:1 {\nkv_tokens 19\n}\n}", []string{"worker a:1", "kv_tokens", "17", "19"}},
		{"RoomOfAll", "a:1 {\nworker * {\nkv_tokens 17\n}\n}", "a:1 {\nworker * {\nkv_tokens 19\n}\n}", []string{"worker *", "kv_tokens", "17", "19"}},
		{"OneIDForTwo", "a:1 {\nworker a:1 {\nid 7\n}\n}", "b:1 {\nworker b:1 {\nid 7\n}\n}", []string{"a:1", "b:1", "7"}},
		{"Bare", "a:1 {\nworker a:1 {\nid 7\nkv_tokens 17\n}\nindex {\ntext_block 48\n}\naffinity {\nttl 3m\n}\n}", "a:1 b:1", nil},
		{"EachItsPart", "a:1 {\nworker a:1 {\nid 7\n}\nindex {\ntext_block 48\n}\n}", "b:1 {\nworker b:1 {\nid 8\n}\nindex {\nblock_size 32\n}\n}", nil},
		{"TheSame", "a:1 {\nindex {\ntext_block 48\n}\n}", "a:1 {\nindex {\ntext_block 48\n}\n}", nil},
	} {
		t.Run(v.name, func(t *testing.T) {
			for _, sites := range []string{twoSites("kv_router "+v.a, "kv_router "+v.b), twoSites("kv_router "+v.b, "kv_router "+v.a)} {
				err := s.load(sites)
				if err != nil && len(v.want) == 0 {
					t.Errorf("refused: %v", err)
				}
				if err == nil && len(v.want) > 0 {
					t.Error("accepted")
				}
				for _, part := range v.want {
					if err != nil && !strings.Contains(err.Error(), part) {
						t.Errorf("the error %q does not say %q", err, part)
					}
				}
			}
		})
	}
}

// TestAgreementIsOneConfigurations changes a pool's settings by a reload. Only the
// settings of one configuration must agree.
func TestAgreementIsOneConfigurations(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, "index {\ntext_block 32\n}"))
	s.mustChat(t, ask("before"))
	for _, block := range []string{"index {\ntext_block 128\n}", "index {\ntext_block 64\n}\naffinity {\nttl 1m\n}", "max_body 1MiB"} {
		if err := s.reload(route(engines, block)); err != nil {
			t.Fatal(err)
		}
		s.mustChat(t, ask("after"))
	}
	s.booksAtZero(t)
}
