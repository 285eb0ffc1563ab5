package tests

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

const unsupported = "caddy_kv_router_nvext_unsupported_total"

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
			s := startCaddy(t, simulated([]*engine.Engine{e}, "trust pins priorities overrides tenants uploads", "worker "+e.Addr()+" {\nid 42\n"+v.worker+"\n}"))
			s.mustChat(t, simChat("hello"))
			eventually(t, 10*time.Second, "the engine to be found out", func() bool { return s.told(t, e).Engine.Type == string(flavour) })
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
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, got, 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s: got\n%s\nwant\n%s", file, got, want)
	}
}

// TestAnotherEngineIsSpokenToInItsOwnWords has a request that one engine refuses and an
// engine of another type answers. Nothing for the first engine reaches the second. The
// router counts and shows the fields that the second does not support.
func TestAnotherEngineIsSpokenToInItsOwnWords(t *testing.T) {
	info := map[string]any{"enable_priority_scheduling": true}
	sglang := startSimulated(t, engine.Config{Name: "sglang", Flavour: engine.SGLang, Ranks: 2, KeepBodies: true, ServerInfo: info})
	vllm := startSimulated(t, engine.Config{Name: "vllm", KeepBodies: true})
	both := []*engine.Engine{sglang, vllm}
	s := startCaddy(t, simulated(both, "trust priorities", "inject_usage", "policy round_robin"))
	s.mustChat(t, simChat("hello"))
	eventually(t, 10*time.Second, "the engines to be found out", func() bool {
		return len(s.told(t, sglang).Ranks) == 2 && s.told(t, vllm).Engine.Type == "vllm"
	})
	if err := sglang.SetFault(engine.Fault{Kind: engine.Status, Status: 503}); err != nil {
		t.Fatal(err)
	}
	before := s.scrape(t)
	const body = `{"stream":true,"nvext":{"agent_hints":{"priority":3},"session_params":{"id":"s"}},"model":"sim-8b","messages":[{"role":"user","content":"%s"}]}`
	asked := func() int {
		return slices.IndexFunc(sglang.Journal(), func(r engine.Record) bool { return bytes.Contains(r.Body, []byte("tried")) })
	}
	tries := 0
	for ; asked() < 0; tries++ {
		if tries > 10 {
			t.Fatal("the engine that refuses was never tried")
		}
		if a := s.post(t.Context(), "/v1/chat/completions", fmt.Appendf(nil, body, "tried")); !a.ok() {
			t.Fatalf("status %d, error %v, body %.300q", a.status, a.err, a.body)
		}
	}
	first, got := sglang.Journal()[asked()], vllm.Journal()
	const usage = `{"stream_options":{"include_usage":true},"stream":true,`
	const rest = `"model":"sim-8b","messages":[{"role":"user","content":"tried"}]`
	var told struct {
		Rank int `json:"routed_dp_rank"`
	}
	if err := json.Unmarshal(first.Body, &told); err != nil {
		t.Fatal(err)
	}
	rank := fmt.Sprint(told.Rank)
	for what, v := range map[string][2]string{
		"sglang": {string(first.Body), usage + rest + `,"session_params":{"id":"s"},"priority":3,"routed_dp_rank":` + rank + "}"},
		"vllm":   {string(got[len(got)-1].Body), usage + rest + "}"},
	} {
		var is, want any
		if json.Unmarshal([]byte(v[0]), &is) != nil || json.Unmarshal([]byte(v[1]), &want) != nil || fmt.Sprint(is) != fmt.Sprint(want) || !strings.HasPrefix(v[0], usage) {
			t.Errorf("%s received %s, want %s", what, v[0], v[1])
		}
	}
	after := s.scrape(t)
	for _, field := range []string{"session_params", "agent_hints.priority"} {
		label := []string{`engine="vllm"`, `field="` + field + `"`}
		if n := after.value(unsupported, label...) - before.value(unsupported, label...); n != float64(tries) {
			t.Errorf("%s: %v requests were made without it, want %d", field, n, tries)
		}
	}
	if n := after.value(unsupported, `engine="sglang"`); n != before.value(unsupported, `engine="sglang"`) {
		t.Error("something is said to be missing in SGLang")
	}
	var p struct {
		Incidents []struct {
			What string `json:"what"`
		} `json:"incidents"`
	}
	s.api(t, http.MethodGet, defaultPool, nil, &p)
	if what := "clients request nvext fields that the engine does not support"; !slices.ContainsFunc(p.Incidents, func(i struct {
		What string `json:"what"`
	},
	) bool {
		return i.What == what
	}) || s.logged(t, what) != 1 {
		t.Errorf("incidents %v, and %d lines of the log", p.Incidents, s.logged(t, what))
	}
	s.booksAtZero(t)
}
