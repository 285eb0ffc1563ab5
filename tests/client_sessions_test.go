package tests

import (
	"fmt"
	"net/http"
	"sync"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// TestSessionsThatClientsOpen has clients open sessions in SGLang themselves, and send their
// turns two at a time.
func TestSessionsThatClientsOpen(t *testing.T) {
	for name, block := range map[string]string{"default": "", "off": affinity("off"), "another key": "affinity {\nkey header:X-Mine\n}"} {
		t.Run(name, func(t *testing.T) {
			engines := holders(t, 2, engine.Config{})
			s := startHolding(t, engines, block)
			for i := range 6 {
				id := fmt.Sprintf("mine-%d", i)
				opened := s.post(t.Context(), "/open_session", fmt.Appendf(nil, `{"capacity_of_str_len":65536,"session_id":%q,"streaming":true}`, id))
				if opened.status != http.StatusOK {
					t.Fatalf("open: status %d, body %q", opened.status, opened.body)
				}
				home := opened.header.Get(canned.EngineHeader)
				var turns sync.WaitGroup
				for turn := range 4 {
					turns.Go(func() {
						body := fmt.Appendf(nil, `{"text":"words of turn %d, which are new","sampling_params":{"max_new_tokens":4},"session_params":{"id":%q}}`, turn, id)
						if a := s.post(t.Context(), atGenerate, body); a.status != http.StatusOK || a.engine() != home {
							t.Errorf("%s: a turn got status %d by %s, opened by %s: %q", block, a.status, a.engine(), home, a.body)
						}
					})
				}
				turns.Wait()
				if a := s.post(t.Context(), "/close_session", fmt.Appendf(nil, `{"session_id":%q}`, id)); a.status != http.StatusOK || a.engine() != home {
					t.Errorf("%s: closed with status %d by %s, opened by %s", block, a.status, a.engine(), home)
				}
			}
			for _, e := range engines { // the turns are no prompts
				if v, _ := s.scrape(t).sum("caddy_kv_router_worker_cached_tokens", `worker="`+e.Addr()+`"`); v != 0 {
					t.Errorf("%s: the model holds %v tokens", block, v)
				}
			}
			if n := s.pool(t).Sessions; n != 0 {
				t.Errorf("%s: %d sessions are left", block, n)
			}
			s.booksAtZero(t)
		})
	}
}
