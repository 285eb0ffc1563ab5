package pool

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/kvscore/events/zmtp"
)

// KVEventsSettings say where a worker publishes the events of its KV cache. From them the
// router knows what the cache holds. Without them it knows only what it has sent there.
type KVEventsSettings struct {
	// Where the worker publishes: `auto`, `off`, a port, or an endpoint such as
	// `tcp://10.0.0.5:5557` or `ipc:///run/vllm/events`. `auto` is what the engine reports: vLLM
	// 0.32 and later do, and SGLang. A port is one of the worker's host.
	// Each further data-parallel rank publishes at the next port. Default: `auto`.
	Source string `json:"source,omitempty"`

	// Where the worker answers requests for earlier events: a port or an endpoint, as above.
	// The router asks after its start and after lost events. Default: what the engine
	// reports with `auto`, else nowhere.
	Replay string `json:"replay,omitempty"`

	// The beginning of the topics to subscribe to. Default: all topics.
	Topic string `json:"topic,omitempty"`
}

const (
	sourceAuto = "auto"
	sourceOff  = "off"
)

// check returns what is wrong with the settings. all says that they are those of all workers.
func (k *KVEventsSettings) check(all bool) error {
	if k == nil {
		return nil
	}
	source := cmp.Or(k.Source, sourceAuto)
	fixed := isEndpoint(source)
	switch {
	case source != sourceAuto && source != sourceOff && !fixed && portOf(source) == 0:
		return fmt.Errorf("kv_events: must be auto, off, a port, or an endpoint such as tcp://host:5557, got %q", k.Source)
	case k.Replay != "" && !isEndpoint(k.Replay) && portOf(k.Replay) == 0:
		return fmt.Errorf("kv_events replay: must be a port, or an endpoint such as tcp://host:5558, got %q", k.Replay)
	case all && (fixed || isEndpoint(k.Replay)):
		return fmt.Errorf("kv_events: workers cannot share an endpoint, so worker %s cannot have one, got %q", AllWorkers, cmp.Or(k.Replay, source))
	case source == sourceOff && (k.Replay != "" || k.Topic != ""):
		return errors.New("kv_events: off has no replay and no topic")
	}
	return nil
}

// isEndpoint returns whether a text is an endpoint to connect to.
func isEndpoint(s string) bool { return zmtp.CheckEndpoint(s) == nil }

func portOf(s string) int {
	port, err := strconv.Atoi(s)
	if err != nil || port < 1 || port > 1<<16-1 {
		return 0
	}
	return port
}

// publisher is one rank's source of events.
type publisher struct {
	endpoint, replay, topic string
}

// Why a worker has no source of events although it publishes some.
var (
	errDials  = errors.New("the engine connects to its endpoint instead of listening: write the endpoint with *")
	errPath   = errors.New("the engine publishes at a path on its own machine")
	errRanks  = errors.New("the engine has other data-parallel ranks than the router can address")
	errShared = errors.New("another worker has the same endpoint, so one of the two is wrong: set kv_events of both workers")
	errUnread = errors.New("the router cannot read the engine's endpoint")
)

// publishers returns where the ranks of a worker publish, none if nowhere. The error says why
// the router cannot use what the engine reports.
func (w *WorkerSettings) publishers(info engine.Info, ranks int) ([]publisher, error) {
	set := w.KVEvents
	if set == nil {
		set = new(KVEventsSettings)
	}
	host := hostOf(w.Dial)
	first, n := publisher{topic: set.Topic}, ranks
	switch source := cmp.Or(set.Source, sourceAuto); source {
	case sourceOff:
		return nil, nil
	case sourceAuto:
		of := info.KVEvents
		if of.Publishers == 0 {
			return nil, nil
		}
		if !engine.Binds(of.Endpoint) {
			return nil, errDials
		}
		first.endpoint, first.replay = fromHere(of.Endpoint, host), fromHere(of.Replay, host)
		first.topic = cmp.Or(set.Topic, of.Topic)
		if n = of.Publishers; first.endpoint == "" && strings.HasPrefix(of.Endpoint, "ipc://") {
			return nil, errPath
		}
	default:
		first.endpoint = at(source, host)
	}
	if set.Replay != "" {
		first.replay = at(set.Replay, host)
	}
	if first.endpoint == "" {
		return nil, errUnread
	}
	if n != ranks { // as many ranks as publishers, or the batches cannot be told apart
		return nil, errRanks
	}
	list := make([]publisher, 0, n)
	for rank := range n {
		one := first
		one.endpoint, one.replay = engine.PortAfter(first.endpoint, rank), engine.PortAfter(first.replay, rank)
		if one.endpoint == "" {
			return nil, errUnread
		}
		list = append(list, one)
	}
	return list, nil
}

// at returns the endpoint that an option names.
func at(option, host string) string {
	if portOf(option) > 0 {
		return "tcp://" + net.JoinHostPort(host, option)
	}
	return option
}

// fromHere returns the address at which the router reaches an endpoint that an engine has bound;
// empty if it cannot.
func fromHere(endpoint, host string) string {
	if strings.HasPrefix(endpoint, "ipc://") {
		if ip := net.ParseIP(host); host == "localhost" || ip != nil && ip.IsLoopback() {
			return endpoint
		}
		return ""
	}
	i := strings.LastIndexByte(endpoint, ':')
	if !strings.HasPrefix(endpoint, "tcp://") || i < 0 || portOf(endpoint[i+1:]) == 0 {
		return ""
	}
	return "tcp://" + net.JoinHostPort(host, endpoint[i+1:])
}

// hostOf returns the host in a dial address; the loopback for a unix socket.
func hostOf(dial string) string {
	if strings.HasPrefix(dial, "unix") {
		return "127.0.0.1"
	}
	_, addr, found := strings.Cut(dial, "/")
	if !found {
		addr = dial
	}
	host, _, err := net.SplitHostPort(addr)
	if err != nil || host == "" {
		return "127.0.0.1"
	}
	return host
}
