package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/stats"
)

// cell is one kind of load.
type cell struct {
	name          string
	size          int // of a body, bytes
	clients       int
	conversations int
	stream        bool
}

// chunks is how many content chunks a stream has.
const chunks = 100

func allCells() []cell {
	return []cell{
		{name: "1k-c1", size: 1 << 10, clients: 1, conversations: 256},
		{name: "1k-c32", size: 1 << 10, clients: 32, conversations: 256},
		{name: "16k-c1", size: 16 << 10, clients: 1, conversations: 256},
		{name: "16k-c32", size: 16 << 10, clients: 32, conversations: 256},
		{name: "256k-c1", size: 256 << 10, clients: 1, conversations: 64},
		{name: "256k-c32", size: 256 << 10, clients: 32, conversations: 64},
		{name: "16k-s100-c32", size: 16 << 10, clients: 32, conversations: 256, stream: true},
	}
}

// sample is what one contender showed in one cell of one round. What could not be
// measured is NaN.
type sample struct {
	contender, cell string
	round           int
	errors          int   // the warm-up's, too
	firstError      error // nil without errors
	cpu             float64
	rate            float64 // requests per second
	// p50 and p99 are of the time to the end of the answer. These and cpu are in
	// milliseconds.
	p50, p99 float64
}

// newLoad returns the load of a cell on a contender. The conversations are
// those of the map, made when they are not there yet.
func newLoad(con *contender, c cell, made map[traffic]*corpus, seq *atomic.Int64) *load {
	if made[con.traffic] == nil {
		made[con.traffic] = newCorpus(con.traffic, c)
	}
	bodies := made[con.traffic]
	return &load{url: con.url + bodies.path, bodies: bodies, clients: c.clients, seq: seq}
}

// sample measures one contender in one cell.
func (m *meter) sample(ctx context.Context, con *contender, c cell, round int, l *load) (*sample, error) {
	runtime.GC()
	var w window
	profiled := make(chan error, 1)
	r := l.run(ctx, m.warmup, m.timed, func() {
		go func() { profiled <- m.takeProfile(ctx, con, c, round) }()
		w.begin(con.proc.PID())
	}, func() { w.end() })
	if ctx.Err() != nil {
		return nil, errors.New("interrupted")
	}
	if con.proc.Ended() {
		return nil, fmt.Errorf("%s has ended: %s", con.name, con.proc.Output())
	}
	if err := <-profiled; err != nil {
		return nil, fmt.Errorf("profiling %s: %w", con.name, err)
	}
	s := &sample{
		contender: con.name, cell: c.name, round: round, errors: r.errors, firstError: r.firstError,
		rate: float64(len(r.latencies)) / r.elapsed.Seconds(), cpu: w.perRequest(len(r.latencies)),
		p50: math.NaN(), p99: math.NaN(),
	}
	if len(r.latencies) > 0 {
		slices.Sort(r.latencies)
		s.p50 = milliseconds(stats.Percentile(r.latencies, 0.5))
		s.p99 = milliseconds(stats.Percentile(r.latencies, 0.99))
	}
	return s, nil
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// window takes the CPU time of a contender at both ends of the timed window.
type window struct {
	pids          []int // of the contender and its descendants
	before, after time.Duration
	err           error
}

func (w *window) begin(pid int) {
	if w.pids, w.err = processTree(pid); w.err == nil {
		w.before, w.err = cpuTime(w.pids)
	}
}

func (w *window) end() {
	if w.err == nil {
		w.after, w.err = cpuTime(w.pids)
	}
}

// perRequest returns milliseconds per request; NaN without a clock or requests.
func (w *window) perRequest(requests int) float64 {
	if w.err != nil || requests == 0 {
		return math.NaN()
	}
	return milliseconds(w.after-w.before) / float64(requests)
}

// takeProfile has a Caddy profile itself for the timed window.
func (m *meter) takeProfile(ctx context.Context, con *contender, c cell, round int) error {
	if m.profile == "" || con.admin == "" {
		return nil
	}
	url := fmt.Sprintf("http://%s/debug/pprof/profile?seconds=%d", con.admin, max(1, int(m.timed/time.Second)))
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("status %d: %.200s", resp.StatusCode, data)
	}
	file := filepath.Join(m.profile, fmt.Sprintf("%s.%s.%d.pprof", con.name, c.name, round+1))
	return errors.Join(err, os.WriteFile(file, data, 0o600))
}
