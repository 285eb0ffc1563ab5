package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// load is a closed loop of clients, each with one connection that is kept
// alive.
type load struct {
	urls          []string // the clients take them in turn
	path          string
	bodies        *corpus
	clients       int
	seq           *atomic.Int64 // the last request's number
	sessionHeader bool
	// stagger is the time over which the clients' first requests are spread. If
	// paced streams all ended at once, their count would depend on where the
	// window begins.
	stagger time.Duration
}

// requestTimeout bounds one request; what takes longer is an error.
const requestTimeout = 30 * time.Second

// outcome is what a load came to. The durations are those of the requests that
// ended well within the timed window, in no order.
type outcome struct {
	latencies, firsts []time.Duration
	errors            int
	firstError        string
	elapsed           time.Duration
}

// run lets the clients run through the warm-up and the timed window, and calls
// begin and end at the latter's limits. It returns early if ctx is done.
func (l *load) run(ctx context.Context, warmup, timed time.Duration, begin, end func()) *outcome {
	var timing, stop atomic.Bool
	clients := make([]client, l.clients)
	var wg sync.WaitGroup
	for i := range clients {
		c := &clients[i]
		*c = client{
			load: l, url: l.urls[i%len(l.urls)] + l.path, buf: make([]byte, 64<<10),
			transport: &http.Transport{MaxConnsPerHost: 1, DisableCompression: true},
		}
		wg.Go(func() {
			defer c.transport.CloseIdleConnections()
			wait(ctx, l.stagger*time.Duration(i)/time.Duration(l.clients))
			for !stop.Load() && ctx.Err() == nil {
				c.request(ctx, &timing)
			}
		})
	}
	wait(ctx, warmup)
	begin()
	start := time.Now()
	timing.Store(true)
	wait(ctx, timed)
	timing.Store(false)
	out := &outcome{elapsed: time.Since(start)}
	end()
	stop.Store(true)
	wg.Wait()
	for i := range clients {
		c := &clients[i]
		out.latencies = append(out.latencies, c.latencies...)
		out.firsts = append(out.firsts, c.firsts...)
		if out.errors == 0 && c.errors > 0 {
			out.firstError = c.firstError.Error()
		}
		out.errors += c.errors
	}
	return out
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// client is one of a load's.
type client struct {
	load      *load
	url       string
	transport *http.Transport
	buf       []byte

	latencies, firsts []time.Duration
	errors            int
	firstError        error
}

// request makes one request and records it.
func (c *client) request(ctx context.Context, timing *atomic.Bool) {
	start := time.Now()
	first, err := c.send(ctx, c.load.seq.Add(1))
	took := time.Since(start)
	switch {
	case err != nil && ctx.Err() == nil:
		if c.errors == 0 {
			c.firstError = err
		}
		c.errors++
		wait(ctx, time.Millisecond) // do not spin where nobody listens
	case err == nil && timing.Load():
		c.latencies = append(c.latencies, took)
		c.firsts = append(c.firsts, first.Sub(start))
	}
}

// send sends the request with the number, and returns when the first byte of
// the answer's body came, or what was wrong with the answer.
func (c *client) send(ctx context.Context, number int64) (first time.Time, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	i := int(number % int64(len(c.load.bodies.convs)))
	conv := &c.load.bodies.convs[i]
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url, newSplice(conv, number))
	if err != nil {
		return first, err
	}
	req.ContentLength = int64(conv.size())
	req.Header["Content-Type"] = []string{"application/json"}
	// Some routers refuse requests without a key; the others do not look.
	req.Header["Authorization"] = []string{"Bearer sk-bench"}
	if c.load.sessionHeader {
		req.Header["X-Session-Id"] = []string{c.load.bodies.key(i)}
	}
	resp, err := c.transport.RoundTrip(req)
	if err != nil {
		return first, err
	}
	defer resp.Body.Close()
	return c.read(resp)
}

// read reads the answer and checks that it is whole.
func (c *client) read(resp *http.Response) (first time.Time, err error) {
	var kept []byte // of a failure its beginning, of a success its last bytes
	for {
		n, err := resp.Body.Read(c.buf)
		if n > 0 {
			if first.IsZero() {
				first = time.Now()
			}
			kept = append(kept, c.buf[:n]...)
			if over := len(kept) - 1024; over > 0 && resp.StatusCode == http.StatusOK {
				kept = kept[over:]
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return first, fmt.Errorf("reading the answer: %w", err)
		}
	}
	if resp.StatusCode != http.StatusOK {
		return first, fmt.Errorf("status %d: %.200s", resp.StatusCode, kept)
	}
	return first, whole(resp.Header.Get("Content-Type"), kept)
}

// whole tells what is wrong with an answer that ends so.
func whole(contentType string, end []byte) error {
	end = bytes.TrimSpace(end)
	if bytes.HasPrefix([]byte(contentType), []byte("text/event-stream")) {
		if !bytes.HasSuffix(end, []byte("data: [DONE]")) {
			return fmt.Errorf("stream ended without [DONE]: %.200q", end[max(0, len(end)-200):])
		}
		return nil
	}
	if !bytes.HasSuffix(end, []byte("}")) || !bytes.Contains(end, []byte(`"usage"`)) {
		return fmt.Errorf("answer is not whole: %.200q", end)
	}
	return nil
}

// splice reads a conversation with its number in place, without copying it
// first.
type splice struct {
	parts  [3][]byte
	digits [20]byte
	at     int
}

func newSplice(c *conversation, number int64) *splice {
	s := &splice{}
	s.parts = [3][]byte{c.head, strconv.AppendInt(s.digits[:0], number, 10), c.tail}
	return s
}

// Read implements io.Reader.
func (s *splice) Read(p []byte) (n int, err error) {
	for s.at < len(s.parts) && n < len(p) {
		m := copy(p[n:], s.parts[s.at])
		n += m
		if s.parts[s.at] = s.parts[s.at][m:]; len(s.parts[s.at]) == 0 {
			s.at++
		}
	}
	if n == 0 && len(p) > 0 {
		return 0, io.EOF
	}
	return n, nil
}
