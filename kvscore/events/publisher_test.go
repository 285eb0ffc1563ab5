package events

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// batch is one published batch. Its payload says which life of the publisher it is from.
type batch struct {
	seq     uint64
	payload string
}

// publisher is an engine's publisher with its replay buffer, behind in-memory connections.
// What goes wrong with it is set by its fields.
type publisher struct {
	mu      sync.Mutex
	life    int
	next    uint64
	first   uint64 // sequence number of each life's first batch
	buffer  []batch
	steps   int // size of the buffer
	pad     string
	subs    map[net.Conn]chan []byte
	routers map[net.Conn]bool

	down       bool   // no connection can be made
	oldLayout  bool   // replays have no topic
	minor      byte   // of the ZMTP version
	refuse     bool   // the replay endpoint refuses
	stall      bool   // the replay never answers
	cut        int    // a replay's connection breaks behind that many batches
	quiet      int    // a replay falls silent behind that many batches, as at a high-water mark
	hole       uint64 // the next replay leaves this batch out, unless it is the first
	heedless   bool   // replays begin with the oldest batch
	onReplay   func() // runs before an answer
	dials      []time.Time
	asked      []uint64
	replaying  int // connections that the streams have open for replays
	mostAtOnce int
}

func newPublisher() *publisher {
	return &publisher{steps: 1 << 20, minor: 1, subs: map[net.Conn]chan []byte{}, routers: map[net.Conn]bool{}}
}

const (
	pubEndpoint    = "tcp://engine:5557"
	replayEndpoint = "tcp://engine:6557"
)

func (p *publisher) dial(_ context.Context, endpoint string) (net.Conn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if endpoint == pubEndpoint {
		p.dials = append(p.dials, time.Now())
	}
	if p.down || endpoint == replayEndpoint && p.refuse {
		return nil, errors.New("connection refused")
	}
	near, far := net.Pipe()
	if endpoint == pubEndpoint {
		p.serveSub(far)
	} else {
		p.routers[far] = true
		go p.serveReplay(far)
		p.replaying++
		p.mostAtOnce = max(p.mostAtOnce, p.replaying)
		near = &replayConn{Conn: near, p: p}
	}
	return near, nil
}

// replayConn is the stream's end of a connection for replays.
type replayConn struct {
	net.Conn
	p    *publisher
	once sync.Once
}

func (c *replayConn) Close() error {
	c.once.Do(func() { c.p.set(func() { c.p.replaying-- }) })
	return c.Conn.Close()
}

func (p *publisher) greet(nc net.Conn, socket string) bool {
	g := append([]byte("\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03"), p.minor)
	g = append(g, "NULL"...)
	g = append(g, make([]byte, 64-len(g))...)
	body := "\x05READY\x0bSocket-Type\x00\x00\x00" + string(rune(len(socket))) + socket
	wrote := make(chan error, 1)
	go func() {
		_, err := nc.Write(append(append(g, 4, byte(len(body))), body...))
		wrote <- err
	}()
	if _, err := io.ReadFull(nc, make([]byte, 64)); err != nil {
		return false
	}
	if _, err := readFrame(nc); err != nil {
		return false
	}
	return <-wrote == nil
}

// readFrame returns a frame with its flags in front.
func readFrame(r io.Reader) ([]byte, error) {
	var h [2]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return nil, err
	}
	b := make([]byte, 1+int(h[1]))
	b[0] = h[0]
	_, err := io.ReadFull(r, b[1:])
	return b, err
}

func encode(frames ...[]byte) []byte {
	var b []byte
	for i, f := range frames {
		flags := byte(3)
		if i == len(frames)-1 {
			flags = 2
		}
		b = append(b, flags)
		b = binary.BigEndian.AppendUint64(b, uint64(len(f)))
		b = append(b, f...)
	}
	return b
}

func be(seq uint64) []byte { return binary.BigEndian.AppendUint64(nil, seq) }

// serveSub serves a subscriber. The caller holds the lock, so that nothing is published
// between the connection and the subscription.
func (p *publisher) serveSub(nc net.Conn) {
	out := make(chan []byte, 1<<17)
	p.subs[nc] = out
	go func() {
		if p.greet(nc, "PUB") {
			go p.pong(nc, out)
			for b := range out {
				if _, err := nc.Write(b); err != nil {
					break
				}
			}
		}
		p.hangUp(nc)
	}()
}

