package engine

import (
	"slices"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
)

// site is a server by its paths: bodies of answers with status 200, or `!401`.
type site map[string]string

func (s site) get(asked *[]string) Get {
	return func(path string) (int, []byte) {
		*asked = append(*asked, path)
		switch body, ok := s[path]; {
		case s["*"] == "down", s["*"] == "silent" && !ok:
			return 0, nil
		case body == "!401":
			return 401, []byte(`{"error":"Unauthorized"}`)
		case !ok:
			return 404, []byte(`{"detail":"Not Found"}`)
		default:
			return 200, []byte(body)
		}
	}
}

const vllmPage = `# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",cache_dtype="auto",enable_prefix_caching="True",engine="0",kv_cache_size_tokens="9600",num_gpu_blocks="599",sliding_window="None"} 1.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",enable_prefix_caching="True",engine="1",kv_cache_size_tokens="9568",num_gpu_blocks="599",model="a\"},b"} 1.0
process_start_time_seconds 1.76372563025e+09
vllm:num_requests_running{engine="0",model_name="m"} 3.0
`

var sites = []struct {
	name string
	site site
	want Info
}{
	{"vLLM with two ranks", site{
		pathModels:  `{"object":"list","data":[{"id":"m","owned_by":"vllm","max_model_len":8192},{"id":"lora","owned_by":"vllm","max_model_len":null}]}`,
		pathVersion: `{"version":"0.32.0+cpu"}`, pathMetrics: vllmPage,
	}, Info{
		Type: VLLM, Version: "0.32.0+cpu", KVTokens: 9568, BlockSize: 32, DPSize: 2, ContextTokens: 8192,
		Started: time.UnixMilli(1763725630250), BootID: "1763725630250",
	}},
	{"vLLM with events of two ranks", site{
		pathModels:   `{"data":[{"id":"m","owned_by":"vllm"}]}`,
		pathKVEvents: `{"0":{"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:6557","topic":"t"},"1":{"endpoint":"tcp://*:5558","replay_endpoint":"tcp://*:6558","topic":"t"}}`,
	}, Info{Type: VLLM, KVEvents: KVEvents{Endpoint: "tcp://*:5557", Replay: "tcp://*:6557", Topic: "t", Publishers: 2}}},
	{"vLLM with one rank of several, and no replay", site{
		pathModels:   `{"data":[{"id":"m","owned_by":"vllm"}]}`,
		pathKVEvents: `{"3":{"endpoint":"tcp://127.0.0.1:5560","replay_endpoint":null,"topic":""}}`,
	}, Info{Type: VLLM, KVEvents: KVEvents{Endpoint: "tcp://127.0.0.1:5560", Publishers: 1}}},
	{"vLLM with events at odd ports", site{
		pathModels:   `{"data":[{"id":"m","owned_by":"vllm"}]}`,
		pathKVEvents: `{"0":{"endpoint":"tcp://*:5557"},"1":{"endpoint":"tcp://*:5559"},"x":{"endpoint":"tcp://*:1"},"2":7}`,
	}, Info{Type: VLLM}},
	{"SGLang with events", site{
		pathModels:     `{"data":[{"id":"m","owned_by":"sglang"}]}`,
		pathServerInfo: `{"max_total_num_tokens":100000,"dp_size":2,"kv_events":{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557,"topic":"kv","block_size":16,"dp_size":2}}`,
	}, Info{Type: SGLang, KVTokens: 100000, DPSize: 2, KVEvents: KVEvents{Endpoint: "tcp://*:5557", Topic: "kv", Publishers: 2}}},
	{"SGLang with events and replays at another address", site{
		pathModels:     `{"data":[{"id":"m","owned_by":"sglang"}]}`,
		pathServerInfo: `{"max_total_num_tokens":100000,"kv_events":{"publisher":"zmq","endpoint_host":"::","endpoint_port_base":5557,"replay_endpoint_port_base":6557}}`,
	}, Info{Type: SGLang, KVTokens: 100000, KVEvents: KVEvents{Endpoint: "tcp://[::]:5557", Replay: "tcp://*:6557", Publishers: 1}}},
	{"SGLang that listens where others connect", site{
		pathModels: `{"data":[{"id":"m","owned_by":"sglang"}]}`,
		pathServerInfo: `{"max_total_num_tokens":100000,"kv_events_config":"{\"publisher\":\"zmq\",\"bind\":true}",` +
			`"kv_events":{"publisher":"zmq","endpoint_host":"10.0.0.1","endpoint_port_base":5557}}`,
	}, Info{Type: SGLang, KVTokens: 100000, KVEvents: KVEvents{Endpoint: "tcp://10.0.0.1:5557", Publishers: 1, Listens: true}}},
	{"SGLang without events", site{
		pathModels:     `{"data":[{"id":"m","owned_by":"sglang"}]}`,
		pathServerInfo: `{"max_total_num_tokens":100000,"kv_events":{"publisher":"null","endpoint_port_base":5557}}`,
	}, Info{Type: SGLang, KVTokens: 100000}},
	{"vLLM that is older, and behind a key", site{
		pathModels: "!401", pathVersion: `{"version":"0.8.5"}`,
		pathMetrics: "# HELP x\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"573\",enable_prefix_caching=\"False\"} 1.0\n",
	}, Info{Type: VLLM, Version: "0.8.5", KVTokens: 573 * 16, BlockSize: 16, DPSize: 1, NoPrefixCache: true}},
	{"vLLM that is older, with two ranks", site{
		pathModels: `{"data":[{"id":"m","owned_by":"vllm"}]}`, pathVersion: `{"version":"0.11.0"}`,
		pathMetrics: "vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"1146\"} 1\n" +
			"vllm:cache_config_info{block_size=\"16\",engine=\"1\",num_gpu_blocks=\"1146\"} 1\n",
	}, Info{Type: VLLM, Version: "0.11.0", KVTokens: 573 * 16, BlockSize: 16, DPSize: 2}},
	{"vLLM with a cache that cannot be", site{
		pathModels:  `{"data":[{"id":"m","owned_by":"vllm","max_model_len":8192}]}`,
		pathMetrics: "\nvllm:cache_config_info{block_size=\"16\",kv_cache_size_tokens=\"1\",engine=\"0\"} 1\n",
	}, Info{Type: VLLM, BlockSize: 16, DPSize: 1, ContextTokens: 8192}},
	{"vLLM with a cache that holds no context", site{
		pathModels:  `{"data":[{"id":"m","owned_by":"vllm","max_model_len":8192}]}`,
		pathMetrics: "\nvllm:cache_config_info{block_size=\"16\",kv_cache_size_tokens=\"1000\",engine=\"0\"} 1\n",
	}, Info{Type: VLLM, BlockSize: 16, DPSize: 1, ContextTokens: 8192}},
	{"vLLM with a part of the ranks", site{
		pathModels:  `{"data":[{"id":"m","owned_by":"vllm"}]}`,
		pathMetrics: "vllm:cache_config_info{engine=\"4\",block_size=\"16\",num_gpu_blocks=\"None\"} 1\nvllm:cache_config_info{engine=\"5\",block_size=\"16\"} 1\n",
	}, Info{Type: VLLM, BlockSize: 16}},
	{"vLLM that sleeps", site{
		pathModels: `{"data":[{"id":"m","owned_by":"vllm"}]}`,
		pathMetrics: "vllm:engine_sleep_state{engine=\"0\",sleep_state=\"awake\"} 0.0\n" +
			"vllm:engine_sleep_state{engine=\"0\",sleep_state=\"weights_offloaded\"} 1.0\n",
	}, Info{Type: VLLM, Asleep: true}},
	{"vLLM that is awake", site{
		pathModels:  `{"data":[{"id":"m","owned_by":"vllm"}]}`,
		pathMetrics: "vllm:engine_sleep_state{engine=\"0\",sleep_state=\"awake\"} 1.0\n", pathSleep: `{"is_sleeping":true}`,
	}, Info{Type: VLLM}},
	{"vLLM that sleeps at level 0", site{
		pathModels: `{"data":[{"id":"m","owned_by":"vllm"}]}`,
		pathMetrics: "vllm:engine_sleep_state{engine=\"0\",sleep_state=\"awake\"} 0.0\n" +
			"vllm:engine_sleep_state{engine=\"0\",sleep_state=\"weights_offloaded\"} 0.0\n",
		pathSleep: `{"is_sleeping":true}`,
	}, Info{Type: VLLM, Asleep: true}},
	{"older vLLM that sleeps", site{
		pathModels: `{"data":[{"id":"m","owned_by":"vllm"}]}`, pathSleep: `{"is_sleeping":true}`,
	}, Info{Type: VLLM, Asleep: true}},
	{"SGLang", site{
		pathModels: `{"data":[{"id":"m","owned_by":"sglang","max_model_len":131072}]}`,
		pathServerInfo: `{"page_size":64,"dp_size":4,"max_running_requests":null,"disable_radix_cache":false,"random_seed":42,"max_total_num_tokens":20480,` +
			`"internal_states":[{"memory_usage":{"token_capacity":20480},"effective_max_running_requests_per_dp":128}],"version":"0.5.21"}`,
	}, Info{
		Type: SGLang, Version: "0.5.21", KVTokens: 20480, BlockSize: 64, DPSize: 4, ContextTokens: 131072, MaxRunning: 128,
		BootID: "42/20480",
	}},
	{"SGLang that heeds priorities, low ones first", site{
		pathModels: `{"data":[{"id":"m","owned_by":"sglang"}]}`,
		pathServerInfo: `{"page_size":64,"enable_priority_scheduling":true,"schedule_low_priority_values_first":true,"max_total_num_tokens":1,` +
			`"radix_eviction_policy":"priority","abort_on_priority_when_disabled":true,"enable_strict_thinking":true,"reasoning_parser":"qwen3"}`,
	}, Info{Type: SGLang, KVTokens: 1, BlockSize: 64, Priority: true, LowFirst: true, PriorityEviction: true, StrictThinking: true}},
	{"SGLang that refuses priorities", site{
		pathModels: `{"data":[{"id":"m","owned_by":"sglang"}]}`,
		pathServerInfo: `{"page_size":64,"enable_priority_scheduling":false,"schedule_low_priority_values_first":true,"max_total_num_tokens":1,` +
			`"radix_eviction_policy":"priority","abort_on_priority_when_disabled":true,"enable_strict_thinking":true,"reasoning_parser":null}`,
	}, Info{Type: SGLang, KVTokens: 1, BlockSize: 64}},
	{"SGLang for prefill", site{
		pathServerInfo: `{"max_total_num_tokens":1000,"version":"0.5.23","disaggregation_mode":"prefill","disaggregation_bootstrap_port":8990}`,
	}, Info{Type: SGLang, Version: "0.5.23", KVTokens: 1000, Role: RolePrefill, TransferPort: 8990}},
	{"Dynamo that reports its version", site{
		pathModels:  `{"object":"list","data":[]}`,
		pathMetrics: "\ndynamo_frontend_inflight_requests 0\n",
		"/health":   `{"status":"healthy","endpoints":[],"instances":[],"version":"1.2.1"}`,
	}, Info{Type: Dynamo, Version: "1.2.1"}},
	{"SGLang that is older, and lists no owner", site{
		pathModels:         `{"data":[{"id":"m","owned_by":"us"}]}`,
		"/get_server_info": `{"page_size":1,"dp_size":1,"context_length":4096,"max_running_requests":7,"max_total_num_tokens":1000,"disable_radix_cache":true,"version":"0.4.6"}`,
	}, Info{Type: SGLang, Version: "0.4.6", KVTokens: 1000, BlockSize: 1, DPSize: 1, ContextTokens: 4096, MaxRunning: 7, NoPrefixCache: true, NoSessions: true}},
	{"SGLang that reports the limit of all ranks only", site{
		pathModels:     `{"data":[{"id":"m","owned_by":"sglang"}]}`,
		pathServerInfo: `{"page_size":64,"dp_size":4,"max_running_requests":512,"max_total_num_tokens":1}`,
	}, Info{Type: SGLang, KVTokens: 1, BlockSize: 64, DPSize: 4, MaxRunning: 128}},
	{"TensorRT-LLM", site{
		pathModels:  `{"object":"list","data":[{"id":"m","object":"model","owned_by":"tensorrt_llm"}]}`,
		pathVersion: `{"version":"1.4.0rc2"}`, pathServerInfo: `{"disaggregated_params":null}`, pathMetrics: "taken away",
	}, Info{Type: TRTLLM, Version: "1.4.0rc2"}},
	{"TensorRT-LLM by another owner", site{
		pathModels:  `{"data":[]}`,
		pathVersion: `{"version":"1.0"}`, pathServerInfo: `{"disaggregated_params":{}}`, pathMetrics: "taken away",
	}, Info{Type: TRTLLM, Version: "1.0"}},
	{"llama.cpp", site{
		pathModels: `{"models":[],"object":"list","data":[{"id":"m","object":"model","owned_by":"llamacpp"}]}`,
		"/props":   `{"default_generation_settings":{"id":0,"n_ctx":16384},"total_slots":4,"build_info":"b6000-abc"}`,
	}, Info{Type: LlamaCpp, Version: "b6000-abc", KVTokens: 4 * 16384, ContextTokens: 16384, MaxRunning: 4}},
	{"Dynamo", site{
		pathModels:  `{"object":"list","data":[{"id":"m","object":"object","owned_by":"nvidia"}]}`,
		pathMetrics: "# TYPE dynamo_frontend_inflight_requests gauge\ndynamo_frontend_inflight_requests{model=\"m\"} 0\n",
	}, Info{Type: Dynamo}},
	{"something else", site{pathModels: `{"data":[{"id":"m","owned_by":"me"}]}`, "/health": `{"status":"ok"}`, pathVersion: `{"version":"3"}`}, Info{Type: Other}},
	{"nothing", site{}, Info{}},
	{"down", site{"*": "down"}, Info{}},
	{"something else that falls silent", site{"*": "silent", pathModels: `{"data":[{"id":"m","owned_by":"openai"}]}`}, Info{Type: Other, Unsure: true}},
	{"vLLM that falls silent", site{"*": "silent", pathModels: `{"data":[{"id":"m","owned_by":"vllm"}]}`}, Info{Type: VLLM}},
}

