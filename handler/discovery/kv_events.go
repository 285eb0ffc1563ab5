package discovery

import (
	"context"
	"slices"
	"sync"

	"github.com/caddy-kvrouter/kvrouter/kvscore/events"
	"go.uber.org/zap"
)

// subscription follows the KV events of a worker: one stream for each data-parallel rank.
type subscription struct {
	mu      sync.Mutex
	from    []publisher
	engine  events.Engine
	why     error // why nothing is followed although the engine publishes
	worker  *events.Worker
	streams []*events.Stream
	end     context.CancelFunc // nil: nothing is followed
	gone    bool               // the pool has forgotten the worker
}

// replays bounds the replays of all streams of the process, each of which takes memory.
var replays = make(chan struct{}, 8)

// follow begins, changes or ends the subscription to a worker's KV events, as its settings and
// what its engine reports demand.
func (x *Watch) follow() {
	w, s := x.worker, &x.events
	set, e := x.pool.Settings.Load().Worker(w.Dial), w.Engine()
	from, why := publishers(set.KVEvents, hostOf(w.Dial), e.Info.KVEvents, w.Ranks())
	facts := events.Engine{
		BlockTokens: e.Info.BlockSize,
		Adapters:    e.NamesAll(), Salts: e.NamesAll(), HitsInFlight: e.HitsInFlight(),
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.why = why
	if slices.Equal(from, s.from) {
		if s.worker != nil && facts != s.engine {
			s.engine = facts
			s.worker.Learn(facts)
		}
		return
	}
	s.stop()
	if len(from) == 0 || s.gone {
		return
	}
	s.from, s.engine = from, facts
	x.subscribe()
}

// subscribe begins the streams. The subscription's lock is held.
func (x *Watch) subscribe() {
	s := &x.events
	worker := events.NewWorker(x.pool.Scheduler.Caches(), x.pool.Hashing().Seed, x.worker.ID, len(s.from), s.engine)
	logger := x.pool.Logger().With(zap.String("upstream", x.worker.Dial))
	streams := make([]*events.Stream, 0, len(s.from))
	for rank, from := range s.from {
		stream, err := events.New(events.Config{
			Endpoint: from.endpoint, Replay: from.replay, Topic: from.topic, Slots: replays,
		}, worker.Recorder(rank), logger)
		if err != nil { // the settings were checked, and so was what the engine reports
			worker.Close()
			s.from, s.why = nil, err
			return
		}
		streams = append(streams, stream)
	}
	ctx, cancel := context.WithCancel(x.pool.Life())
	s.worker, s.streams, s.end = worker, streams, cancel
	x.eventsCheck.reset()
	x.pool.Go(func() {
		var under sync.WaitGroup
		for _, stream := range streams {
			under.Go(func() { stream.Run(ctx) })
		}
		under.Wait()
		worker.Close()
	})
}

// stop ends the streams. The lock is held.
func (s *subscription) stop() {
	if s.end != nil {
		s.end()
	}
	s.from, s.engine, s.worker, s.streams, s.end = nil, events.Engine{}, nil, nil, nil
}

// unfollow ends the subscription to the KV events of a worker that the pool forgets.
func (x *Watch) unfollow() {
	x.events.mu.Lock()
	defer x.events.mu.Unlock()
	x.events.stop()
	x.events.gone = true
}

// doubt says whether the engine's reports contradict its events.
func (s *subscription) doubt(doubted bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.worker != nil {
		s.worker.Doubt(doubted)
	}
}

// resync forgets what a worker's events said, and asks for them anew.
func (s *subscription) resync() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, stream := range s.streams {
		stream.Resync()
	}
}

// Following is the state of the KV events of one of a worker's ranks.
type Following struct {
	Endpoint string `json:"endpoint"`
	Replay   string `json:"replay_endpoint"`
	events.Status
	events.Applied
}

// Following returns the state of a worker's KV events by rank, none if the router follows none.
func (x *Watch) Following() []Following {
	s := &x.events
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]Following, 0, len(s.from))
	for rank, from := range s.from {
		list = append(list, Following{from.endpoint, from.replay, s.streams[rank].Status(), s.worker.Applied(rank)})
	}
	return list
}

// unfollowed returns why the router does not follow the events that the engine publishes.
func (s *subscription) unfollowed() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.why
}