func (p *publisher) pong(nc net.Conn, out chan []byte) {
	for {
		f, err := readFrame(nc)
		if err != nil {
			p.hangUp(nc)
			return
		}
		if len(f) > 5 && string(f[:6]) == "\x04\x04PING" {
			p.mu.Lock()
			if p.subs[nc] != nil {
				out <- []byte("\x04\x05\x04PONG")
			}
			p.mu.Unlock()
		}
	}
}

func (p *publisher) hangUp(nc net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hangUpLocked(nc)
}

func (p *publisher) hangUpLocked(nc net.Conn) {
	if out, ok := p.subs[nc]; ok {
		close(out)
		delete(p.subs, nc)
	}
	delete(p.routers, nc)
	_ = nc.Close()
}

// disconnect breaks all connections.
func (p *publisher) disconnect() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for nc := range p.subs {
		p.hangUpLocked(nc)
	}
	for nc := range p.routers {
		p.hangUpLocked(nc)
	}
}

// restart begins a new life. Connections stay, as behind a proxy.
func (p *publisher) restart() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.life++
	p.next, p.buffer = p.first, nil
}

// publish publishes a batch. If it is lost, subscribers do not get it.
func (p *publisher) publish(lost bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := batch{p.next, fmt.Sprintf("life %d batch %d%s", p.life, p.next, p.pad)}
	p.next++
	p.buffer = append(p.buffer, b)
	if len(p.buffer) > p.steps {
		p.buffer = p.buffer[1:]
	}
	if !lost {
		p.sendLocked([]byte("topic"), be(b.seq), []byte(b.payload))
	}
}

func (p *publisher) sendLocked(frames ...[]byte) {
	for _, out := range p.subs {
		out <- encode(frames...)
	}
}

func (p *publisher) send(frames ...[]byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sendLocked(frames...)
}

func (p *publisher) publishN(n int) {
	for range n {
		p.publish(false)
	}
}

func (p *publisher) set(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change()
}

func (p *publisher) serveReplay(nc net.Conn) {
	defer p.hangUp(nc)
	if !p.greet(nc, "ROUTER") {
		return
	}
	for {
		delimiter, err := readFrame(nc)
		if err != nil || len(delimiter) != 1 || delimiter[0] != 1 {
			return
		}
		start, err := readFrame(nc)
		if err != nil || len(start) != 9 {
			return
		}
		if !p.answer(nc, binary.BigEndian.Uint64(start[1:])) {
			return
		}
	}
}

func (p *publisher) answer(nc net.Conn, start uint64) bool {
	p.mu.Lock()
	p.asked = append(p.asked, start)
	if f := p.onReplay; f != nil {
		p.onReplay = nil
		p.mu.Unlock()
		f()
		p.mu.Lock()
	}
	old, cut, quiet, hole, stall := p.oldLayout, p.cut, p.quiet, p.hole, p.stall
	p.hole = 0
	if p.heedless {
		start = 0
	}
	var todo []batch
	for _, b := range p.buffer {
		if b.seq >= start && (b.seq != hole || len(todo) == 0) {
			todo = append(todo, b)
		}
	}
	p.mu.Unlock()
	silence := func() bool {
		_, _ = nc.Read(make([]byte, 1))
		return false
	}
	if stall {
		return silence()
	}
	reply := func(topic string, seq uint64, payload string) bool {
		frames := [][]byte{nil, []byte(topic), be(seq), []byte(payload)}
		if old {
			frames = slices.Delete(frames, 1, 2)
		}
		_, err := nc.Write(encode(frames...))
		return err == nil
	}
	for i, b := range todo {
		if quiet > 0 && i == quiet {
			return silence()
		}
		if cut > 0 && i == cut || !reply("topic", b.seq, b.payload) {
			return false
		}
	}
	return reply("", endMarker, "")
}

// report is what a sink got, in order.
type report struct {
	what     string // "reset", "state", "payload"
	why      string
	state    State
	complete bool
	seq      uint64
}

// journal is a sink that checks and records.
type journal struct {
	t         *testing.T
	mu        sync.Mutex
	all       []report
	since     []batch // payloads since the last Reset
	resets    int
	state     State
	complete  bool
	began     bool
	onPayload func(seq uint64)
	cleared   uint64 // the engine clears its cache in this batch, if it is not 0
}

