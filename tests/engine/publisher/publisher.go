// Package publisher publishes the KV events of one rank of a simulated engine, as vLLM,
// SGLang and TensorRT-LLM do. Batches in msgpack go out on a ZeroMQ PUB socket. A ROUTER
// socket answers with past batches. Faults on demand lose and delay batches, and close
// connections. The package knows no cache and no request.
//
// It speaks ZMTP 3.1 itself, because the sockets of github.com/go-zeromq/zmq4 v0.17.0 are
// not fit for a server:
//
//   - The PUB socket answers no PING. After ten of them it reads nothing more.
//   - One slow subscriber stops all others.
//   - A client that sends no greeting stops the accept loop.
//   - The caller cannot close a single connection.
//   - Close leaves a goroutine.
//
// Beyond its high-water mark a subscriber loses messages, as with ZeroMQ.
package publisher

import (
	"bytes"
	"encoding/binary"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
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
	// Buffer is how many batches replays go back.
	Buffer int
	Form   Form
}

// highWater is how many messages may wait for one subscriber.
const highWater = 100000

// Publisher publishes the batches of one rank. It never waits for a peer.
type Publisher struct {
	cfg    Config
	all    sync.WaitGroup
	unsent atomic.Int64 // messages that wait for their subscribers
	delay  atomic.Int64 // of each message to a subscriber

	mu     sync.Mutex
	closed bool
	next   uint64
	past   [][]byte // the payloads before next, for replays
	drop   int      // batches
	subs   map[*subscriber]struct{}
	conns  map[net.Conn]struct{}
}

// Start starts a publisher, which owns the listeners from then on. Close ends it.
func Start(cfg Config) *Publisher {
	p := &Publisher{cfg: cfg, subs: make(map[*subscriber]struct{}), conns: make(map[net.Conn]struct{})}
	p.all.Go(func() { p.accept(cfg.Listener, p.serveSubscriber) })
	if cfg.Replay != nil {
		p.all.Go(func() { p.accept(cfg.Replay, p.serveReplays) })
	}
	return p
}

// Close ends the publisher and all connections at once, and returns when none of its
// goroutines is left. What was not sent is lost.
func (p *Publisher) Close() {
	p.mu.Lock()
	p.closed = true
	p.cfg.Listener.Close()
	if p.cfg.Replay != nil {
		p.cfg.Replay.Close()
	}
	for c := range p.conns {
		c.Close()
	}
	p.mu.Unlock()
	p.all.Wait()
}

// Publish sends a batch, if no fault is in the way.
func (p *Publisher) Publish(b *Batch) {
	payload := p.cfg.Form.Append(nil, b)
	p.mu.Lock()
	defer p.mu.Unlock()
	frames := appendMessage(nil, []byte(p.cfg.Topic), binary.BigEndian.AppendUint64(nil, p.next), payload)
	p.next++
	if p.past = append(p.past, payload); len(p.past) > p.cfg.Buffer {
		p.past = p.past[1:]
	}
	if p.drop > 0 {
		p.drop--
		return
	}
	for s := range p.subs {
		if len(s.out) < highWater {
			p.unsent.Add(1)
			s.out <- frames
		}
	}
}

// Unsent returns how many messages wait for their subscribers.
func (p *Publisher) Unsent() int64 { return p.unsent.Load() }

// Published returns how many batches were published.
func (p *Publisher) Published() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.next
}

// Drop keeps the next n batches from the subscribers. Replays have them.
func (p *Publisher) Drop(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.drop = n
}

// Delay has each message to a subscriber wait for so long, one after another.
func (p *Publisher) Delay(d time.Duration) { p.delay.Store(int64(d)) }

// Disconnect closes the connections of the PUB socket. New ones are welcome.
func (p *Publisher) Disconnect() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for s := range p.subs {
		s.conn.Close()
	}
}

// accept serves the connections of a listener until it is closed.
func (p *Publisher) accept(l net.Listener, serve func(net.Conn)) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		if p.closed {
			conn.Close()
		}
		p.conns[conn] = struct{}{}
		p.mu.Unlock()
		p.all.Go(func() {
			serve(conn)
			conn.Close()
			p.mu.Lock()
			defer p.mu.Unlock()
			delete(p.conns, conn)
		})
	}
}

// subscriber is one connection of the PUB socket.
type subscriber struct {
	conn net.Conn
	out  chan []byte
}

// serveSubscriber reads subscriptions until the connection ends. Nobody ends one. Messages from before
// the subscription wait for it, so that a router which has asked for it misses none.
func (p *Publisher) serveSubscriber(conn net.Conn) {
	s := &subscriber{conn, make(chan []byte, highWater)}
	p.mu.Lock()
	p.subs[s] = struct{}{}
	p.mu.Unlock()
	w, err := open(conn, "PUB")
	writes := false
	for err == nil {
		var m incoming
		if m, err = w.read(); err == nil && !writes && m.subscribes(p.cfg.Topic) {
			writes = true
			p.all.Go(func() { p.write(w, s) })
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.subs, s)
	close(s.out)
	if !writes {
		p.unsent.Add(-int64(len(s.out)))
	}
}

// subscribes returns whether the peer subscribes to a topic: a command in ZMTP 3.1, a message before.
func (m *incoming) subscribes(topic string) bool {
	prefix, ok := bytes.CutPrefix(m.frames[0], []byte("\x09SUBSCRIBE"))
	if !m.command {
		prefix, ok = bytes.CutPrefix(m.frames[0], []byte{1})
	}
	return ok && strings.HasPrefix(topic, string(prefix))
}

// write sends a subscriber its messages.
func (p *Publisher) write(w *wire, s *subscriber) {
	var err error
	for frames := range s.out {
		if err == nil {
			time.Sleep(time.Duration(p.delay.Load()))
			err = w.write(frames)
		}
		p.unsent.Add(-1)
	}
}

// serveReplays answers the requests of one connection of the ROUTER socket.
func (p *Publisher) serveReplays(conn net.Conn) {
	w, err := open(conn, "ROUTER")
	for err == nil {
		var m incoming
		if m, err = w.read(); err != nil {
			return
		}
		// Engines ignore what is not an empty frame with a number behind it.
		if !m.command && len(m.frames) == 2 && len(m.frames[0]) == 0 && len(m.frames[1]) == 8 {
			err = p.replay(w, binary.BigEndian.Uint64(m.frames[1]))
		}
	}
}

// replay sends all batches of the buffer from a number on, and the mark of the end.
func (p *Publisher) replay(w *wire, from uint64) error {
	p.mu.Lock()
	past, next := slices.Clip(p.past), p.next
	p.mu.Unlock()
	oldest := next - uint64(len(past))
	for seq := max(from, oldest); seq < next; seq++ {
		if err := w.write(p.reply(p.cfg.Topic, seq, past[seq-oldest])); err != nil {
			return err
		}
	}
	return w.write(p.reply("", 1<<64-1, nil))
}

// reply returns one message of a replay.
func (p *Publisher) reply(topic string, seq uint64, payload []byte) []byte {
	number := binary.BigEndian.AppendUint64(nil, seq)
	if p.cfg.OldReplay {
		return appendMessage(nil, nil, number, payload)
	}
	return appendMessage(nil, nil, []byte(topic), number, payload)
}
