package engine

import (
	"bytes"
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

// loadPage is a page on which engines of a type report their load. read returns the ranks whose
// load is complete on it, each once.
type loadPage struct {
	path string
	read func(page []byte) []RankLoad
}

// The pages of each type, the newest first. SGLang's /get_load is that of versions before 2026.
var (
	vllmLoads = []loadPage{{pathMetrics, func(page []byte) []RankLoad {
		return scanLoads(page, "vllm:num_requests_running", "vllm:num_requests_waiting")
	}}}
	sglangLoads   = []loadPage{{"/v1/loads?include=core", readLoads}, {"/get_load", readOldLoads}}
	llamaCppLoads = []loadPage{{pathMetrics, func(page []byte) []RankLoad { // with --metrics
		return scanLoads(page, "llamacpp:requests_processing", "llamacpp:requests_deferred")
	}}}
)

// ReportsLoad returns whether engines of a type report their load.
func ReportsLoad(name string) bool { return len(kindOf(name).loads) > 0 }

// Loads asks an engine of a type for its load. first is the number of the page to begin with: 0,
// or what the last call returned. A rank that is missing in the result has an unknown load.
func Loads(name string, first int, get Get) (list []RankLoad, page int) {
	pages := kindOf(name).loads
	for i := range pages {
		n := (first + i) % len(pages)
		switch status, answer := get(pages[n].path); status {
		case http.StatusOK:
			return pages[n].read(answer), n
		case http.StatusNotFound, http.StatusMethodNotAllowed: // another version
		default:
			return nil, first
		}
	}
	return nil, first
}

// rankLoads collects the load by rank.
type rankLoads struct {
	ranks map[int]*RankLoad
}

// of returns the load of a rank, nil if the rank is not credible. Numbers begin as unknown.
func (r *rankLoads) of(rank int) *RankLoad {
	if rank < 0 || rank >= maxRanks {
		return nil
	}
	if r.ranks == nil {
		r.ranks = make(map[int]*RankLoad)
	}
	if r.ranks[rank] == nil {
		r.ranks[rank] = &RankLoad{rank, kvscore.EngineLoad{Running: -1, Waiting: -1, WaitingTokens: -1}}
	}
	return r.ranks[rank]
}

// complete returns the ranks whose running and waiting requests are known.
func (r *rankLoads) complete() []RankLoad {
	list := make([]RankLoad, 0, len(r.ranks))
	for _, l := range r.ranks {
		if l.Running >= 0 && l.Waiting >= 0 {
			list = append(list, *l)
		}
	}
	return list
}

// scanLoads reads two gauges of a page of metrics. vLLM names the rank in the label engine;
// servers with one rank may omit it.
func scanLoads(page []byte, running, waiting string) []RankLoad {
	var found rankLoads
	for line := range bytes.Lines(page) { // a page has thousands of other lines
		if of, n, ok := sample(line, running); ok && found.of(of) != nil {
			found.of(of).Running = n
		} else if of, n, ok := sample(line, waiting); ok && found.of(of) != nil {
			found.of(of).Waiting = n
		}
	}
	return found.complete()
}

// sample reads a line of a page of metrics: a gauge's rank and value. It returns false for
// another metric, and for a value that is no count.
func sample(line []byte, name string) (rank, n int, ok bool) {
	if len(line) <= len(name) || string(line[:len(name)]) != name {
		return 0, 0, false
	}
	rest := line[len(name):]
	if end := bytes.LastIndexByte(rest, '}'); rest[0] == '{' && end > 0 {
		if rank, ok = rankIn(rest[:end]); !ok {
			return 0, 0, false
		}
		rest = rest[end+1:]
	} else if rest[0] != ' ' {
		return 0, 0, false
	}
	value, _, _ := bytes.Cut(bytes.TrimSpace(rest), []byte{' '}) // a time may follow
	v, err := strconv.ParseFloat(string(value), 64)
	if err != nil || !(v >= 0 && v <= maxCount) {
		return 0, 0, false
	}
	return rank, int(v), true
}

// rankIn returns the rank in the labels of a sample, 0 if they name none. Quotes inside values are
// escaped, so that no value looks like the label.
func rankIn(labels []byte) (rank int, ok bool) {
	for _, name := range [...]string{`{engine="`, `,engine="`} {
		if _, value, found := bytes.Cut(labels, []byte(name)); found {
			value, _, _ = bytes.Cut(value, []byte{'"'})
			rank, err := strconv.Atoi(string(value))
			return rank, err == nil
		}
	}
	return 0, true
}

// readLoads reads {"loads": [{"dp_rank": 0, "num_running_reqs": 3, ...}, ...]}
// (python/sglang/srt/entrypoints/v1_loads.py).
func readLoads(page []byte) []RankLoad {
	return eachLoad(page, "loads", func(one gjson.Result, l *RankLoad) {
		l.Running, l.Waiting = whole(one.Get("num_running_reqs")), whole(one.Get("num_waiting_reqs"))
		l.WaitingTokens = int64(whole(one.Get("num_waiting_uncached_tokens")))
	})
}

// readOldLoads reads [{"dp_rank": 0, "num_reqs": 4, "num_waiting_reqs": 1}, ...]. num_reqs includes
// the waiting ones.
func readOldLoads(page []byte) []RankLoad {
	return eachLoad(page, "@this", func(one gjson.Result, l *RankLoad) {
		l.Waiting = whole(one.Get("num_waiting_reqs"))
		if all := whole(one.Get("num_reqs")); all >= l.Waiting {
			l.Running = all - max(0, l.Waiting)
		}
	})
}

// eachLoad reads a list with an entry for each rank.
func eachLoad(page []byte, path string, read func(one gjson.Result, l *RankLoad)) []RankLoad {
	if !gjson.ValidBytes(page) {
		return nil
	}
	var found rankLoads
	left := maxRanks
	gjson.GetBytes(page, path).ForEach(func(_, one gjson.Result) bool {
		if rank := whole(one.Get("dp_rank")); rank >= 0 && one.IsObject() {
			if l := found.of(rank); l != nil {
				read(one, l)
			}
		}
		left--
		return left > 0
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
