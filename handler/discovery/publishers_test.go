package discovery

import (
	"errors"
	"slices"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

func TestPublishersOfAWorker(t *testing.T) {
	two := engine.KVEvents{Endpoint: "tcp://*:5557", Replay: "tcp://*:6557", Topic: "t", Publishers: 2}
	one := two
	one.Publishers = 1
	path, dials := one, one
	listens := engine.KVEvents{Endpoint: "tcp://127.0.0.1:5557", Publishers: 1, Listens: true}
	path.Endpoint, dials.Endpoint = "ipc:///run/x", "tcp://127.0.0.1:5557"
	bound := engine.KVEvents{Endpoint: "tcp://0.0.0.0:39121", Publishers: 1}
	at := func(endpoint, replay, topic string) worker.Publisher {
		return worker.Publisher{Endpoint: endpoint, Replay: replay, Topic: topic}
	}
	for _, c := range []struct {
		name  string
		dial  string
		set   *worker.KVEventsSettings
		of    engine.KVEvents
		ranks int
		want  []worker.Publisher
		why   error
	}{
		{"nothing", "10.0.0.1:8000", nil, engine.KVEvents{}, 1, nil, nil},
		{"reported", "10.0.0.1:8000", nil, one, 1, []worker.Publisher{at("tcp://10.0.0.1:5557", "tcp://10.0.0.1:6557", "t")}, nil},
		{"reported by ranks", "[fd00::1]:8000", nil, two, 2, []worker.Publisher{
			at("tcp://[fd00::1]:5557", "tcp://[fd00::1]:6557", "t"), at("tcp://[fd00::1]:5558", "tcp://[fd00::1]:6558", "t"),
		}, nil},
		{"reported as bound", "gpu:8000", nil, bound, 1, []worker.Publisher{at("tcp://gpu:39121", "", "")}, nil},
		{"of ranks that the engine chooses", "gpu:8000", nil, two, 1, nil, errRanks},
		{"of an engine that connects", "gpu:8000", nil, dials, 1, nil, errDials},
		{"of an engine that listens at one address", "gpu:8000", nil, listens, 1, []worker.Publisher{at("tcp://gpu:5557", "", "")}, nil},
		{"at a path here", "127.0.0.1:8000", nil, path, 1, []worker.Publisher{at("ipc:///run/x", "tcp://127.0.0.1:6557", "t")}, nil},
		{"at a path elsewhere", "gpu:8000", nil, path, 1, nil, errUnread},
		{"off", "gpu:8000", &worker.KVEventsSettings{Source: "off"}, one, 1, nil, nil},
		{"with a topic and another replay", "gpu:8000", &worker.KVEventsSettings{Topic: "a", Replay: "7000"}, one, 1, []worker.Publisher{at("tcp://gpu:5557", "tcp://gpu:7000", "a")}, nil},
		{"port", "tcp/gpu:8000", &worker.KVEventsSettings{Source: "5557", Replay: "5600"}, engine.KVEvents{}, 2, []worker.Publisher{
			at("tcp://gpu:5557", "tcp://gpu:5600", ""), at("tcp://gpu:5558", "tcp://gpu:5601", ""),
		}, nil},
		{"endpoint", "unix//run/x", &worker.KVEventsSettings{Source: "tcp://127.0.0.1:9"}, one, 1, []worker.Publisher{at("tcp://127.0.0.1:9", "", "")}, nil},
		{"path of ranks", "127.0.0.1:8000", &worker.KVEventsSettings{Source: "ipc:///run/x"}, one, 2, nil, errUnread},
	} {
		got, why := publishers(c.set, hostOf(c.dial), c.of, c.ranks)
		if !slices.Equal(got, c.want) || !errors.Is(why, c.why) {
			t.Errorf("%s: %v, %v; want %v, %v", c.name, got, why, c.want, c.why)
		}
	}
}
