package worker

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"github.com/caddy-kvrouter/kvrouter/kvscore/events"
	"go.uber.org/zap"
)

// subscription follows the KV events of the worker: one stream for each data-parallel rank.
type subscription struct {
	check   eventsCheck
	mu      sync.Mutex
	from    []Publisher
	engine  events.Engine
	why     error // why nothing is followed although the engine publishes
	worker  *events.Worker
	streams []*events.Stream
	end     context.CancelFunc // nil: nothing is followed
	closed  bool               // the pool has forgotten the worker
}

// eventsCheck compares what KV events predict with the cached tokens that the engine reports.
type eventsCheck struct {
	doubted   atomic.Bool  // the router does not rely on the events
	uncounted atomic.Int32 // see CountedCache

	mu        sync.Mutex
	missed    map[uint64]bool // prompts whose reports were far below the prediction, in a row
	unmatched int             // requests in a row that the engine had cached although the events showed nothing
}

// reset forgets all, because the engine or its events are others.
func (c *eventsCheck) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.missed, c.unmatched = nil, 0
	c.doubted.Store(false)
}

// Publisher is where a rank publishes its KV events.
type Publisher struct{ Endpoint, Replay, Topic string }

// Follower is what the streams of KV events of a worker need. They end with Life.
type Follower struct {
	Worker uint64
	Caches *cache.Caches
	Seed   uint64
	Life   context.Context
	Logger *zap.Logger
}

// replays bounds the replays of all streams of the process, each of which takes memory.
var replays = make(chan struct{}, 8)

// Follow begins, changes or ends the subscription to the worker's KV events. It returns what follows them
// until the subscription ends, nil if nothing has to begin. If the engine publishes but there is nowhere to
// follow it from, why is the reason.
func (s *subscription) Follow(from []Publisher, why error, of events.Engine, by *Follower) (run func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.why = why
	if slices.Equal(from, s.from) {
		if s.worker != nil && of != s.engine {
			s.engine = of
			s.worker.Learn(of)
		}
		return nil
	}
	s.stop()
	if len(from) == 0 || s.closed {
		return nil
	}
	s.from, s.engine = from, of
	if run = s.start(by); run != nil {
		s.check.reset()
	}
	return run
}

// start makes the streams. The lock is held.
func (s *subscription) start(by *Follower) (run func()) {
	worker := events.NewWorker(by.Caches, by.Seed, by.Worker, len(s.from), s.engine)
	streams := make([]*events.Stream, 0, len(s.from))
	for rank, from := range s.from {
		stream, err := events.New(events.Config{
			Endpoint: from.Endpoint, Replay: from.Replay, Topic: from.Topic, Slots: replays,
		}, worker.Recorder(rank), by.Logger)
		if err != nil { // the settings were checked, and so was what the engine reports
			worker.Close()
			s.from, s.why = nil, err
			return nil
		}
		streams = append(streams, stream)
	}
	ctx, cancel := context.WithCancel(by.Life)
	s.worker, s.streams, s.end = worker, streams, cancel
	return func() {
		var under sync.WaitGroup
		for _, stream := range streams {
			under.Go(func() { stream.Run(ctx) })
		}
		under.Wait()
		worker.Close()
	}
}

// stop ends the streams. The lock is held.
func (s *subscription) stop() {
	if s.end != nil {
		s.end()
	}
	s.from, s.engine, s.worker, s.streams, s.end = nil, events.Engine{}, nil, nil, nil
}

// doubt says whether the engine's reports contradict its events.
func (s *subscription) doubt(doubted bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.worker != nil {
		s.worker.Doubt(doubted)
	}
}

// again forgets what the worker's events said, and asks for them again.
func (s *subscription) again() {
	s.doubt(false)
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

// Following returns the state of the worker's KV events by rank, none if the router follows none.
func (s *subscription) Following() []Following {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]Following, 0, len(s.from))
	for rank, from := range s.from {
		list = append(list, Following{from.Endpoint, from.Replay, s.streams[rank].Status(), s.worker.Applied(rank)})
	}
	return list
}

// Unfollowed returns why the router does not follow the events that the engine publishes.
func (s *subscription) Unfollowed() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.why
}

// Close ends what is kept of the worker's engine, for the pool has forgotten the worker.
func (s *subscription) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stop()
	s.closed = true
}
