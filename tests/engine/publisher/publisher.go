package publisher

import (
	"encoding/binary"
	"net"
	"sync"
	"time"
)

// Config is a publisher's configuration.
type Config struct {
	// Listener is what subscribers connect to.
	Listener net.Listener
	// Replay is what asks for batches of the past. Default: none.
	Replay net.Listener
	// OldReplay has replays lack the frame of the topic, as in vLLM before 0.26 and in
	// SGLang.
	OldReplay bool
	// Topic is the first frame of each message. Default: empty.
	Topic string
	// Buffer is how many batches replays go back. Default: 10000.
	Buffer int
	Form   Form
}

// HighWater is how many messages may wait for one subscriber.
const HighWater = 100000

// message is one batch as it is sent.
type message struct {
	seq     uint64
	payload []byte
	frames  []byte // all three, as PUB sends them
}

// Publisher publishes the batches of one rank. Batches wait in a queue without a bound,
// so that a slow peer never stops the rank.
type Publisher struct {
	cfg  Config
	done chan struct{}
	wake chan struct{}
	all  sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	queue   []*Batch
	sending bool // the first of the queue is on its way
	next    uint64
	past    []*message // for replays, the oldest first
	subs    map[*subscriber]struct{}
	conns   map[net.Conn]bool // true: of the PUB socket
	faults  faults
}

// Start starts a publisher, which owns the listeners from then on. Close ends it.
func Start(cfg Config) *Publisher {
	if cfg.Buffer == 0 {
		cfg.Buffer = 10000
	}
	p := &Publisher{
		cfg: cfg, done: make(chan struct{}), wake: make(chan struct{}, 1),
		subs: make(map[*subscriber]struct{}), conns: make(map[net.Conn]bool),
	}
	p.all.Go(p.run)
	p.all.Go(func() { p.accept(cfg.Listener, true, p.serveSubscriber) })
	if cfg.Replay != nil {
		p.all.Go(func() { p.accept(cfg.Replay, false, p.serveReplays) })
	}
	return p
}

// Close ends the publisher and all connections at once, and returns when none of its
// goroutines is left. What was not sent is lost.
func (p *Publisher) Close() {
	p.mu.Lock()
	if !p.closed {
		p.closed = true
		close(p.done)
		for _, l := range []net.Listener{p.cfg.Listener, p.cfg.Replay} {
			if l != nil {
				l.Close()
			}
		}
		for c := range p.conns {
			c.Close()
		}
	}
	p.mu.Unlock()
	p.all.Wait()
}

// Publish queues a batch, which the publisher owns from then on. It never waits, and does
// nothing after Close.
func (p *Publisher) Publish(b *Batch) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	p.queue = append(p.queue, b)
	p.nudge()
}

// nudge has run look at the queue and at the delay.
func (p *Publisher) nudge() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// run sends the batches of the queue.
func (p *Publisher) run() {
	for {
		for batch := p.first(); batch != nil; batch = p.first() {
			payload := p.cfg.Form.Append(nil, batch)
			if !p.wait() {
				return
			}
			p.send(payload)
		}
		select {
		case <-p.wake:
		case <-p.done:
			return
		}
	}
}

// first takes the first batch of the queue; nil if there is none.
func (p *Publisher) first() *Batch {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.queue) == 0 {
		p.queue = nil
		return nil
	}
	b := p.queue[0]
	p.queue[0] = nil
	p.queue, p.sending = p.queue[1:], true
	return b
}

// wait waits as long as batches are delayed. It returns false after Close.
func (p *Publisher) wait() bool {
	for began := time.Now(); ; {
		p.mu.Lock()
		left := p.faults.delay - time.Since(began)
		p.mu.Unlock()
		if left <= 0 {
			return true
		}
		select {
		case <-time.After(left):
		case <-p.wake: // the delay may have changed
		case <-p.done:
			return false
		}
	}
}

// send gives a payload its number and sends it, as far as no fault is in the way.
func (p *Publisher) send(payload []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sending = false
	m := &message{seq: p.next, payload: payload}
	p.next++
	m.frames = appendMessage(nil, []byte(p.cfg.Topic), binary.BigEndian.AppendUint64(nil, m.seq), payload)
	if p.past = append(p.past, m); len(p.past) > p.cfg.Buffer {
		p.past = p.past[1:]
	}
	if p.faults.drop > 0 {
		p.faults.drop--
		return
	}
	for s := range p.subs {
		s.offer(m.frames, p.cfg.Topic)
	}
}

// Status is how far a publisher is.
type Status struct {
	// Pending is how many batches have no number yet.
	Pending int
	// Unsent is how many messages wait for their subscribers.
	Unsent int
}

// Status returns how far the publisher is.
func (p *Publisher) Status() Status {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := Status{Pending: len(p.queue)}
	if p.sending {
		s.Pending++
	}
	for sub := range p.subs {
		s.Unsent += sub.waiting()
	}
	return s
}
