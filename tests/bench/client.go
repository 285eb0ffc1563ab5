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
	url     string
	bodies  *corpus
	clients int
	seq     *atomic.Int64 // the last request's number
}

// requestTimeout bounds one request; what takes longer is an error.
const requestTimeout = 30 * time.Second

// outcome is what a load came to. The durations are those of the requests that
// ended well within the timed window, in no order.
type outcome struct {
	latencies  []time.Duration
	errors     int
	firstError error
	elapsed    time.Duration
}

// run lets the clients run through the warm-up and the timed window, and calls
// begin and end at the latter's limits. It returns early if ctx is done.
func (l *load) run(ctx context.Context, warmup, timed time.Duration, begin, end func()) *outcome {
	var timing, stop atomic.Bool
	var ended atomic.Int64 // requests of the timed window
	clients := make([]client, l.clients)
	var wg sync.WaitGroup
	for i := range clients {
		c := &clients[i]
		*c = client{
			load: l, buf: make([]byte, 64<<10),
			transport: &http.Transport{MaxConnsPerHost: 1, DisableCompression: true},
		}
		wg.Go(func() {
			defer c.transport.CloseIdleConnections()
			for !stop.Load() && ctx.Err() == nil {
				c.request(ctx, &timing, &ended)
			}
		})
	}
	wait(ctx, warmup)
	begin()
	start := time.Now()
	timing.Store(true)
	for wait(ctx, timed); ended.Load() == 0 && ctx.Err() == nil; { // a busy machine serves none in a short window
		wait(ctx, 10*time.Millisecond)
	}
	timing.Store(false)
	out := &outcome{elapsed: time.Since(start)}
	end()
	stop.Store(true)
	wg.Wait()
	for i := range clients {
		c := &clients[i]
		out.latencies = append(out.latencies, c.latencies...)
		if out.errors == 0 && c.errors > 0 {
			out.firstError = c.firstError
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
	transport *http.Transport
	buf       []byte

	latencies  []time.Duration
	errors     int
	firstError error
}

// request makes one request and records it.
func (c *client) request(ctx context.Context, timing *atomic.Bool, ended *atomic.Int64) {
	start := time.Now()
	err := c.send(ctx, c.load.seq.Add(1))
	took := time.Since(start)
	timed := timing.Load()
	if timed {
		ended.Add(1)
	}
	switch {
	case err != nil && ctx.Err() == nil:
		if c.errors == 0 {
			c.firstError = err
		}
		c.errors++
		wait(ctx, time.Millisecond) // do not spin where nobody listens
	case err == nil && timed:
		c.latencies = append(c.latencies, took)
	}
}

// newRequest makes a request with a body of JSON. Some routers refuse requests without
// a key; the others do not look.
func newRequest(ctx context.Context, url string, body io.Reader) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, body)
	if err == nil {
		req.Header["Content-Type"] = []string{"application/json"}
		req.Header["Authorization"] = []string{"Bearer sk-bench"}
	}
	return req, err
}

// send sends the request with the number, and returns what was wrong with the answer.
func (c *client) send(ctx context.Context, number int64) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	conv := &c.load.bodies.convs[int(number%int64(len(c.load.bodies.convs)))]
	digits := strconv.AppendInt(nil, number, 10)
	body := io.MultiReader(bytes.NewReader(conv.head), bytes.NewReader(digits), bytes.NewReader(conv.tail))
	req, err := newRequest(ctx, c.load.url, body)
	if err != nil {
		return err
	}
	req.ContentLength = int64(conv.size())
	resp, err := c.transport.RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return c.read(resp)
}

// read reads the answer and checks that it is whole.
func (c *client) read(resp *http.Response) error {
	var kept []byte // of a failure its beginning, of a success its last bytes
	for {
		n, err := resp.Body.Read(c.buf)
		kept = append(kept, c.buf[:n]...)
		if over := len(kept) - 1024; over > 0 && resp.StatusCode == http.StatusOK {
			kept = kept[over:]
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("reading the answer: %w", err)
		}
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d: %.200s", resp.StatusCode, kept)
	}
	return whole(resp.Header.Get("Content-Type"), kept)
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
