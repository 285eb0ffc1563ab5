package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// cell is one kind of load.
type cell struct {
	name          string
	size          int // of a body, bytes
	clients       int
	conversations int
	stream        bool
	pace          time.Duration // between the chunks of a stream
}

// chunks is how many content chunks a stream has.
const chunks = 100

const paced = 5 * time.Millisecond

func allCells() []cell {
	var cells []cell
	for _, s := range []struct {
		name          string
		size          int
		conversations int
	}{{"1k", 1 << 10, 256}, {"16k", 16 << 10, 256}, {"256k", 256 << 10, 64}, {"2m", 2 << 20, 16}} {
		for _, clients := range []int{1, 32} {
			name := fmt.Sprintf("%s-c%d", s.name, clients)
			cells = append(cells, cell{name: name, size: s.size, clients: clients, conversations: s.conversations})
		}
	}
	for _, clients := range []int{1, 32} {
		name := fmt.Sprintf("16k-s%d-c%d", chunks, clients)
		cells = append(cells, cell{name: name, size: 16 << 10, clients: clients, conversations: 256, stream: true})
	}
	return append(cells, cell{
		name: fmt.Sprintf("16k-s%d-paced-c32", chunks), size: 16 << 10, clients: 32,
		conversations: 256, stream: true, pace: paced,
	})
}

func namesOfCells(cells []cell) []string {
	names := make([]string, 0, len(cells))
	for _, c := range cells {
		names = append(names, c.name)
	}
	return names
}

// sample is what one contender showed in one cell of one round. What could not
// be measured is NaN, in JSON null.
type sample struct {
	Contender string `json:"contender"`
	Cell      string `json:"cell"`
	Round     int    `json:"round"`
	// Requests ended well within the timed window; Errors counts the warm-up's,
	// too, and Error is the first of them.
	Requests int    `json:"requests"`
	Errors   int    `json:"errors"`
	Error    string `json:"error,omitempty"`
	// CPU is that of the contender's process tree, Upstreams that of the
	// upstreams' process, in milliseconds per request.
	CPU       figure `json:"cpu_ms"`
	Upstreams figure `json:"upstreams_cpu_ms"`
	// Rate is requests per second.
	Rate figure `json:"rate"`
	// P50, P99 and P999 are of the time to the end of the answer, in
	// milliseconds. FirstByte and FirstByte99 are of the time to the first byte
	// of its body.
	P50         figure `json:"p50_ms"`
	P99         figure `json:"p99_ms"`
	P999        figure `json:"p999_ms"`
	FirstByte   figure `json:"first_byte_p50_ms"`
	FirstByte99 figure `json:"first_byte_p99_ms"`
	// Peak is the most resident memory of the process tree in this cell, MiB.
	// With PeakSinceStart it counts from the start, because the kernel did not
	// allow a reset.
	Peak           figure `json:"peak_mib"`
	PeakSinceStart bool   `json:"peak_since_start,omitempty"`
}

// lastBreath is how much later the end of a contender may be seen than what it
// broke.
const lastBreath = 250 * time.Millisecond

// errInterrupted is that the user has ended the measurement.
var errInterrupted = errors.New("interrupted")

// errEnded is that the contender has ended by itself.
var errEnded = errors.New("has ended")

// newLoad returns the load of a cell on a contender. The conversations are
// those of the map, made when they are not there yet.
func newLoad(con *contender, c cell, made map[traffic]*corpus, seq *atomic.Int64) *load {
	kind := con.traffic
	if kind == headers {
		kind = chats // the same bodies
	}
	if made[kind] == nil {
		made[kind] = newCorpus(kind, c)
	}
	return &load{
		urls: con.urls, path: made[kind].path, bodies: made[kind], clients: c.clients, seq: seq,
		sessionHeader: con.traffic == headers, stagger: chunks * c.pace,
	}
}

