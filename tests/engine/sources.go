package engine

import (
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
)

// Paths at which a vLLM and an SGLang forget what they cached.
const (
	ResetPath = "/reset_prefix_cache"
	FlushPath = "/flush_cache"
)

// AbortPath is where an SGLang ends requests.
const AbortPath = "/abort_request"

// EventEndpoints returns where a rank publishes, and where it answers with past batches; empty
// without. They have the form tcp://host:port.
func (e *Engine) EventEndpoints(rank int) (pub, replay string) {
	c := e.cfg.Events
	if c == nil || rank < 0 || rank >= e.cfg.Ranks {
		return "", ""
	}
	if !c.NoReplay {
		replay = "tcp://" + e.sockets[e.cfg.Ranks+rank]
	}
	return "tcp://" + e.sockets[rank], replay
}

// eventSources answers as a vLLM since 0.32 does.
func (x *exchange) eventSources() {
	c := x.engine.cfg.Events
	if c == nil {
		x.fail404()
		return
	}
	byRank := make(object)
	for i := range x.engine.cfg.Ranks {
		pub, replay := x.engine.EventEndpoints(i)
		source := object{
			"enable_kv_cache_events": true, "publisher": "zmq", "replay_endpoint": nil, "buffer_steps": c.Buffer,
			"hwm": 100000, "max_queue_size": 100000, "topic": c.Topic, "data_parallel_rank": i,
			"endpoint": "tcp://*" + pub[strings.LastIndexByte(pub, ':'):], // vLLM listens only at such addresses
		}
		if replay != "" {
			source["replay_endpoint"] = replay
		}
		byRank[strconv.Itoa(i)] = source
	}
	x.value(byRank)
}

// describeEvents returns what an SGLang tells of its publishers; nil without.
func (e *Engine) describeEvents() map[string]any {
	c := e.cfg.Events
	if c == nil {
		return nil
	}
	pub, _ := e.EventEndpoints(0)
	_, port, _ := net.SplitHostPort(pub[len("tcp://"):])
	base, _ := strconv.Atoi(port)
	return object{
		"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": base, "topic": c.Topic,
		"block_size": e.cfg.BlockSize, "dp_size": e.cfg.Ranks,
	}
}

// resetPrefixCache clears the caches as a vLLM in development mode does.
func (x *exchange) resetPrefixCache() {
	x.value(map[string]bool{"success": x.life.clear()})
}

// flushCache clears the caches as an SGLang does.
func (x *exchange) flushCache() {
	status, message := http.StatusOK, "Cache flushed.\nPlease check backend logs for more details. "+
		"(When there are running or waiting requests, the operation will not be performed.)\n"
	if !x.life.clear() {
		status, message = http.StatusBadRequest, "Flush cache failed.\n"
	}
	x.header(status, "text/plain; charset=utf-8")
	_, _ = io.WriteString(x.w, message)
}

// clear clears the caches of all ranks. It returns false if a request holds blocks of
// one, which is then not cleared.
func (l *life) clear() bool {
	ok := true
	for _, k := range l.ranks {
		ok = k.clear() && ok
	}
	return ok
}

func (k *rank) clear() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.cache.Clear()
}
