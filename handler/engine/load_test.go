package engine

import (
	"cmp"
	"slices"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// loadsOf reads a page of a server. It returns the load by rank.
func loadsOf(name, path, page string) []RankLoad {
	list := Loads(name, func(asked string) (int, []byte) {
		if asked != path {
			return 404, []byte("Not Found")
		}
		return 200, []byte(page)
	})
	slices.SortFunc(list, func(a, b RankLoad) int { return cmp.Compare(a.Rank, b.Rank) })
	return list
}

func rank(n, running, waiting int, tokens int64) RankLoad {
	return RankLoad{n, kvscore.EngineLoad{Running: running, Waiting: waiting, WaitingTokens: tokens}}
}

const vllmLoadPage = `# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
`

func TestLoadsAreReadByRank(t *testing.T) {
	const metrics, loads = "/metrics", "/v1/loads?include=core"
	gauges := func(running, waiting string) string {
		return "vllm:num_requests_running" + running + "\nvllm:num_requests_waiting" + waiting + "\n"
	}
	for _, tc := range []struct {
		name, kind, path, page string
		want                   []RankLoad
	}{
		{"vLLM", VLLM, metrics, vllmLoadPage, []RankLoad{rank(0, 3, 2, -1), rank(1, 0, 0, -1)}},
		{"vLLM, cut", VLLM, metrics, vllmLoadPage[:strings.LastIndex(vllmLoadPage, `vllm:num_requests_waiting{engine="1"`)], []RankLoad{rank(0, 3, 2, -1)}},
		{"vLLM without ranks", VLLM, metrics, gauges(" 4", `{model_name="m"} 1e1 1700000000000`), []RankLoad{rank(0, 4, 10, -1)}},
		{"a name like the label", VLLM, metrics, gauges(`{my_engine="7",model_name="a}b",engine="2"} 1`, `{model_name="x,engine=\"5\"",engine="2"} 1`), []RankLoad{rank(2, 1, 1, -1)}},
		{"no counts", VLLM, metrics, gauges(`{engine="0"} NaN`, `{engine="0"} 1`) + gauges(`{engine="1"} 1`, `{engine="1"} -1`) + gauges(`{engine="2"} 1e300`, `{engine="2"}`), nil},
		{"no ranks", VLLM, metrics, gauges(`{engine="-1"} 1`, `{engine="-1"} 1`) + gauges(`{engine="x"} 1`, `{engine="x"} 1`) + gauges(`{engine="1024"} 1`, `{engine="1024"} 1`), nil},
		{"not a vLLM", VLLM, metrics, "up 1\n", nil},
		{"SGLang", SGLang, loads, `{"timestamp":"t","loads":[{"dp_rank":1,"num_running_reqs":24,"num_waiting_reqs":3,"num_waiting_uncached_tokens":6144},` +
			`{"dp_rank":0,"num_running_reqs":0,"num_waiting_reqs":0}]}`, []RankLoad{rank(0, 0, 0, -1), rank(1, 24, 3, 6144)}},
		{"SGLang, in part", SGLang, loads, `{"loads":[{"dp_rank":0,"num_running_reqs":1},{"num_running_reqs":1,"num_waiting_reqs":0},{"dp_rank":-1},7,` +
			`{"dp_rank":1,"num_running_reqs":"2","num_waiting_reqs":0},{"dp_rank":9000,"num_running_reqs":1,"num_waiting_reqs":0}]}`, nil},
		{"SGLang, at its start", SGLang, loads, `{"loads":[]}`, nil},
		{"SGLang, cut", SGLang, loads, `{"loads":[{"dp_rank":0,"num_running_reqs":1,"num_waiting_reqs":0}`, nil},
		{"llama.cpp", LlamaCpp, metrics, "llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n", []RankLoad{rank(0, 2, 1, -1)}},
	} {
		if got := loadsOf(tc.kind, tc.path, tc.page); !slices.Equal(got, tc.want) {
			t.Errorf("%s: read %+v, want %+v", tc.name, got, tc.want)
		}
	}
	for _, kind := range Names {
		if got, want := ReportsLoad(kind), kind == VLLM || kind == SGLang || kind == LlamaCpp; got != want {
			t.Errorf("ReportsLoad(%s) is %v", kind, got)
		}
	}
}

// FuzzLoads reads any page as each type does.
func FuzzLoads(f *testing.F) {
	for _, page := range []string{
		vllmLoadPage, "llamacpp:requests_processing 2\nllamacpp:requests_deferred 1", "vllm:num_requests_running{", `vllm:num_requests_waiting{engine="`,
		"vllm:num_requests_running{} \nvllm:num_requests_waiting }{ 1", `{"loads":[{"dp_rank":0,"num_running_reqs":1,"num_waiting_reqs":0,"num_waiting_uncached_tokens":-4}]}`,
		`{"loads":{"0":{"dp_rank":0,"num_running_reqs":1e99}}}`, `[[]]`, "",
	} {
		f.Add([]byte(page))
	}
	f.Fuzz(func(t *testing.T, page []byte) {
		for _, kind := range Names {
			seen := make(map[int]bool)
			for _, l := range Loads(kind, func(string) (int, []byte) { return 200, page }) {
				if l.Rank < 0 || l.Rank >= maxRanks || seen[l.Rank] || l.Running < 0 || l.Running > maxCount ||
					l.Waiting < 0 || l.Waiting > maxCount || l.WaitingTokens < -1 || l.WaitingTokens > maxCount {
					t.Fatalf("%s reads %+v", kind, l)
				}
				seen[l.Rank] = true
			}
		}
	})
}