func TestAskFindsOut(t *testing.T) {
	for _, c := range sites {
		t.Run(c.name, func(t *testing.T) {
			var asked []string
			got := Ask(c.site.get(&asked))
			if got != c.want {
				t.Errorf("got %+v\nwant %+v", got, c.want)
			}
			if slices.Sort(asked); len(slices.Compact(asked)) != len(asked) {
				t.Errorf("asked twice: %v", asked)
			}
			if c.want.Type == TRTLLM && slices.Contains(asked, pathMetrics) {
				t.Errorf("its statistics were taken away: %v", asked)
			}
			if c.want.Type != Dynamo && slices.Contains(asked, "/health") {
				t.Errorf("asked for its health, which may cost requests: %v", asked)
			}
			if c.site["*"] == "down" && len(asked) > 1 {
				t.Errorf("asked %v of a server that is down", asked)
			}
			for _, kind := range Names {
				asked = nil
				again := AskAs(kind, c.site.get(&asked))
				switch silent := c.site["*"] != ""; {
				case silent && again != Info{}, again.Type != c.want.Type && again.Type != "":
					t.Errorf("asked as %s it reports %+v", kind, again)
				case kind == c.want.Type && kind != Other && !silent && again != c.want:
					t.Errorf("asked as %s it reports %+v\nwant %+v", kind, again, c.want)
				case c.want.Type == TRTLLM && kind != VLLM && slices.Contains(asked, pathMetrics):
					t.Errorf("asked as %s: its statistics were taken away", kind)
				}
			}
		})
	}
}

