package worker

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
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

// The sources of events that are no places.
const (
	EventsAuto = "auto"
	EventsOff  = "off"
)

// Check returns what is wrong with the settings. all says that they are those of all workers.
func (k *KVEventsSettings) Check(all bool) error {
	if k == nil {
		return nil
	}
	source := cmp.Or(k.Source, EventsAuto)
	fixed := isEndpoint(source)
	switch {
	case source != EventsAuto && source != EventsOff && !fixed && PortOf(source) == 0:
		return fmt.Errorf("kv_events: must be auto, off, a port, or an endpoint such as tcp://host:5557, got %q", k.Source)
	case k.Replay != "" && !isEndpoint(k.Replay) && PortOf(k.Replay) == 0:
		return fmt.Errorf("kv_events replay: must be a port, or an endpoint such as tcp://host:5558, got %q", k.Replay)
	case all && (fixed || isEndpoint(k.Replay)):
		return fmt.Errorf("kv_events: workers cannot share an endpoint, so worker %s cannot have one, got %q", AllWorkers, cmp.Or(k.Replay, source))
	case source == EventsOff && (k.Replay != "" || k.Topic != ""):
		return errors.New("kv_events: off has no replay and no topic")
	}
	return nil
}

// isEndpoint returns whether a text is an endpoint to connect to.
func isEndpoint(s string) bool {
	if path, is := strings.CutPrefix(s, "ipc://"); is {
		return path != ""
	}
	addr, is := strings.CutPrefix(s, "tcp://")
	host, port, err := net.SplitHostPort(addr)
	return is && err == nil && host != "" && host != "*" && PortOf(port) > 0
}

// PortOf returns the number of a port, 0 for another text.
func PortOf(s string) int {
	port, err := strconv.Atoi(s)
	if err != nil || port < 1 || port > 1<<16-1 {
		return 0
	}
	return port
}
