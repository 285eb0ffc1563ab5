package publisher

import (
	"bytes"
	"encoding/binary"
	"net"
	"slices"
	"strings"
	"sync"
	"time"
)

// accept serves the connections of a listener until it is closed.
func (p *Publisher) accept(l net.Listener, pub bool, serve func(net.Conn)) {
	for {
		conn, err := l.Accept()
		if err != nil {
			select {
			case <-p.done:
				return
			case <-time.After(10 * time.Millisecond): // too many open files, at most
				continue
			}
		}
		if p.keep(conn, pub) {
			p.all.Go(func() {
				defer p.drop(conn)
				serve(conn)
			})
		}
	}
}

// keep notes a connection, so that Close closes it. It closes it itself after Close.
func (p *Publisher) keep(conn net.Conn, pub bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		conn.Close()
		return false
	}
	p.conns[conn] = pub
	return true
}

func (p *Publisher) drop(conn net.Conn) {
	conn.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, conn)
}

// subscriber is one connection of the PUB socket.
type subscriber struct {
	wire *wire

	mu       sync.Mutex
	cond     sync.Cond
	gone     bool
	prefixes []string
	unsent   [][]byte
}

// serveSubscriber reads subscriptions until the connection ends.
func (p *Publisher) serveSubscriber(conn net.Conn) {
	w, err := open(conn, "PUB")
	if err != nil {
		return
	}
	s := &subscriber{wire: w}
	s.cond.L = &s.mu
	p.mu.Lock()
	p.subs[s] = struct{}{}
	p.mu.Unlock()
	var writer sync.WaitGroup
	writer.Go(s.write)
	for {
		m, err := w.read()
		if err != nil {
			break
		}
		if !w.answered(m) {
			s.subscribe(m)
		}
	}
	p.mu.Lock()
	delete(p.subs, s)
	p.mu.Unlock()
	s.end()
	writer.Wait()
}

// subscribe notes a subscription: a command in ZMTP 3.1, a message before. Nobody ends one.
func (s *subscriber) subscribe(m incoming) {
	prefix, ok := bytes.CutPrefix(m.frames[0], []byte("\x09SUBSCRIBE"))
	if !m.command {
		prefix, ok = bytes.CutPrefix(m.frames[0], []byte{1})
	}
	if ok {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.prefixes = append(s.prefixes, string(prefix))
	}
}

// offer queues a message, if the peer has subscribed and has room.
func (s *subscriber) offer(frames []byte, topic string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	subscribed := slices.ContainsFunc(s.prefixes, func(p string) bool { return strings.HasPrefix(topic, p) })
	if subscribed && len(s.unsent) < HighWater {
		s.unsent = append(s.unsent, frames)
		s.cond.Signal()
	}
}

// write sends what is queued, until end.
func (s *subscriber) write() {
	for {
		s.mu.Lock()
		for len(s.unsent) == 0 && !s.gone {
			s.cond.Wait()
		}
		if s.gone {
			s.mu.Unlock()
			return
		}
		frames := s.unsent[0]
		s.mu.Unlock()
		if s.wire.write(frames) != nil {
			s.wire.conn.Close() // the reader notices
			return
		}
		s.mu.Lock()
		s.unsent[0] = nil
		s.unsent = s.unsent[1:]
		s.mu.Unlock()
	}
}

func (s *subscriber) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gone = true
	s.cond.Signal()
}

func (s *subscriber) waiting() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.unsent)
}

// serveReplays answers the requests of one connection of the ROUTER socket.
func (p *Publisher) serveReplays(conn net.Conn) {
	w, err := open(conn, "ROUTER")
	if err != nil {
		return
	}
	for {
		m, err := w.read()
		if err != nil {
			return
		}
		// Engines ignore what is not an empty frame with a number behind it.
		if w.answered(m) || m.command || len(m.frames) != 2 || len(m.frames[0]) != 0 || len(m.frames[1]) != 8 {
			continue
		}
		if p.replay(w, binary.BigEndian.Uint64(m.frames[1])) != nil {
			return
		}
	}
}

// replay sends all batches of the buffer from a number on, and the mark of the end.
func (p *Publisher) replay(w *wire, from uint64) error {
	p.mu.Lock()
	past := slices.Clip(p.past)
	p.mu.Unlock()
	for _, m := range past {
		if m.seq >= from {
			if err := w.write(p.reply(p.cfg.Topic, m.seq, m.payload)); err != nil {
				return err
			}
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
