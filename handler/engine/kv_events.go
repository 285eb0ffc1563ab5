package engine

import (
	"strconv"
	"strings"

	"github.com/tidwall/gjson"
)

// KVEvents says where an engine publishes its KV events. The zero value says nowhere.
type KVEvents struct {
	// Endpoint is the publisher of the first data-parallel rank, as the engine names it:
	// tcp://host:port or ipc://path. Replay is that of its replays; empty if it has none.
	Endpoint, Replay string
	Topic            string
	// Publishers is the number of ranks that publish, each at the port after the one before.
	Publishers int
	// Listens says that the publisher listens at any Endpoint: see [Binds].
	Listens bool
}

// Binds returns whether the publisher listens at an endpoint. vLLM connects to all other
// addresses (vllm/distributed/kv_events.py).
func Binds(endpoint string) bool {
	return strings.Contains(endpoint, "*") || strings.Contains(endpoint, "::") || strings.HasPrefix(endpoint, "ipc://") ||
		strings.HasPrefix(endpoint, "tcp://0.0.0.0:") // what vLLM reports of a bound port
}

// maxEndpoint is the longest endpoint and topic that is kept, in bytes.
const maxEndpoint = 256

func endpointIn(r gjson.Result) string {
	if r.Type != gjson.String || len(r.Str) > maxEndpoint {
		return ""
	}
	return r.Str
}

const maxPort = 1<<16 - 1

// PortAfter returns a tcp endpoint with a higher port. It returns other endpoints unchanged
// for n = 0, and "" for other n.
func PortAfter(endpoint string, n int) string {
	if n == 0 {
		return endpoint
	}
	i := strings.LastIndexByte(endpoint, ':')
	if !strings.HasPrefix(endpoint, "tcp://") || i < 0 {
		return ""
	}
	port, err := strconv.Atoi(endpoint[i+1:])
	if err != nil || port+n < 1 || port+n > maxPort {
		return ""
	}
	return endpoint[:i+1] + strconv.Itoa(port+n)
}

// HitsInFlight returns whether the engine reuses blocks of a prefill that is still under way.
func (e *Engine) HitsInFlight() bool { return !kindOf(e.Type).hitsLate }

// HeaderSession is the header that names a request's session.
const HeaderSession = "X-Session-Id"

// NamesSessions returns whether the engine's KV events name the session of a request if the engine is
// new enough. Older ones ignore it.
func (e *Engine) NamesSessions() bool { return kindOf(e.Type).namesSessions }

// NamesAll returns whether the engine's KV events name the adapter and the salt of a prompt in
// all versions that publish events.
func (e *Engine) NamesAll() bool { return kindOf(e.Type).namesAll }