func (j *journal) Payload(seq uint64, payload []byte) bool {
	j.mu.Lock()
	on := j.onPayload
	j.mu.Unlock()
	if on != nil {
		on(seq)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.began {
		j.t.Error("a payload came before any Reset")
	}
	if n := len(j.since); n > 0 && j.since[n-1].seq+1 != seq {
		j.t.Errorf("payload %d follows %d without a Reset", seq, j.since[n-1].seq)
	}
	j.since = append(j.since, batch{seq, string(payload)})
	j.all = append(j.all, report{what: "payload", seq: seq})
	return seq == j.cleared && seq > 0
}

func (j *journal) Reset(why string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if why == "" {
		j.t.Error("a Reset without a reason")
	}
	j.began, j.since = true, nil
	j.resets++
	j.all = append(j.all, report{what: "reset", why: why})
}

func (j *journal) State(s State, complete bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.state == s && j.complete == complete || complete && s != Live {
		j.t.Errorf("state %v, complete %v follows state %v, complete %v", s, complete, j.state, j.complete)
	}
	j.state, j.complete = s, complete
	j.all = append(j.all, report{what: "state", state: s, complete: complete})
}

// on makes f run for each payload before it is recorded.
func (j *journal) on(f func(seq uint64)) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.onPayload = f
}

// holds checks what the sink holds: batches from first to last, in a state.
func (j *journal) holds(first, last int, s State, complete bool) {
	j.t.Helper()
	j.mu.Lock()
	defer j.mu.Unlock()
	if n := len(j.since); n != last-first+1 || n > 0 && j.since[0].seq != uint64(first) {
		j.t.Errorf("the sink holds %d batches, %s; want %d to %d", n, j.span(), first, last)
	}
	if j.state != s || j.complete != complete {
		j.t.Errorf("the state is %v, complete %v; want %v, %v", j.state, j.complete, s, complete)
	}
}

func (j *journal) span() string {
	if len(j.since) == 0 {
		return "none"
	}
	return fmt.Sprintf("%d to %d", j.since[0].seq, j.since[len(j.since)-1].seq)
}

// rig is a running stream with its publisher and sink, in virtual time.
type rig struct {
	*publisher
	*journal
	s    *Stream
	logs *observer.ObservedLogs
	stop func()
}

// inRig runs a test with a stream. Before it starts, set may change the publisher and the
// configuration. The bubble of synctest finds goroutines that the stream leaves behind.
func inRig(t *testing.T, set func(*publisher, *Config), test func(r *rig)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		p := newPublisher()
		c := Config{Endpoint: pubEndpoint, Replay: replayEndpoint, Dial: p.dial, Slots: make(chan struct{}, 1)}
		if set != nil {
			set(p, &c)
		}
		r := newRig(t, p, c)
		synctest.Wait()
		test(r)
		r.stop()
		p.disconnect()
	})
}

func newRig(t *testing.T, p *publisher, c Config) *rig {
	t.Helper()
	core, logs := observer.New(zap.DebugLevel)
	j := &journal{t: t}
	s, err := New(c, j, zap.New(core))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		s.Run(ctx)
		close(done)
	}()
	return &rig{publisher: p, journal: j, s: s, logs: logs, stop: func() {
		cancel()
		select {
		case <-done:
		case <-time.After(3 * time.Second):
			t.Error("Run has not returned 3 s after its context ended")
			<-done
		}
	}}
}

// wait lets virtual time pass until all is still.
func (r *rig) wait(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// until polls for a condition.
func until(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !condition(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within 30 s: %s", what)
		}
	}
}

// noLeaks checks at the test's end that goroutines have ended.
func noLeaks(t *testing.T) {
	t.Helper()
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		for end := time.Now().Add(time.Minute); runtime.NumGoroutine() > before; time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				stacks := make([]byte, 1<<20)
				t.Fatalf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), before, stacks[:runtime.Stack(stacks, true)])
			}
		}
	})
}

// has returns whether the sink holds batches from first to last, in a state.
func (j *journal) has(first, last int, s State, complete bool) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	n := len(j.since)
	return n == last-first+1 && (n == 0 || j.since[0].seq == uint64(first)) && j.state == s && j.complete == complete
}
