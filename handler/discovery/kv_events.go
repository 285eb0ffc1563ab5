package discovery

import (
	"cmp"
	"errors"
	"net"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore/events"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
)

// Why a worker has no source of events although it publishes some.
var (
	errDials  = errors.New("the engine connects to its endpoint instead of listening: write the endpoint with *")
	errRanks  = errors.New("the engine has other data-parallel ranks than the router can address")
	errUnread = errors.New("the router cannot reach the engine's endpoint")
)

// publishers returns where the ranks of a worker publish, none if nowhere. The error says why
// the router cannot use what the engine reports.
func publishers(set *worker.KVEventsSettings, host string, of engine.KVEvents, ranks int) ([]worker.Publisher, error) {
	if set == nil {
		set = new(worker.KVEventsSettings)
	}
	first, n := worker.Publisher{Topic: set.Topic}, ranks
	switch source := cmp.Or(set.Source, worker.EventsAuto); source {
	case worker.EventsOff:
		return nil, nil
	case worker.EventsAuto:
		if of.Publishers == 0 {
			return nil, nil
		}
		if !of.Listens && !engine.Binds(of.Endpoint) {
			return nil, errDials
		}
		first.Endpoint, first.Replay = fromHere(of.Endpoint, host), fromHere(of.Replay, host)
		first.Topic = cmp.Or(set.Topic, of.Topic)
		n = of.Publishers
	default:
		first.Endpoint = at(source, host)
	}
	if set.Replay != "" {
		first.Replay = at(set.Replay, host)
	}
	if first.Endpoint == "" {
		return nil, errUnread
	}
	if n != ranks { // as many ranks as publishers, or the batches cannot be told apart
		return nil, errRanks
	}
	list := make([]worker.Publisher, 0, n)
	for rank := range n {
		one := first
		one.Endpoint, one.Replay = engine.PortAfter(first.Endpoint, rank), engine.PortAfter(first.Replay, rank)
		if one.Endpoint == "" {
			return nil, errUnread
		}
		list = append(list, one)
	}
	return list, nil
}

func at(option, host string) string {
	if worker.PortOf(option) > 0 {
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
	if !strings.HasPrefix(endpoint, "tcp://") || i < 0 || worker.PortOf(endpoint[i+1:]) == 0 {
		return ""
	}
	return "tcp://" + net.JoinHostPort(host, endpoint[i+1:])
}

// hostOf returns the host in a dial address; the loopback for a unix socket.
func hostOf(dial string) string {
	addr, err := caddy.ParseNetworkAddress(dial)
	if err != nil || addr.IsUnixNetwork() || addr.Host == "" {
		return "127.0.0.1"
	}
	return addr.Host
}

// Apply replaces a pool's settings, and returns whether they changed.
func Apply(p *pool.Pool, s *pool.Settings) (changed bool) {
	changed = p.Apply(s)
	for _, w := range p.All() {
		follow(p, w)
	}
	return changed
}

// follow begins, changes or ends the subscription to a worker's KV events, as its settings and
// what its engine reports demand.
func follow(p *pool.Pool, w *worker.Worker) {
	e := w.Engine()
	from, why := publishers(w.Settings().KVEvents, hostOf(w.Dial), e.Info.KVEvents, w.Ranks())
	run := w.Follow(from, why, events.Engine{
		BlockTokens: e.Info.BlockSize,
		Adapters:    e.NamesAll(), Salts: e.NamesAll(), HitsInFlight: e.HitsInFlight(),
	}, &worker.Follower{
		Worker: w.ID, Caches: p.Scheduler.Caches(), Seed: p.Hashing().Seed, Life: p.Life(),
		Logger: p.Logger().With(zap.String("upstream", w.Dial)),
	})
	if run != nil {
		p.Go(run)
	}
}