// TestTakesRankIn checks in which APIs an engine takes the rank, and that it then gets it.
func TestTakesRankIn(t *testing.T) {
	all := []string{
		api.NameChat, api.NameCompletions, api.NameResponses, api.NameMessages, api.NameGenerate, api.NameTokens, api.NameEmbeddings,
		api.NameRerank, api.NameScore, api.NameClassify, api.NamePooling, Invocations, "",
	}
	chosen := []string{api.NameResponses, api.NameEmbeddings, api.NameRerank, api.NameScore, api.NameClassify, api.NamePooling}
	for _, c := range []struct {
		kind, version string
		ignored       []string
	}{
		{VLLM, "0.8.5", all},
		{VLLM, "0.10.2.dev3+gabc", all},
		{VLLM, "0.11.0", append([]string{api.NameTokens}, chosen...)},
		{VLLM, "0.31.1.dev7+gabc", append([]string{api.NameTokens}, chosen...)},
		{VLLM, "0.32.0", chosen},
		{VLLM, "1.0", chosen},
		{VLLM, "", chosen},
		{VLLM, "dev", chosen},
		{SGLang, "0.5.10", nil},
		{SGLang, "", nil},
		{TRTLLM, "1.4.0", all},
		{LlamaCpp, "b6000", all},
		{Dynamo, "", all},
		{Other, "", nil},
	} {
		e := Engine{Type: c.kind, Info: Info{Version: c.version}}
		for _, name := range all {
			want := !slices.Contains(c.ignored, name)
			if got := e.TakesRankIn(name); got != want {
				t.Errorf("%s %s, %q: %v, want %v", c.kind, c.version, name, got, want)
			}
			sent := e.Adapt(&Request{API: name, Ext: &nvext.Ext{Tenant: "t"}, Rank: 1, Ranks: 2}) // the body was not read
			if got := slices.Contains(sent.Headers, Header{Name: HeaderRank, Value: "1"}); got != want {
				t.Errorf("%s %s, %q: has the header: %v, want %v", c.kind, c.version, name, got, want)
			}
			if c.kind != Dynamo && !slices.Equal(slices.Collect(sent.Unsupported.Names), []string{"cache_salt"}) {
				t.Errorf("%s, %q: cannot use %b", c.kind, name, sent.Unsupported)
			}
		}
	}
}