// sample measures one contender in one cell. It returns errEnded if the
// contender has ended by itself.
func (m *meter) sample(ctx context.Context, con *contender, c cell, round int, l *load) (*sample, error) {
	if con.proc != nil && con.proc.ended() {
		return nil, con.died()
	}
	runtime.GC()
	pid := con.pid()
	refused := resetPeak(pid)
	w := &window{pid: pid, mock: m.upstreams.proc.pid()}
	profiled := make(chan error, 1)
	r := l.run(ctx, m.warmup+l.stagger, m.timed, func() {
		go func() { profiled <- m.takeProfile(ctx, con, c, round) }()
		w.begin()
	}, w.end)
	if ctx.Err() != nil {
		return nil, errInterrupted
	}
	err := <-profiled
	suspect := err != nil || r.errors > 0
	if con.proc != nil && (con.proc.ended() || suspect && con.proc.endsWithin(lastBreath)) {
		return nil, con.died()
	}
	if err != nil {
		return nil, fmt.Errorf("profiling %s: %w", con.name, err)
	}
	s := &sample{
		Contender: con.name, Cell: c.name, Round: round, Requests: len(r.latencies), Errors: r.errors, Error: r.firstError,
		Peak: peakMiB(pid), Rate: figure(float64(len(r.latencies)) / r.elapsed.Seconds()),
	}
	s.PeakSinceStart = refused != nil && s.Peak.known()
	s.CPU, s.Upstreams = w.perRequest(len(r.latencies))
	s.times(r)
	return s, nil
}

// fewestFor999 is how many requests a p99.9 takes: of fewer it is the slowest.
const fewestFor999 = 1000

// times computes the latency figures from the times of single requests.
func (s *sample) times(r *outcome) {
	slices.Sort(r.latencies)
	slices.Sort(r.firsts)
	s.P50, s.P99, s.P999 = percentile(r.latencies, 0.5), percentile(r.latencies, 0.99), unknown
	if len(r.latencies) >= fewestFor999 {
		s.P999 = percentile(r.latencies, 0.999)
	}
	s.FirstByte, s.FirstByte99 = percentile(r.firsts, 0.5), percentile(r.firsts, 0.99)
}

// window takes the CPU times of a contender and of the upstreams at both ends
// of the timed window, the contender's closest to it.
type window struct {
	pid, mock                                int
	before, after, mockBefore, mockAfter     time.Duration
	beforeErr, afterErr, mockErr, mockEndErr error
	pids, mockPIDs                           []int
}

func (w *window) begin() {
	w.mockBefore, w.mockPIDs, w.mockErr = cpuTime(w.mock, nil)
	w.before, w.pids, w.beforeErr = cpuTime(w.pid, nil)
}

func (w *window) end() {
	w.after, _, w.afterErr = cpuTime(w.pid, w.pids)
	w.mockAfter, _, w.mockEndErr = cpuTime(w.mock, w.mockPIDs)
}

// perRequest returns milliseconds per request, of the contender and of the
// upstreams; unknown where there is no clock, and of no requests.
func (w *window) perRequest(requests int) (contender, upstreams figure) {
	contender, upstreams = unknown, unknown
	if requests == 0 {
		return contender, upstreams
	}
	if w.beforeErr == nil && w.afterErr == nil {
		contender = milliseconds((w.after - w.before) / time.Duration(requests))
	}
	if w.mockErr == nil && w.mockEndErr == nil {
		upstreams = milliseconds((w.mockAfter - w.mockBefore) / time.Duration(requests))
	}
	return contender, upstreams
}

// takeProfile has a Caddy profile itself for the timed window, and then tell
// what it has allocated since it started.
func (m *meter) takeProfile(ctx context.Context, con *contender, c cell, round int) error {
	if m.profile == "" || con.admin == "" {
		return nil
	}
	file := filepath.Join(m.profile, fmt.Sprintf("%s.%s.%d.pprof", con.name, c.name, round+1))
	if err := fetchProfile(ctx, con.admin, fmt.Sprintf("profile?seconds=%d", max(1, int(m.timed/time.Second))), file); err != nil {
		return err
	}
	return fetchProfile(ctx, con.admin, "allocs", strings.TrimSuffix(file, ".pprof")+".allocs.pprof")
}
