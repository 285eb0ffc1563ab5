package tests

import (
	"cmp"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

const (
	mirrorCleared = "caddy_kv_router_cache_model_cleared_total"
	engineInfo    = "caddy_kv_router_worker_engine_info"
)

// startSimulated starts a simulated engine with fast answers, until the test ends.
func startSimulated(t testing.TB, cfg engine.Config) *engine.Engine {
	t.Helper()
	cfg.Speed, cfg.AnswerTokens = 100, cmp.Or(cfg.AnswerTokens, 8)
	e, err := engine.Start(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

// setFault has an engine fail from now on.
func setFault(t *testing.T, e *engine.Engine, f engine.Fault) {
	t.Helper()
	if err := e.SetFault(f); err != nil {
		t.Fatal(err)
	}
}

// revive starts an engine again that was killed.
func revive(t *testing.T, e interface{ Restart() error }) {
	t.Helper()
	if err := e.Restart(); err != nil {
		t.Fatal(err)
	}
}

// simulated returns the directive for simulated engines, with the lines of its
// block.
func simulated(engines []*engine.Engine, block ...string) string {
	addrs := make([]string, len(engines))
	for i, e := range engines {
		addrs[i] = e.Addr()
	}
	return "kv_router " + strings.Join(addrs, " ") + " {\n" + strings.Join(block, "\n") + "\n}"
}

func simChat(text string) chat { return chat{Model: "sim-8b", Messages: []message{{"user", text}}} }

// TestEnginesAreFoundOut has one engine of each kind in one pool, with no engine
// configured.
func TestEnginesAreFoundOut(t *testing.T) {
	flavours := []engine.Flavour{engine.VLLM, engine.SGLang, engine.OldSGLang, engine.TRTLLM, engine.LlamaCpp, engine.Dynamo}
	var engines []*engine.Engine
	for _, f := range flavours {
		engines = append(engines, startSimulated(t, engine.Config{
			Name: string(f), Flavour: f, BlockSize: 32, Blocks: 300, MaxModelLen: 4096, MaxRunning: 4,
		}))
	}
	s := startCaddy(t, simulated(engines, "pool default"))
	if a := s.chat(t.Context(), simChat("hello")); !a.ok() {
		t.Fatalf("status %d, error %v, body %.300q", a.status, a.err, a.body)
	}
	want := map[engine.Flavour]struct {
		kind         string
		kv, context  int64
		block, ranks int
		running      int
	}{
		engine.VLLM:      {"vllm", 9600, 4096, 32, 1, 0},
		engine.SGLang:    {"sglang", 9600, 4096, 32, 1, 4},
		engine.OldSGLang: {"sglang", 9600, 4096, 32, 1, 4},
		engine.TRTLLM:    {"trtllm", 0, 0, 0, 0, 0},
		engine.LlamaCpp:  {"llamacpp", 4 * 4096, 4096, 0, 0, 4},
		engine.Dynamo:    {"dynamo", 0, 0, 0, 0, 0},
	}
	for i, f := range flavours {
		var w adminWorker
		c := want[f]
		room := max(c.kv, 262144*min(1, max(0, 1-c.kv)))
		eventually(t, fmt.Sprintf("%s to be found out, with room for %d tokens", f, room), func() bool {
			w = s.worker(t, engines[i].Addr())
			return w.Engine.Type != "" && w.Cache.Capacity == room
		})
		told := w.Engine.Told
		if w.Engine.Type != c.kind || w.Engine.Source != "found" || (f != engine.Dynamo) != (w.Engine.Version != "") {
			t.Errorf("%s is found to be %+v", f, w.Engine)
		}
		if told.KVTokens != c.kv || told.Context != c.context || told.BlockSize != c.block || told.DPSize != c.ranks || told.Running != c.running {
			t.Errorf("%s told %+v, want %+v", f, told, c)
		}
		if (told.Started != nil) != (f == engine.VLLM) {
			t.Errorf("%s told that it started %v", f, told.Started)
		}
		if v, found := s.scrape(t).sum(engineInfo, `worker="`+w.Dial+`"`, `engine="`+c.kind+`"`, `source="found"`); !found || v != 1 {
			t.Errorf("%s has no %s", f, engineInfo)
		}
	}
	for _, r := range engines[3].Journal() {
		if r.Path == "/metrics" {
			t.Error("TensorRT-LLM's statistics were taken away")
		}
	}
	p := s.pool(t)
	if p.Settings.BlockSize != 32 || p.Settings.From != "found" {
		t.Errorf("blocks of %+v", p.Settings)
	}
}

// TestOwnRequestsGoAsClientsDo has an engine behind a path, and header operations.
func TestOwnRequestsGoAsClientsDo(t *testing.T) {
	tells := fakeVLLM("0.20.0", func() string { return "" })
	f := startFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		if r.Host != "engine.internal" || r.Header.Get("Authorization") != "Bearer sk-x" {
			t.Errorf("%s: Host %q, Authorization %q", r.URL.Path, r.Host, r.Header.Get("Authorization"))
		}
		path, behind := strings.CutPrefix(r.URL.Path, "/llm")
		r.URL.Path = path
		return behind && tells(w, r)
	})
	s := startCaddy(t, "kv_router {\nreverse_proxy "+f.addr()+" {\nrewrite /llm{uri}\nheader_up Host engine.internal\nheader_up Authorization \"Bearer sk-x\"\n}\n}")
	s.mustChat(t, simChat("hello"))
	eventually(t, "the engine to be found out", func() bool {
		w := s.worker(t, f.addr())
		return w.Engine.Type == "vllm" && w.Engine.Version == "0.20.0" && len(w.Models.Told) == 1
	})
	if n := f.asked("/v1/models") + f.asked("/metrics"); n > 0 {
		t.Errorf("asked %d times outside of the path", n)
	}
}

// vllmRanks returns the metrics of a vLLM with the given number of ranks.
func vllmRanks(n int) (page string) {
	for i := range n {
		page += fmt.Sprintf("vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"10000\",engine=\"%d\"} 1.0\n", i)
	}
	return page
}

// TestZeroCachedTokensAreTold has engines that report other counts of cached tokens
// than predicted: 0 is one, and nothing is none.
func TestZeroCachedTokensAreTold(t *testing.T) {
	ids := strings.TrimSuffix(strings.Repeat("7,", 2000), ",")
	prompts := map[string]string{
		"Tokens": `{"model":"m","prompt":[` + ids + `]}`,
		"Text":   `{"model":"m","prompt":"` + strings.Repeat("some words of a prompt ", 400) + `"}`,
	}
	for _, v := range []struct {
		usage   string
		learned bool
	}{
		{`{"prompt_tokens":2000,"completion_tokens":3}`, false},
		{`{"prompt_tokens":2000,"completion_tokens":3,"prompt_tokens_details":null}`, false},
		{`{"prompt_tokens":2000,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":0}}`, true},
	} {
		for name, prompt := range prompts {
			t.Run(fmt.Sprintf("%s/Learned=%v", name, v.learned), func(t *testing.T) {
				engines := startEngines(t, 1, canned.Pace{})
				s := startCaddy(t, route(engines))
				engines[0].SetHandler(usageAnswer(v.usage))
				for range 12 { // a cache that is lost once is no small cache
					if a := s.post(t.Context(), "/v1/completions", []byte(prompt)); !a.ok() {
						t.Fatalf("status %d, error %v, body %.200q", a.status, a.err, a.body)
					}
				}
				eventually(t, "the answers' end", func() bool { return s.pool(t).Leases == 0 })
				w := s.worker(t, engines[0].Addr())
				if w.Cache.Learned != v.learned || w.Cache.Reported != nil || w.Cache.Learned == (w.Cache.Capacity == 262144) {
					t.Errorf("usage %s: the cache is %+v", v.usage, w.Cache)
				}
			})
		}
	}
}
