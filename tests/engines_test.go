package tests

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

const (
	mirrorCleared = "caddy_kv_router_cache_model_cleared_total"
	engineInfo    = "caddy_kv_router_worker_engine_info"
)

// startSimulated starts a simulated engine until the test ends. By default it is as fast as can be and its answers are short.
func startSimulated(t testing.TB, cfg engine.Config) *engine.Engine {
	t.Helper()
	cfg.Speed, cfg.AnswerTokens = cmp.Or(cfg.Speed, 100), cmp.Or(cfg.AnswerTokens, 8)
	e, err := engine.Start(cfg)
	noError(t, err)
	t.Cleanup(e.Close)
	return e
}

// startFleet starts n of them, e1 and so on.
func startFleet(t testing.TB, n int, cfg engine.Config) []*engine.Engine {
	t.Helper()
	engines := make([]*engine.Engine, n)
	for i := range engines {
		cfg.Name = fmt.Sprint("e", i+1)
		engines[i] = startSimulated(t, cfg)
	}
	return engines
}

// setFault has an engine fail from now on.
func setFault(t testing.TB, e *engine.Engine, f engine.Fault) {
	t.Helper()
	noError(t, e.SetFault(f))
}

// revive starts an engine again that was killed.
func revive(t *testing.T, e interface{ Restart() error }) {
	t.Helper()
	noError(t, e.Restart())
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
	s := startCaddy(t, route(engines, "pool default"))
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
	s := startCaddy(t, "kv_router {\nreverse_proxy "+f.Addr()+" {\nrewrite /llm{uri}\nheader_up Host engine.internal\nheader_up Authorization \"Bearer sk-x\"\n}\n}")
	s.mustChat(t, simChat("hello"))
	eventually(t, "the engine to be found out", func() bool {
		w := s.worker(t, f.Addr())
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

// spoken are the ways in which clients steer an engine: by nvext, by members beside it,
// and by headers. @worker stands for the worker's id.
var spoken = []struct {
	name, nvext, beside string
	header              []string
}{
	{name: "nothing"},
	{name: "greed_sampling", nvext: `{"greed_sampling":true}`, beside: `"temperature":0.7,`},
	{name: "use_raw_prompt", nvext: `{"use_raw_prompt":true}`},
	{name: "max_thinking_tokens", nvext: `{"max_thinking_tokens":512}`},
	{name: "token_data", nvext: `{"token_data":[101, 7592,102]}`},
	{name: "priority", nvext: `{"agent_hints":{"priority":5,"strict_priority":1,"osl":64,"speculative_prefill":false}}`, beside: `"user":"u",`},
	{name: "priority_header", header: []string{"X-Dynamo-Request-Priority", "-7"}},
	{name: "session", nvext: `{"session_control":{"session_id":"s-1","timeout":60},"session_params":{"id":"s-1","rid":"r-1"}}`},
	{name: "cache_control", nvext: `{"cache_control":{"type":"ephemeral","ttl":"5m"},"agent_hints":{"priority":50}}`},
	{name: "cache_salt", nvext: `{"cache_salt":"theirs"}`, beside: `"cache_salt":"own",`},
	{name: "tenant_header", nvext: `{"cache_salt":"theirs"}`, header: []string{"X-Tenant-Id", "tenant-1"}},
	{name: "pin", nvext: `{"backend_instance_id":@worker,"dp_rank":0}`},
	{name: "uploads", nvext: `{"metadata_upload":{"url":"s3://bucket/x"}}`},
	{name: "for_the_router", nvext: `{"request_timestamp_ms":1.5,"router":{"ttft_target":200},"router_config_override":{"router_temperature":0},` +
		`"allowed_worker_ids":[@worker],"routing_constraints":{"preferred_taints":{"a":1}},"extra_fields":["timing"],"annotations":["request_id"],"zzz":1}`},
	{name: "twice", nvext: `{"greed_sampling":true,"max_thinking_tokens":1},"nvext":null,"nvext":{"use_raw_prompt":false}`},
}

// asks are the requests that carry them.
var asks = []struct{ name, path, body string }{
	{"chat", "/v1/chat/completions", `{"model":"sim-8b",@"messages":[{"role":"user","content":"hi"}],"max_tokens":2}`},
	{"chat, streamed", "/v1/chat/completions", `{"stream":true,@"model":"sim-8b","messages":[{"role":"user","content":"hi"}],"max_tokens":2}`},
	{"completions", "/v1/completions", `{@"model":"sim-8b","prompt":"hi","max_tokens":2}`},
	{"completions, streamed", "/v1/completions", `{@"prompt":"hi","max_tokens":2,"model":"sim-8b","stream":true}`},
	{"generate", "/generate", `{@"text":"hi","sampling_params":{"max_new_tokens":2,"temperature":1}}`},
}

// spokenTo are the engines.
var spokenTo = map[engine.Flavour]struct {
	engine engine.Config
	worker string
}{
	engine.VLLM: {engine.Config{Priority: true}, "priority on\nthinking_budget on"},
	engine.SGLang: {engine.Config{ServerInfo: map[string]any{
		"enable_priority_scheduling": true, "radix_eviction_policy": "priority", "enable_strict_thinking": true, "reasoning_parser": "qwen3",
	}}, ""},
	engine.TRTLLM:   {engine.Config{}, "priority on\nthinking_budget on"},
	engine.LlamaCpp: {engine.Config{}, ""},
	engine.Dynamo:   {engine.Config{}, "dynamo_instance_id 7587891234567890123"},
}

// TestEnginesAreSpokenToInTheirOwnWords sends each field of nvext in turn. It compares
// what each engine received with testdata/engines.
func TestEnginesAreSpokenToInTheirOwnWords(t *testing.T) {
	for flavour, v := range spokenTo {
		t.Run(string(flavour), func(t *testing.T) {
			cfg := v.engine
			cfg.Flavour, cfg.KeepBodies = flavour, true
			e := startSimulated(t, cfg)
			s := startCaddy(t, route([]*engine.Engine{e}, "trust pins priorities overrides tenants uploads", "worker "+e.Addr()+" {\nid 42\n"+v.worker+"\n}"))
			s.mustChat(t, simChat("hello"))
			s.awaitType(t, e.Addr(), string(flavour))
			for _, c := range spoken {
				t.Run(c.name, func(t *testing.T) {
					golden(t, filepath.Join("testdata", "engines", string(flavour), c.name+".txt"), func() []byte {
						var b bytes.Buffer
						for _, ask := range asks {
							if ask.name == "generate" && flavour != engine.SGLang {
								continue
							}
							said := c.beside
							if c.nvext != "" {
								said += `"nvext":` + strings.ReplaceAll(c.nvext, "@worker", "42") + ","
							}
							sent := strings.Replace(ask.body, "@", said, 1)
							r := s.receivedBy(t, e, ask.path, sent, c.header...)
							fmt.Fprintf(&b, "# %s, sent:\n%s\n# received:\n%s%s\n\n", ask.name, sent, shownHeaders(r.Header), r.Body)
						}
						return b.Bytes()
					})
				})
			}
			s.booksAtZero(t)
		})
	}
}

// receivedBy posts a request and returns what the engine received. Engines refuse no
// request but a turn of a session that was not opened.
func (s *server) receivedBy(t *testing.T, e *engine.Engine, path, body string, header ...string) engine.Record {
	t.Helper()
	met := len(e.Journal())
	a := s.post(t.Context(), path, []byte(body), header...)
	for _, r := range e.Journal()[met:] {
		if r.Path == path {
			unknown := path == "/generate" && bytes.Contains(r.Body, []byte(`"session_params"`))
			if want := map[bool]int{true: http.StatusBadRequest, false: http.StatusOK}[unknown]; a.status != want || r.BodyBytes != len(r.Body) {
				t.Errorf("status %d, want %d: %s became %s, answered by %.300s", a.status, want, body, r.Body, a.body)
			}
			if !json.Valid(r.Body) {
				t.Errorf("%s became %s", body, r.Body)
			}
			return r
		}
	}
	t.Fatalf("the engine was not asked: status %d, error %v, body %.300q", a.status, a.err, a.body)
	return engine.Record{}
}

// shownHeaders returns the lines of the headers that matter to engines.
func shownHeaders(h http.Header) string {
	names := append([]string{nvext.HeaderSession}, routingHeaders...)
	slices.Sort(names)
	var b strings.Builder
	for _, name := range names {
		for _, value := range h[name] {
			fmt.Fprintf(&b, "%s: %s\n", name, value)
		}
	}
	return b.String()
}

// golden compares the result of make with a file, or writes the file with -update.
func golden(t *testing.T, file string, make func() []byte) {
	t.Helper()
	got := make()
	if *update {
		noError(t, os.MkdirAll(filepath.Dir(file), 0o755))
		noError(t, os.WriteFile(file, got, 0o600))
		return
	}
	want, err := os.ReadFile(file)
	noError(t, err)
	if !bytes.Equal(got, want) {
		t.Errorf("%s: got\n%s\nwant\n%s", file, got, want)
	}
}
