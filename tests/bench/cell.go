package main

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"runtime"
	"slices"
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
	// P50, P99 and P999 are of the time to the end of the answer, FirstByte and
	// FirstByte99 of the time to the first byte of its body, in milliseconds.
	P50         figure `json:"p50_ms"`
	P99         figure `json:"p99_ms"`
	P999        figure `json:"p999_ms"`
	FirstByte   figure `json:"first_byte_p50_ms"`
	FirstByte99 figure `json:"first_byte_p99_ms"`
	// Peak is the most resident memory of the process tree in this cell, MiB;
	// since its start where the kernel does not let it be reset.
	Peak figure `json:"peak_mib"`
}

// sample measures one contender in one cell.
func (m *meter) sample(ctx context.Context, con *contender, c cell, round int, bodies *corpus) (*sample, error) {
	runtime.GC()
	pid, mock := con.pid(), m.upstreams.proc.pid()
	resetPeak(pid)
	l := &load{
		urls: con.urls, path: bodies.path, bodies: bodies, clients: c.clients, seq: &m.seq,
		sessionHeader: con.traffic == headers, stagger: chunks * c.pace,
	}
	var cpu, mockCPU [2]time.Duration
	var known [2]error
	profiled := make(chan error, 1)
	r := l.run(ctx, m.warmup+l.stagger, m.timed, func() {
		cpu[0], known[0] = cpuTime(pid)
		mockCPU[0], _ = cpuTime(mock)
		go func() { profiled <- m.takeProfile(ctx, con, c, round) }()
	}, func() {
		cpu[1], known[1] = cpuTime(pid)
		mockCPU[1], _ = cpuTime(mock)
	})
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if err := <-profiled; err != nil {
		return nil, fmt.Errorf("profiling %s: %w", con.name, err)
	}
	if con.proc != nil && con.proc.ended() {
		return nil, fmt.Errorf("%s has ended: %s", con.name, con.proc.output())
	}
	s := &sample{
		Contender: con.name, Cell: c.name, Round: round, Requests: len(r.latencies), Errors: r.errors, Error: r.firstError,
		CPU: unknown, Upstreams: unknown, Peak: peakMiB(pid),
		Rate: figure(float64(len(r.latencies)) / r.elapsed.Seconds()),
	}
	if n := time.Duration(len(r.latencies)); n > 0 {
		if known[0] == nil && known[1] == nil {
			s.CPU = milliseconds((cpu[1] - cpu[0]) / n)
		}
		if mockCPU[1] > 0 {
			s.Upstreams = milliseconds((mockCPU[1] - mockCPU[0]) / n)
		}
	}
	slices.Sort(r.latencies)
	slices.Sort(r.firsts)
	s.P50, s.P99, s.P999 = percentile(r.latencies, 0.5), percentile(r.latencies, 0.99), percentile(r.latencies, 0.999)
	s.FirstByte, s.FirstByte99 = percentile(r.firsts, 0.5), percentile(r.firsts, 0.99)
	return s, nil
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
