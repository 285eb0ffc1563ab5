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

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

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
