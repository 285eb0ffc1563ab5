package engine

import (
	"bytes"
	"fmt"
	"net/http"
)

// metrics answers with a part of vLLM's metrics, in Prometheus' text format. The time of
// the start is real.
func (x *exchange) metrics() {
	var page bytes.Buffer
	c := &x.engine.cfg
	family := func(name, help string) { fmt.Fprintf(&page, "# HELP %s %s\n# TYPE %[1]s gauge\n", name, help) }
	each := func(name, help string, value func(k *rank) int) {
		family(name, help)
		for i, k := range x.life.ranks {
			fmt.Fprintf(&page, "%s{engine=\"%d\",model_name=%q} %d\n", name, i, c.Model, value(k))
		}
	}
	family("process_start_time_seconds", "Start time of the process since unix epoch in seconds.")
	fmt.Fprintf(&page, "process_start_time_seconds %.3f\n", float64(x.life.started.UnixMilli())/1000)
	each("vllm:num_requests_running", "Requests in the running batch.", func(k *rank) int {
		running, _, _ := k.load()
		return running
	})
	each("vllm:num_requests_waiting", "Requests in the queue.", func(k *rank) int {
		_, waiting, _ := k.load()
		return waiting
	})
	family("vllm:engine_sleep_state", "Engine sleep state.")
	for level, state := range []string{"awake", "weights_offloaded", "discard_all"} {
		is := 0
		if x.life.asleep.Load() == int64(level) {
			is = 1
		}
		fmt.Fprintf(&page, "vllm:engine_sleep_state{engine=\"0\",model_name=%q,sleep_state=%q} %d\n", c.Model, state, is)
	}
	family("vllm:cache_config_info", "Information of the cache configuration.")
	for i := range x.life.ranks {
		fmt.Fprintf(&page, "vllm:cache_config_info{engine=\"%d\",model_name=%q,block_size=\"%d\",num_gpu_blocks=\"%d\","+ // vLLM adds up all ranks
			"kv_cache_size_tokens=\"%d\",enable_prefix_caching=\"True\",prefix_caching_hash_algo=\"xxh3\"} 1\n",
			i, c.Model, c.BlockSize, c.Blocks*max(1, c.Ranks), c.Blocks*c.BlockSize)
	}
	x.header(http.StatusOK, "text/plain; version=0.0.4; charset=utf-8")
	x.w.Write(page.Bytes()) //nolint:errcheck // the client may leave
}
