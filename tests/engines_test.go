package tests

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

const (
	mirrorCleared = "caddy_kv_router_cache_model_cleared_total"
	engineInfo    = "caddy_kv_router_worker_engine_info"
	contradicted  = "caddy_kv_router_worker_contradictions"
)

// startSimulated starts a simulated engine that answers fast, until the test
// ends.
func startSimulated(t testing.TB, cfg engine.Config) *engine.Engine {
	t.Helper()
	cfg.Speed, cfg.AnswerTokens = 100, 8
	e, err := engine.Start(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
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

// toldWorker is what the tests look at of a worker whose engine reports
// something.
type toldWorker struct {
	Dial   string `json:"dial"`
	Engine struct {
		Type    string `json:"type"`
		Source  string `json:"source"`
		Version string `json:"version"`
		Told    struct {
			KVTokens  int64      `json:"kv_tokens_per_rank"`
			BlockSize int        `json:"block_size_tokens"`
			DPSize    int        `json:"dp_size"`
			Context   int64      `json:"context_tokens"`
			Running   int        `json:"max_running_requests_per_rank"`
			Started   *time.Time `json:"started"`
		} `json:"info"`
		Contradictions []string `json:"contradictions"`
	} `json:"engine"`
	Cache struct {
		Capacity int64 `json:"capacity_tokens"`
		Cached   int64 `json:"cached_tokens"`
	} `json:"cache"`
	Ranks []struct {
		Rank  int `json:"dp_rank"`
		Cache struct {
			Capacity int64 `json:"capacity_tokens"`
			Cached   int64 `json:"cached_tokens"`
		} `json:"cache"`
	} `json:"dp_ranks"`
}

func (s *server) told(t testing.TB, e *engine.Engine) (w toldWorker) {
	t.Helper()
	s.api(t, http.MethodGet, defaultPool+"/workers/"+e.Addr(), nil, &w)
	return w
}

func simChat(text string) chat { return chat{Model: "sim-8b", Messages: []message{{"user", text}}} }

// TestEnginesAreFoundOut has one engine of each kind in one pool, configured to
// nothing.
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
		engine.LlamaCpp:  {"llamacpp", 4096, 4096, 0, 0, 4},
		engine.Dynamo:    {"dynamo", 0, 0, 0, 0, 0},
	}
	for i, f := range flavours {
		var w toldWorker
		c := want[f]
		room := max(c.kv, 262144*min(1, max(0, 1-c.kv)))
		eventually(t, 10*time.Second, fmt.Sprintf("%s to be found out, with room for %d tokens", f, room), func() bool {
			w = s.told(t, engines[i])
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
	var p struct {
		Settings struct {
			BlockSize int    `json:"block_size_tokens"`
			From      string `json:"block_size_from"`
		} `json:"settings"`
	}
	s.api(t, http.MethodGet, defaultPool, nil, &p)
	if p.Settings.BlockSize != 32 || p.Settings.From != "found" {
		t.Errorf("blocks of %+v", p.Settings)
	}
}

// TestEngineThatComesLate is down at first, and asked with its key when it is
// there.
func TestEngineThatComesLate(t *testing.T) {
	late, there := startSimulated(t, engine.Config{Name: "late", Blocks: 500, MaxModelLen: 4096}), startSimulated(t, engine.Config{Name: "there"})
	late.Kill()
	s := startCaddy(t, simulated([]*engine.Engine{late, there}, "worker * {\napi_key secret\n}"))
	s.mustChat(t, simChat("hello"))
	eventually(t, 5*time.Second, "the other engine to be found out", func() bool { return s.told(t, there).Engine.Type == "vllm" })
	if w := s.told(t, late); w.Engine.Type != "" || w.Engine.Source != "unknown" || w.Cache.Capacity != 262144 {
		t.Errorf("the one that is down is %+v", w)
	}
	if err := late.Restart(); err != nil {
		t.Fatal(err)
	}
	eventually(t, 20*time.Second, "the late engine to be found out", func() bool { return s.told(t, late).Engine.Told.KVTokens == 8000 })
	if w := s.told(t, late); w.Cache.Capacity != 8000 {
		t.Errorf("its cache model has room for %d tokens", w.Cache.Capacity)
	}
	for _, r := range late.Journal() {
		if r.Header.Get("User-Agent") == "kv_router" && r.Header.Get("Authorization") != "Bearer secret" {
			t.Errorf("asked for %s without the key", r.Path)
		}
	}
}

// TestRestartWithinAPoll restarts an engine in a moment in which nobody asks it
// for anything. Its operator says what the engine contradicts, and is told so
// once. It was found to have restarted, and not again.
func TestRestartWithinAPoll(t *testing.T) {
	e := startSimulated(t, engine.Config{Blocks: 4000, MaxModelLen: 8192})
	s := startCaddy(t, simulated([]*engine.Engine{e}, "engine sglang", "index {\nblock_size 24\n}", "worker * {\nkv_tokens 5000\n}"))
	before := s.scrape(t)
	s.mustChat(t, simChat(strings.Repeat("some words ", 200)))
	eventually(t, 10*time.Second, "the engine to be asked", func() bool { return len(s.told(t, e).Engine.Contradictions) == 3 })
	w := s.told(t, e)
	if w.Cache.Cached == 0 || w.Cache.Capacity != 5000 || w.Engine.Type != "sglang" || w.Engine.Source != "configured" {
		t.Errorf("the worker is %+v", w)
	}
	if n := s.scrape(t).value(contradicted); n != 3 {
		t.Errorf("%s = %v", contradicted, n)
	}
	if err := e.Restart(); err != nil {
		t.Fatal(err)
	}
	cleared := func() float64 { m := s.scrape(t); return m.value(mirrorCleared) - before.value(mirrorCleared) }
	start := time.Now()
	eventually(t, 40*time.Second, "the restart to be noticed", func() bool { return s.told(t, e).Cache.Cached == 0 && cleared() == 1 })
	t.Logf("an engine that was away for a moment was found to have restarted after %v", time.Since(start).Round(100*time.Millisecond))
	asked := func() (n int) {
		for _, r := range e.Journal() {
			if r.Path == "/v1/models" {
				n++
			}
		}
		return n
	}
	s.mustChat(t, simChat(strings.Repeat("other words ", 200)))
	was := asked()
	eventually(t, 20*time.Second, "the engine to be asked again", func() bool { return asked() > was+1 })
	if n := cleared(); n != 1 || s.told(t, e).Cache.Cached == 0 {
		t.Errorf("cleared %v times", n)
	}
	for _, what := range []string{"kv_tokens: configured 5000", "block_size: configured 24", "engine: configured sglang"} {
		if n := s.logged(t, what); n != 1 {
			t.Errorf("%d warnings of %q, want 1", n, what)
		}
	}
}

// TestCacheThatIsGoneIsMissed has an engine report what was predicted, then
// nothing at all, as one does whose cache was flushed and fills no more.
func TestCacheThatIsGoneIsMissed(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines))
	before := s.scrape(t)
	cleared := func() float64 {
		m := s.scrape(t)
		return m.value(mirrorCleared, `reason="mismatch"`) - before.value(mirrorCleared, `reason="mismatch"`)
	}
	ids := func(n int) []byte {
		return []byte(`{"model":"m","prompt":[` + strings.TrimSuffix(strings.Repeat(fmt.Sprint(n)+",", 2000), ",") + `]}`)
	}
	ask := func(from, to, cached int) {
		t.Helper()
		engines[0].SetHandler(usageAnswer(fmt.Sprintf(`{"prompt_tokens":2000,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":%d}}`, cached)))
		for i := from; i < to; i++ {
			if a := s.post(t.Context(), "/v1/completions", ids(i)); !a.ok() {
				t.Fatalf("status %d, error %v, body %q", a.status, a.err, a.body)
			}
		}
	}
	ask(0, 30, 0) // new prompts, of which nothing is predicted
	ask(0, 4, 1984)
	if n := cleared(); n != 0 {
		t.Fatalf("cleared %v times while all is well", n)
	}
	ask(25, 30, 0)
	eventually(t, 5*time.Second, "the cache to be missed", func() bool { return cleared() == 1 })
	for range 3 {
		ask(0, 30, 0) // predicted again, and never so
	}
	s.booksAtZero(t)
	if n := cleared(); n != 1 {
		t.Errorf("cleared %v times, want once", n)
	}
}
