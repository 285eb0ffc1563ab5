package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

// shot is one request and its result. Its times are real.
type shot struct {
	n                int
	due, sent, first time.Time
	end              time.Time
	prompt, cached   int
	engine           string // its name
	err              error
}

// client replays a slice in real time. The trace's times pass rate times as fast.
type client struct {
	http  http.Client
	url   string
	slice *trace.Trace
	rate  float64
	keys  bool // requests name their session
	zero  time.Time
	shots []shot
	ended func()
}

func newClient(url string, c *cell, ended func()) *client {
	return &client{
		http: http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 4096, DisableCompression: true}},
		url:  url + "/v1/completions", slice: c.slice, rate: c.speed / c.scale, keys: c.keys,
		shots: make([]shot, len(c.slice.Requests)), ended: ended,
	}
}

// real returns how long a time of the trace takes.
func (c *client) real(d time.Duration) time.Duration { return time.Duration(float64(d) / c.rate) }

// replay sends all requests and returns when all are answered.
func (c *client) replay(ctx context.Context) {
	defer c.http.CloseIdleConnections()
	c.zero = time.Now()
	var all sync.WaitGroup
	defer all.Wait()
	requests := c.slice.Requests
	if !c.slice.Closed {
		for n := range requests {
			body, due := appendBody(nil, c.slice, n), c.zero.Add(c.real(requests[n].At))
			if !until(ctx, due) {
				return
			}
			all.Go(func() { c.send(ctx, n, due, body) })
		}
		return
	}
	for n := range requests {
		if n == 0 || requests[n-1].Session != requests[n].Session {
			all.Go(func() { c.converse(ctx, n) })
		}
	}
}

// converse sends the turns of a session, the first of which is request n.
func (c *client) converse(ctx context.Context, n int) {
	due := c.zero.Add(c.real(c.slice.Requests[n].At))
	for session := c.slice.Requests[n].Session; ; {
		if !until(ctx, due.Add(-time.Millisecond)) { // the body of a long prompt takes time, too
			return
		}
		body := appendBody(nil, c.slice, n)
		if !until(ctx, due) {
			return
		}
		c.send(ctx, n, due, body)
		if n++; n == len(c.slice.Requests) || c.slice.Requests[n].Session != session {
			return
		}
		due = c.shots[n-1].end.Add(c.real(c.slice.Requests[n].Think))
	}
}

// until waits for a moment. It returns false if ctx ended meanwhile.
func until(ctx context.Context, at time.Time) bool {
	t := time.NewTimer(time.Until(at))
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// send sends one request and reads the answer.
func (c *client) send(ctx context.Context, n int, due time.Time, body []byte) {
	s := &c.shots[n]
	s.n, s.due = n, due
	s.err = c.answer(ctx, s, body)
	s.end = time.Now()
	c.ended()
}

func (c *client) answer(ctx context.Context, s *shot, body []byte) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	if c.keys {
		req.Header.Set("X-Session-Id", strconv.Itoa(c.slice.Requests[s.n].Session))
	}
	s.sent = time.Now()
	resp, err := c.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 300)) //nolint:errcheck // it is for the message
		return fmt.Errorf("status %d: %s", resp.StatusCode, text)
	}
	s.engine = resp.Header.Get(engine.EngineHeader)
	return s.read(resp.Body)
}

var (
	data = []byte("data: ")
	done = []byte("data: [DONE]")
)

// read reads a stream to its end. The event before the last has the usage.
func (s *shot) read(body io.Reader) error {
	in := bufio.NewReader(body)
	var last []byte
	for {
		line, err := in.ReadSlice('\n')
		switch {
		case err != nil:
			return fmt.Errorf("reading the stream: %w", err)
		case bytes.HasPrefix(line, done):
			return s.usage(last)
		case bytes.HasPrefix(line, data):
			if s.first.IsZero() {
				s.first = time.Now()
			}
			last = append(last[:0], line[len(data):]...)
		}
	}
}

func (s *shot) usage(event []byte) error {
	var doc struct {
		Usage *struct {
			Prompt  int `json:"prompt_tokens"`
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	if err := json.Unmarshal(event, &doc); err != nil {
		return fmt.Errorf("parsing the usage: %w", err)
	}
	if doc.Usage == nil {
		return errors.New("the stream has no usage")
	}
	s.prompt, s.cached = doc.Usage.Prompt, doc.Usage.Details.Cached
	return nil
}
