package events

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/events/zmtp"
	"go.uber.org/zap"
)

// How a stream reconnects.
const (
	firstReconnect = 250 * time.Millisecond // at most, after a connection that held; doubled each time
	maxReconnect   = 5 * time.Second
	heldFor        = 5 * time.Second // a connection that lived longer resets the back-off
)

// Config says where one publisher is: one worker's one data-parallel rank.
type Config struct {
	// Endpoint is where the publisher's PUB socket listens, such as tcp://10.0.0.1:5557 or
	// ipc:///run/engine.
	Endpoint string
	// Replay is the endpoint of the publisher's ROUTER socket, which replays what the
	// publisher has buffered. Default: none, and the stream cannot fill gaps.
	Replay string
	// Topic selects the messages whose topic begins with it. Default: all messages.
	Topic string

	// Slots bounds the replays that run at once: each puts a value into it. The streams of a
	// process share one.
	Slots chan struct{}
	// Dial opens connections. Default: [zmtp.Dial].
	Dial func(ctx context.Context, endpoint string) (net.Conn, error)
	// Rand returns a random number in [0, 1). Default: [rand.Float64].
	Rand func() float64
}

// Sink gets what a publisher publishes. The stream calls it from one goroutine. A slow sink
// slows the publisher's connection down, and loses nothing until the publisher's own queue is
// full.
type Sink interface {
	// Payload passes one event batch on, still encoded. Since the last Reset, sequence numbers
	// are consecutive. The payload is valid only during the call. It decides all if it, with
	// what follows, decides what the publisher holds: the engine has cleared its cache.
	Payload(seq uint64, payload []byte) (decides bool)
	// Reset makes everything void that the publisher has published before. What follows
	// is all that counts. A stream calls Reset before its first payload, too.
	Reset(why string)
	// State reports a change. Complete means that the sink has got everything that decides
	// what the publisher holds, so that it holds nothing else. Only a live stream is complete.
	State(s State, complete bool)
}

// Stream follows one publisher: it subscribes, replays what was published before, finds gaps
// and restarts, and hands the batches to its sink in order. It does not decode them.
type Stream struct {
	cfg     Config
	sink    Sink
	log     *zap.Logger
	resyncs chan struct{} // holds the request of Resync

	at    position // of Run's goroutine alone, as is noted
	noted noted

	mu     sync.Mutex
	status Status
}

// New returns a stream that [Stream.Run] starts. It returns an error that names an endpoint
// that cannot be one. Log lines name the endpoint, too.
func New(c Config, sink Sink, log *zap.Logger) (*Stream, error) {
	if err := zmtp.CheckEndpoint(c.Endpoint); err != nil {
		return nil, err
	}
	if c.Replay != "" {
		if err := zmtp.CheckEndpoint(c.Replay); err != nil {
			return nil, fmt.Errorf("replay %w", err)
		}
	}
	if c.Dial == nil {
		c.Dial = zmtp.Dial
	}
	if c.Rand == nil {
		c.Rand = rand.Float64
	}
	log = log.With(zap.String("endpoint", c.Endpoint))
	return &Stream{cfg: c, sink: sink, log: log, resyncs: make(chan struct{}, 1)}, nil
}

// Resync makes everything void that the sink holds, and replays from the beginning. It is for
// a sink that finds the publisher's events in contradiction to each other or to the engine.
func (s *Stream) Resync() {
	select {
	case s.resyncs <- struct{}{}:
	default:
	}
}

// Run follows the publisher until ctx ends. It reconnects on its own. It leaves no goroutine
// and no connection behind. Call it once.
func (s *Stream) Run(ctx context.Context) {
	s.reset("the stream begins")
	if s.cfg.Replay == "" {
		s.log.Warn("KV event stream has no replay endpoint: what the engine cached before is unknown, " +
			"and lost events stay lost")
	}
	delay := firstReconnect
	for ctx.Err() == nil {
		box, err := s.dial(ctx)
		if err == nil {
			began := time.Now()
			s.connected()
			err = s.follow(ctx, box)
			s.disconnected(ctx, err)
			if time.Since(began) >= heldFor {
				delay = firstReconnect
			}
		} else if ctx.Err() == nil {
			s.degraded("the publisher cannot be reached", err)
		}
		sleep(ctx, time.Duration((0.5+s.cfg.Rand()/2)*float64(delay)))
		delay = min(2*delay, maxReconnect)
	}
}

func (s *Stream) connect(ctx context.Context, endpoint string, socket zmtp.Socket) (*zmtp.Conn, error) {
	nc, err := s.cfg.Dial(ctx, endpoint)
	if err != nil {
		return nil, err
	}
	return zmtp.New(ctx, nc, endpoint, socket, maxMessage)
}

func (s *Stream) dial(ctx context.Context) (*inbox, error) {
	c, err := s.connect(ctx, s.cfg.Endpoint, zmtp.Sub)
	if err != nil {
		return nil, err
	}
	if err := c.Subscribe(s.cfg.Topic); err != nil {
		_ = c.Close()
		return nil, err
	}
	return newInbox(c, maxQueued), nil
}

// follow reads one connection until it or ctx ends, and returns why.
func (s *Stream) follow(ctx context.Context, box *inbox) error {
	s.begin(ctx, box)
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case m, ok := <-box.messages:
			if !ok {
				return box.stop()
			}
			if box.gone.Err() != nil { // the queue of a lost connection is not worth its memory
				box.handled(m)
				return box.stop()
			}
			err := s.receive(ctx, box, m)
			box.handled(m)
			if err != nil {
				_ = box.stop()
				return err
			}
		case <-s.at.retry:
			s.begin(ctx, box)
		case <-s.resyncs:
			s.resync(ctx, box)
		}
	}
	return box.stop()
}
