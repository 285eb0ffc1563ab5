package tests

import (
	"cmp"
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

// simulated returns the directive for simulated engines, with the lines of its
// block.
func simulated(engines []*engine.Engine, block ...string) string {
	addrs := make([]string, len(engines))
	for i, e := range engines {
		addrs[i] = e.Addr()
	}
	return "kv_router " + strings.Join(addrs, " ") + " {\n" + strings.Join(block, "\n") + "\n}"
}

// toldWorker is the part of a worker's view that depends on its engine's reports.
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

// TestRestartWithinAPoll restarts an engine between two probes. The configuration
// contradicts the engine, which the log says once. The router finds the restart once.
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

// TestCacheThatIsGoneIsMissed has an engine report the predicted tokens and then none. An
// engine does so if its cache was flushed and stores nothing more.
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

// TestWorkerThatWantsAKeyIsNoIncident has a worker that lists its models only to clients
// with a key.
func TestWorkerThatWantsAKeyIsNoIncident(t *testing.T) {
	f := startFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method == http.MethodGet && r.URL.Path == "/v1/models" {
			w.WriteHeader(http.StatusUnauthorized)
			return true
		}
		return false
	})
	s := startCaddy(t, "kv_router "+f.addr())
	s.mustChat(t, simChat("hello"), "Authorization", "Bearer clients-own")
	const line = "worker lists its models only with its api_key; the router probes it every 5 minutes"
	eventually(t, 5*time.Second, "the log to say so", func() bool { return len(s.entries(t, line)) == 1 })
	time.Sleep(11 * time.Second)
	if n := f.asked("/v1/models"); n > 2 {
		t.Errorf("asked %d times in 11 s", n)
	}
	if n := len(s.entries(t, line)); n != 1 {
		t.Errorf("the log says it %d times", n)
	}
	if _, found := s.scrape(t).sum("caddy_kv_router_incidents"); found {
		t.Error("there is an incident")
	}
}

// TestQuestionsAreRewrittenAsRequests has an engine behind a path.
func TestQuestionsAreRewrittenAsRequests(t *testing.T) {
	tells := fakeVLLM("0.20.0", func() string { return "" })
	f := startFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		path, behind := strings.CutPrefix(r.URL.Path, "/llm")
		r.URL.Path = path
		return behind && tells(w, r)
	})
	s := startCaddy(t, "kv_router {\nreverse_proxy "+f.addr()+" {\nrewrite /llm{uri}\n}\n}")
	s.mustChat(t, simChat("hello"))
	eventually(t, 10*time.Second, "the engine to be found out", func() bool {
		w := s.fakeWorker(t, f.addr())
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

// learnedPool and learnedWorker are what was learned, as the admin API shows it.
type learnedPool struct {
	Latency struct {
		Step    float64  `json:"step_ms"`
		Tokens  float64  `json:"per_1000_tokens_ms"`
		Timings int      `json:"timings"`
		Turns   *float64 `json:"expected_turns"`
		Answer  *float64 `json:"expected_answer_tokens"`
	} `json:"latency"`
}

type learnedSpeed struct {
	Slowness    *float64 `json:"slowness"`
	LastTiming  *float64 `json:"last_timing_seconds_ago"`
	Predictions int      `json:"ttft_predictions"`
	Median      *float64 `json:"ttft_error_median"`
	P90         *float64 `json:"ttft_error_p90"`
}

type learnedWorker struct {
	Latency *learnedSpeed `json:"latency"`
	Cache   struct {
		Capacity int64  `json:"capacity_tokens"`
		Reported *int64 `json:"capacity_reported_tokens"`
		Learned  bool   `json:"capacity_learned"`
	} `json:"cache"`
	Ranks []struct {
		Latency *learnedSpeed `json:"latency"`
	} `json:"dp_ranks"`
}

func (s *server) learned(t testing.TB, addr string) (p learnedPool, w learnedWorker) {
	t.Helper()
	s.api(t, http.MethodGet, defaultPool, nil, &p)
	s.api(t, http.MethodGet, defaultPool+"/workers/"+addr, nil, &w)
	return p, w
}

// TestWhatWasLearnedIsShown has two engines, then streams, then looks.
func TestWhatWasLearnedIsShown(t *testing.T) {
	engines := startTimed(t, 2, 1)
	s := startCaddy(t, simulated(engines, "policy round_robin"))
	metrics := []string{"caddy_kv_router_worker_slowness", "caddy_kv_router_worker_ttft_error_ratio"}
	p, w := s.learned(t, engines[0].Addr())
	if l := w.Latency; p.Latency.Timings != 0 || p.Latency.Answer != nil || p.Latency.Turns != nil || l == nil || l.Slowness != nil || l.LastTiming != nil || l.Median != nil || l.P90 != nil {
		t.Errorf("before the first request: %+v, %+v", p.Latency, w.Latency)
	}
	for _, name := range metrics {
		if _, there := s.scrape(t).sum(name, `worker="`+engines[0].Addr()+`"`); there {
			t.Errorf("there is a %s before the first request", name)
		}
	}
	for i := range 60 {
		s.mustChat(t, ask(fmt.Sprint(i, strings.Repeat(" some words", 20*(i%9)))).streamed())
	}
	s.booksAtZero(t)
	p, w = s.learned(t, engines[0].Addr())
	if l := p.Latency; l.Timings < 20 || l.Step <= 0 || l.Answer == nil || *l.Answer < 10 || l.Turns == nil {
		t.Errorf("the pool shows %+v", l)
	}
	if l := w.Latency; l == nil || l.Slowness == nil || *l.Slowness < 0.1 || *l.Slowness > 10 || l.LastTiming == nil || *l.LastTiming > 60 ||
		l.Predictions != 30 || l.Median == nil || l.P90 == nil || *l.P90 < *l.Median || len(w.Ranks) != 1 || w.Ranks[0].Latency == nil {
		t.Errorf("the worker shows %+v", l)
	}
	if w.Cache.Reported == nil || *w.Cache.Reported != 262144 || w.Cache.Learned {
		t.Errorf("the cache is %+v", w.Cache)
	}
	for _, name := range append(metrics, "caddy_kv_router_worker_capacity_tokens") {
		if _, there := s.scrape(t).sum(name, `worker="`+engines[0].Addr()+`"`, `dp_rank="0"`); !there {
			t.Errorf("there is no %s", name)
		}
	}
	if v := s.scrape(t).value("caddy_kv_router_prefill_cost_seconds", `pool="default"`, `per="1000_tokens"`); v*1e3 < 0.99*p.Latency.Tokens || v*1e3 > 1.01*p.Latency.Tokens {
		t.Errorf("1000 tokens cost %v s in the metrics, %v ms in the admin API", v, p.Latency.Tokens)
	}
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
				for range 2 {
					if a := s.post(t.Context(), "/v1/completions", []byte(prompt)); !a.ok() {
						t.Fatalf("status %d, error %v, body %.200q", a.status, a.err, a.body)
					}
				}
				eventually(t, 5*time.Second, "the answers' end", func() bool { return s.pool(t).Leases == 0 })
				if _, w := s.learned(t, engines[0].Addr()); w.Cache.Learned != v.learned || w.Cache.Reported != nil || w.Cache.Learned == (w.Cache.Capacity == 262144) {
					t.Errorf("usage %s: the cache is %+v", v.usage, w.Cache)
				}
			})
		}
	}
}
