package engine

import (
	"bytes"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// page is a page of metrics in Prometheus' text format.
type page struct {
	bytes.Buffer
	model string
	ranks []rankPage
}

type rankPage struct {
	RankState
	stats
}

// metrics answers with vLLM's metrics. Durations are virtual; the time of the
// start is real.
func (x *exchange) metrics() {
	p := &page{model: x.engine.cfg.Model}
	for _, k := range x.life.ranks {
		st, s := k.snapshot()
		p.ranks = append(p.ranks, rankPage{st, s})
	}
	p.process(x.life.started)
	p.load()
	p.tokens()
	p.requests()
	p.config(&x.engine.cfg)
	x.header(http.StatusOK, "text/plain; version=0.0.4; charset=utf-8")
	x.w.Write(p.Bytes()) //nolint:errcheck // the client may leave
}

func (p *page) family(name, kind, help string) {
	fmt.Fprintf(p, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind)
}

func (p *page) sample(name, labels string, v float64) {
	fmt.Fprintf(p, "%s{%s} %s\n", name, labels, strconv.FormatFloat(v, 'g', -1, 64))
}

// labels returns those of a rank, and more: pairs of name and value.
func (p *page) labels(rank int, more ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, `engine="%d",model_name=%q`, rank, p.model)
	for i := 0; i+1 < len(more); i += 2 {
		fmt.Fprintf(&b, `,%s=%q`, more[i], more[i+1])
	}
	return b.String()
}

// each writes a family with one sample for each rank.
func (p *page) each(name, kind, help string, value func(rankPage) float64) {
	p.family(name, kind, help)
	for i, r := range p.ranks {
		p.sample(name, p.labels(i), value(r))
	}
}

func (p *page) process(started time.Time) {
	p.family("process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds.")
	fmt.Fprintf(p, "process_start_time_seconds %.3f\n", float64(started.UnixMilli())/1000)
}

func (p *page) load() {
	p.each("vllm:num_requests_running", "gauge", "Requests in the running batch.",
		func(r rankPage) float64 { return float64(r.Running) })
	p.each("vllm:num_requests_waiting", "gauge", "Requests in the queue.",
		func(r rankPage) float64 { return float64(r.Waiting) })
	p.family("vllm:num_requests_waiting_by_reason", "gauge", "Requests in the queue by reason.")
	for i, r := range p.ranks {
		p.sample("vllm:num_requests_waiting_by_reason", p.labels(i, "reason", "capacity"), float64(r.Waiting))
		p.sample("vllm:num_requests_waiting_by_reason", p.labels(i, "reason", "deferred"), 0)
	}
	p.each("vllm:kv_cache_usage_perc", "gauge", "Share of the KV blocks that requests hold, 1 is all.", func(r rankPage) float64 {
		return float64(r.UsedBlocks) / float64(r.EmptyBlocks+r.UsedBlocks+r.CachedBlocks)
	})
}

func (p *page) tokens() {
	p.each("vllm:prefix_cache_queries_total", "counter", "Prompt tokens asked for in the prefix cache.",
		func(r rankPage) float64 { return float64(r.queries) })
	p.each("vllm:prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.",
		func(r rankPage) float64 { return float64(r.hits) })
	p.each("vllm:prompt_tokens_total", "counter", "Prompt tokens of admitted requests.",
		func(r rankPage) float64 { return float64(r.queries) })
	p.each("vllm:generation_tokens_total", "counter", "Generated tokens.",
		func(r rankPage) float64 { return float64(r.generated) })
}

func (p *page) requests() {
	p.each("vllm:num_preemptions_total", "counter", "Preempted requests.", func(rankPage) float64 { return 0 })
	p.family("vllm:request_success_total", "counter", "Requests that ended with a complete answer.")
	for i, r := range p.ranks {
		for _, by := range []struct {
			reason string
			n      int
		}{
			{"stop", r.stopped},
			{"length", r.cutShort},
			{"abort", 0}, // vLLM does not count clients that leave
			{"error", 0},
		} {
			p.sample("vllm:request_success_total", p.labels(i, "finished_reason", by.reason), float64(by.n))
		}
	}
}

func (p *page) config(c *Config) {
	p.family("vllm:cache_config_info", "gauge", "Information of the cache configuration.")
	for i := range p.ranks {
		p.sample("vllm:cache_config_info", p.labels(i,
			"block_size", strconv.Itoa(c.BlockSize), "num_gpu_blocks", strconv.Itoa(c.Blocks*max(1, c.Ranks)), // vLLM adds up all ranks
			"kv_cache_size_tokens", strconv.Itoa(c.Blocks*c.BlockSize),
			"enable_prefix_caching", "True", "prefix_caching_hash_algo", "xxh3"), 1)
	}
}