// TestFailingServerReportsNothing has a server of a known type answer with errors. What it
// reported before stays.
func TestFailingServerReportsNothing(t *testing.T) {
	for path, want := range map[string]string{pathVersion: "", pathMetrics: "", "/other": VLLM} {
		got := AskAs(VLLM, func(asked string) (int, []byte) {
			if asked == path {
				return 503, nil
			}
			return 200, []byte(`{"data":[{"id":"m","owned_by":"vllm"}]}`)
		})
		if got.Type != want {
			t.Errorf("%s fails: the server shows to be %q, want %q", path, got.Type, want)
		}
	}
}

// checkInfo fails for values that are out of bounds.
func checkInfo(t *testing.T, info Info) {
	t.Helper()
	switch {
	case info.Type != "" && !Known(info.Type), len(info.Version) > maxVersion, len(info.BootID) > maxVersion,
		info.KVTokens < 0 || info.KVTokens > maxCount*maxBlockSize, info.BlockSize < 0 || info.BlockSize > maxBlockSize,
		info.DPSize < 0 || info.DPSize > maxRanks, info.ContextTokens < 0 || info.ContextTokens > maxCount,
		info.MaxRunning < 0 || info.MaxRunning > maxCount:
		t.Errorf("info %+v", info)
	}
}

// FuzzAsk has a server that gives one answer at all paths.
func FuzzAsk(f *testing.F) {
	for _, c := range sites {
		for _, body := range c.site {
			f.Add([]byte(body), uint8(0))
		}
	}
	const vllm = 4 // of Names
	f.Add([]byte(vllmPage), uint8(vllm))
	f.Add([]byte("vllm:cache_config_info{engine=\"\\\",block_size=\"} 1\nprocess_start_time_seconds NaN\n"), uint8(vllm))
	f.Add([]byte("process_start_time_seconds{ 1e300"), uint8(vllm))
	f.Add([]byte(`{"page_size":1e400,"dp_size":-1,"version":{"version":"\u0000"},"max_total_num_tokens":"9"}`), uint8(1))
	f.Fuzz(func(t *testing.T, body []byte, as uint8) {
		get := func(string) (int, []byte) { return 200, body }
		checkInfo(t, Ask(get))
		checkInfo(t, AskAs(Names[int(as)%len(Names)], get))
	})
}
