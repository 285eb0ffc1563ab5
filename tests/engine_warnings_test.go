package tests

import (
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

const engineWarnings = "caddy_kv_router_worker_engine_warnings"

// wantWarning waits for a warning of a worker's engine in the log, the admin API and the
// metrics.
func (s *server) wantWarning(t *testing.T, dial, what, flag string) {
	t.Helper()
	eventually(t, 10*time.Second, "a warning: "+what, func() bool { return len(s.conditions(t, what)) > 0 })
	if l := s.conditions(t, what); len(l) != 1 || l[0].Upstream != dial || !strings.Contains(l[0].Advice, flag) {
		t.Errorf("the log says %+v, want one line with the advice %s", l, flag)
	}
	if w := s.limited(t, dial).Engine.Warnings; len(w) != 1 || w[0].What != what || w[0].Effect == "" || !strings.Contains(w[0].Advice, flag) {
		t.Errorf("the admin API says %+v", w)
	}
	if n := s.scrape(t).value(engineWarnings, `worker="`+dial+`"`); n != 1 {
		t.Errorf("%s is %v, want 1", engineWarnings, n)
	}
}

func TestEnginesWithoutAPrefixCacheAreWarnedOf(t *testing.T) {
	const what = "prefix caching is off"
	for name, v := range map[string]struct {
		tells func(http.ResponseWriter, *http.Request) bool
		flag  string
	}{
		"vLLM": {fakeVLLM("0.32.0", func() string {
			return `vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="1000",enable_prefix_caching="False"} 1` + "\n"
		}), "--enable-prefix-caching"},
		"SGLang": {fakeSGLang(`"version":"0.5.19","page_size":16,"dp_size":1,"disable_radix_cache":true`), "--disable-radix-cache"},
	} {
		t.Run(name, func(t *testing.T) {
			f, fine := startFake(t, v.tells), startFake(t, fakeVLLM("0.32.0", func() string { return vllmRanks(1) }))
			s := startCaddy(t, "kv_router "+f.addr()+" "+fine.addr())
			s.wantWarning(t, f.addr(), what, v.flag)
			if w := s.fakeWorker(t, f.addr()); len(w.Engine.Contradictions) > 0 {
				t.Errorf("contradictions %q", w.Engine.Contradictions)
			}
			if w := s.limited(t, fine.addr()).Engine.Warnings; w == nil || len(w) > 0 {
				t.Errorf("warnings of the other worker: %+v", w)
			}
		})
	}
}

// TestAnswersWithoutCachedTokensAreWarnedOf has an engine that reports no cached tokens,
// until it does.
func TestAnswersWithoutCachedTokensAreWarnedOf(t *testing.T) {
	const what = "answers carry no cached-token counts"
	for name, v := range map[string]struct {
		tells func(http.ResponseWriter, *http.Request) bool
		flag  string
	}{
		"vLLM":   {fakeVLLM("0.32.0", func() string { return vllmRanks(1) }), "--enable-prompt-tokens-details"},
		"SGLang": {fakeSGLang(`"version":"0.5.19","page_size":16,"dp_size":1`), "--enable-cache-report"},
		"any":    {func(http.ResponseWriter, *http.Request) bool { return false }, "cached_tokens"},
	} {
		t.Run(name, func(t *testing.T) {
			var reports atomic.Bool
			f := startFake(t, func(w http.ResponseWriter, r *http.Request) bool {
				if r.Method != http.MethodPost {
					return v.tells(w, r)
				}
				usage := ""
				if reports.Load() {
					usage = fmt.Sprintf(withCached, 1900)
				}
				w.Header().Set("Content-Type", "application/json")
				fmt.Fprint(w, fakeChat(usage))
				return true
			})
			s := startCaddy(t, "kv_router "+f.addr())
			if v.flag != "cached_tokens" {
				eventually(t, 10*time.Second, "the engine to be found out", func() bool { return s.fakeWorker(t, f.addr()).Engine.Type != "" })
			}
			for i := range 30 { // prompts that no engine has cached
				s.mustChat(t, simChat(fmt.Sprint(i, " ", someWords(200))))
			}
			if l := s.conditions(t, what); len(l) > 0 {
				t.Fatalf("the log says %+v before a prompt was cached", l)
			}
			for range 21 {
				s.mustChat(t, simChat(someWords(1200)))
			}
			s.wantWarning(t, f.addr(), what, v.flag)
			reports.Store(true)
			s.mustChat(t, simChat(someWords(1200)))
			eventually(t, 5*time.Second, "the warning to be over", func() bool { return s.logged(t, `"condition":"`+what) == 2 })
			if w := s.limited(t, f.addr()).Engine.Warnings; len(w) > 0 {
				t.Errorf("the admin API says %+v", w)
			}
		})
	}
}

// TestUnrelatedSitesOfOnePoolAreWarnedOf has sites that name no pool.
func TestUnrelatedSitesOfOnePoolAreWarnedOf(t *testing.T) {
	e := startEngines(t, 3, canned.Pace{})
	site := func(path, block string, engines ...*canned.Engine) string {
		return "handle " + path + " {\n" + route(engines, block) + "\n}\n"
	}
	s := startCaddy(t, site("/a/*", "", e[0], e[1])+site("/b/*", "", e[1])+site("/c/*", "pool other", e[2]))
	if l := s.entries(t, hurts+"pool"); len(l) > 0 {
		t.Errorf("sites with a common upstream, or with a name: %+v", l)
	}
	if err := s.reload(site("/a/*", "", e[0], e[1]) + site("/c/*", "", e[2])); err != nil {
		t.Fatal(err)
	}
	l := s.entries(t, hurts+"pool")
	if len(l) != 1 || l[0].Level != "warn" || l[0].Pool != "default" || l[0].Effect == "" || l[0].Advice == "" {
		t.Fatalf("the log says %+v, want one warning", l)
	}
	for _, e := range e {
		if !strings.Contains(l[0].Value, e.Addr()) {
			t.Errorf("the log says %q, want %s in it", l[0].Value, e.Addr())
		}
	}
}

// TestQueueWithoutALimitIsWarnedOf has a queue in one site, and a limit in none, and then
// in another.
func TestQueueWithoutALimitIsWarnedOf(t *testing.T) {
	e := startEngines(t, 1, canned.Pace{})
	queue := "queue {\nmax_waiting 10\n}"
	site := func(path, block string) string {
		return "handle " + path + " {\n" + route(e, "pool queued", block) + "\n}\n"
	}
	s := startCaddy(t, site("/a/*", queue)+site("/b/*", maxRunning(2)))
	s.mustPostTo(t, "/a/v1/chat/completions")
	if l := s.entries(t, hurts+"queue"); len(l) > 0 {
		t.Errorf("another site has the limit: %+v", l)
	}
	if err := s.reload(site("/a/*", queue) + site("/b/*", "")); err != nil {
		t.Fatal(err)
	}
	s.mustPostTo(t, "/a/v1/chat/completions")
	s.mustPostTo(t, "/b/v1/chat/completions")
	eventually(t, 5*time.Second, "a warning", func() bool { return len(s.entries(t, hurts+"queue")) > 0 })
	if l := s.entries(t, hurts+"queue"); len(l) != 1 || l[0].Level != "warn" || l[0].Pool != "queued" || l[0].Advice == "" {
		t.Errorf("the log says %+v, want one warning", l)
	}
}

func (s *server) mustPostTo(t *testing.T, path string) {
	t.Helper()
	if a := s.post(t.Context(), path, ask("hello").body()); !a.ok() {
		t.Fatalf("%s: status %d, error %v", path, a.status, a.err)
	}
}
