package engine

import (
	"cmp"
	"net/http"
	"strconv"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/tidwall/gjson"
)

// RankLoad is what an engine reports of the load of one data-parallel rank.
type RankLoad struct {
	Rank int
	kvscore.EngineLoad
}

// loadPage is the page on which engines of a type report their load. read returns the ranks
// whose load is complete on it, each once.
type loadPage struct {
	path string
	read func(page []byte) []RankLoad
}

// The page of each type. llama.cpp has it with --metrics, SGLang since 2026.
var (
	vllmLoads = &loadPage{pathMetrics, func(page []byte) []RankLoad {
		return readGauges(page, "vllm:num_requests_running", "vllm:num_requests_waiting")
	}}
	sglangLoads   = &loadPage{"/v1/loads?include=core", readLoads}
	llamaCppLoads = &loadPage{pathMetrics, func(page []byte) []RankLoad {
		return readGauges(page, "llamacpp:requests_processing", "llamacpp:requests_deferred")
	}}
)

// ReportsLoad returns whether engines of a type report their load.
func ReportsLoad(name string) bool { return kindOf(name).loads != nil }

// Loads asks an engine of a type for its load. A rank that is missing in the result has an
// unknown load.
func Loads(name string, get Get) []RankLoad {
	page := kindOf(name).loads
	if page == nil {
		return nil
	}
	status, answer := get(page.path)
	if status != http.StatusOK {
		return nil
	}
	return page.read(answer)
}

// rankLoads collects the load by rank.
type rankLoads map[int]*RankLoad

// of returns the load of a rank, nil if the rank is not credible. Numbers begin as unknown.
func (r rankLoads) of(rank int) *RankLoad {
	if rank < 0 || rank >= maxRanks {
		return nil
	}
	if r[rank] == nil {
		r[rank] = &RankLoad{rank, kvscore.EngineLoad{Running: -1, Waiting: -1, WaitingTokens: -1}}
	}
	return r[rank]
}

// complete returns the ranks whose running and waiting requests are known.
func (r rankLoads) complete() []RankLoad {
	list := make([]RankLoad, 0, len(r))
	for _, l := range r {
		if l.Running >= 0 && l.Waiting >= 0 {
			list = append(list, *l)
		}
	}
	return list
}

// readGauges reads two gauges of a page of metrics. vLLM names the rank in the label engine;
// servers with one rank may omit it.
func readGauges(page []byte, running, waiting string) []RankLoad {
	found := make(rankLoads)
	for _, s := range samplesOf(page, running, waiting) {
		rank, err := strconv.Atoi(cmp.Or(s.labels["engine"], "0"))
		l := found.of(rank)
		switch {
		case err != nil || l == nil || !(s.value >= 0 && s.value <= maxCount):
		case s.name == running:
			l.Running = int(s.value)
		default:
			l.Waiting = int(s.value)
		}
	}
	return found.complete()
}

// readLoads reads {"loads": [{"dp_rank": 0, "num_running_reqs": 3, ...}, ...]}
// (python/sglang/srt/entrypoints/v1_loads.py).
func readLoads(page []byte) []RankLoad {
	if !gjson.ValidBytes(page) {
		return nil
	}
	found := make(rankLoads)
	gjson.GetBytes(page, "loads").ForEach(func(_, one gjson.Result) bool {
		if l := found.of(whole(one.Get("dp_rank"))); l != nil {
			l.Running, l.Waiting = whole(one.Get("num_running_reqs")), whole(one.Get("num_waiting_reqs"))
			l.WaitingTokens = int64(whole(one.Get("num_waiting_uncached_tokens")))
		}
		return true
	})
	return found.complete()
}

// whole returns a count, which may be 0; -1 for anything else.
func whole(r gjson.Result) int {
	if r.Type != gjson.Number || !(r.Num >= 0 && r.Num <= maxCount) {
		return -1
	}
	return int(r.Num)
}
