package trace

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"time"
)

const (
	// mooncakeBlock is the block size of Mooncake's traces, in tokens.
	mooncakeBlock = 512
	// maxLine bounds a line: two million blocks or so.
	maxLine = 32 << 20
	// maxTokens, maxSeconds and maxNumber bound what a line may say. Sums of such
	// values do not overflow.
	maxTokens  = 1 << 30
	maxSeconds = 1e9
	maxNumber  = 1 << 40
)

// line is one line of either format. The fields of a header, of a request and of a
// Mooncake request have different names.
type line struct {
	Name   *string `json:"name"`
	Block  *int    `json:"block"`
	Closed bool    `json:"closed"`

	T       *float64 `json:"t"`
	In      *int     `json:"in"`
	Out     *int     `json:"out"`
	Hashes  []int64  `json:"h"`
	Session *int     `json:"s"`
	Turn    int      `json:"k"`
	Think   float64  `json:"think"`

	Timestamp *float64 `json:"timestamp"` // milliseconds
	InputLen  *int     `json:"input_length"`
	OutputLen *int     `json:"output_length"`
	HashIDs   []int64  `json:"hash_ids"`
}

// ReadFile reads a trace from a file, gzipped or plain.
func ReadFile(path string) (*Trace, error) {
	f, err := os.Open(path) //nolint:gosec // the user names it
	if err != nil {
		return nil, err
	}
	defer f.Close()
	t, err := Read(f)
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", filepath.Base(path), err)
	}
	if t.Name == "" {
		t.Name, _, _ = strings.Cut(filepath.Base(path), ".")
	}
	return t, nil
}

// Read reads a trace in either of two formats, gzipped or plain:
//   - a header {"name","block","closed"}, then requests
//     {"t","in","out","h","s","k","think"};
//   - Mooncake's {"timestamp","input_length","output_length","hash_ids"} without a
//     header, in blocks of 512 tokens.
//
// Errors name the line and the value.
func Read(r io.Reader) (*Trace, error) {
	in := bufio.NewReader(r)
	if magic, _ := in.Peek(2); bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(in)
		if err != nil {
			return nil, fmt.Errorf("decompressing: %w", err)
		}
		defer z.Close()
		return readLines(z)
	}
	return readLines(in)
}

func readLines(r io.Reader) (*Trace, error) {
	p := parser{trace: new(Trace), before: make(map[uint64]uint64)}
	s := bufio.NewScanner(r)
	s.Buffer(make([]byte, 64<<10), maxLine)
	n := 0
	for s.Scan() {
		n++
		if len(bytes.TrimSpace(s.Bytes())) == 0 {
			continue
		}
		if err := p.line(s.Bytes()); err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
	}
	if err := s.Err(); err != nil {
		return nil, fmt.Errorf("line %d: %w", n+1, err)
	}
	return p.done()
}

// parser makes a trace of its lines.
type parser struct {
	trace    *Trace
	before   map[uint64]uint64 // the hash before each block, 0 before the first
	hashes   []uint64          // spare room for blocks
	mooncake bool
	sessions map[int]int // the last turn of each, in a closed loop
}

func (p *parser) line(raw []byte) error {
	var l line
	if err := json.Unmarshal(raw, &l); err != nil {
		return fmt.Errorf("parsing %.60q: %w", raw, err)
	}
	t := p.trace
	switch {
	case t.BlockTokens > 0:
		return p.request(&l)
	case l.Timestamp != nil:
		p.mooncake, t.BlockTokens = true, mooncakeBlock
		return p.request(&l)
	case l.Block == nil:
		return fmt.Errorf(`%.60q is neither a header with "block" nor a Mooncake request with "timestamp"`, raw)
	}
	if l.Name != nil {
		t.Name = *l.Name
	}
	t.BlockTokens, t.Closed, t.Sessions = *l.Block, l.Closed, true
	p.sessions = make(map[int]int)
	return within("block", l.Block, 1, maxTokens)
}

// within checks that there is a value between two others.
func within[T int | float64](name string, v *T, least, most T) error {
	switch {
	case v == nil:
		return fmt.Errorf("%s is missing", name)
	case *v != *v || *v < least || *v > most: // NaN is none
		return fmt.Errorf("%s is %v, want %v to %v", name, *v, least, most)
	}
	return nil
}

func (p *parser) request(l *line) error {
	names := [...]string{"t", "in", "out", "h"}
	at, in, out, ids, unit := l.T, l.In, l.Out, l.Hashes, time.Second
	if p.mooncake {
		names = [...]string{"timestamp", "input_length", "output_length", "hash_ids"}
		at, in, out, ids, unit = l.Timestamp, l.InputLen, l.OutputLen, l.HashIDs, time.Millisecond
	}
	err := errors.Join(
		within(names[0], at, 0, maxSeconds*float64(time.Second/unit)),
		within(names[1], in, 1, maxTokens), within(names[2], out, 0, maxTokens),
	)
	if err != nil {
		return err
	}
	r := Request{At: time.Duration(math.Round(*at * float64(unit))), In: *in, Out: max(1, *out)}
	if err := p.session(l, &r); err != nil {
		return err
	}
	if r.Blocks, err = p.blocks(ids, *in, names[3]); err != nil {
		return err
	}
	p.trace.Requests = append(p.trace.Requests, r)
	return nil
}

func (p *parser) session(l *line, r *Request) error {
	switch {
	case p.mooncake:
		return nil
	case l.Session == nil && !p.trace.Closed:
		p.trace.Sessions = false
		return nil
	}
	if err := errors.Join(within("s", l.Session, 0, maxNumber), within("k", &l.Turn, 0, maxNumber)); err != nil {
		return err
	}
	r.Session, r.Turn = *l.Session, l.Turn
	if !p.trace.Closed {
		return nil
	}
	if last, ok := p.sessions[r.Session]; ok && l.Turn <= last {
		return fmt.Errorf("k is %d, but session %d had turn %d before", l.Turn, r.Session, last)
	}
	p.sessions[r.Session] = l.Turn
	r.Think = time.Duration(math.Round(l.Think * float64(time.Second)))
	return within("think", &l.Think, 0, maxSeconds)
}

// blocks returns the hashes of the full blocks. A last block that is not full may
// be listed, too. An id stands for the whole prefix, so that it always follows the
// same one.
func (p *parser) blocks(ids []int64, tokens int, name string) ([]uint64, error) {
	full := tokens / p.trace.BlockTokens
	if len(ids) < full || len(ids) > full+1 {
		return nil, fmt.Errorf("%s has %d ids, want %d for %d tokens in blocks of %d", name, len(ids), full, tokens, p.trace.BlockTokens)
	}
	if len(p.hashes) < full {
		p.hashes = make([]uint64, max(full, 64<<10))
	}
	hashes := p.hashes[:full:full]
	p.hashes = p.hashes[full:]
	last := uint64(0)
	for i := range hashes {
		if ids[i] < 0 || ids[i] >= maxID {
			return nil, fmt.Errorf("%s has the id %d, want 0 to %d", name, ids[i], int64(maxID-1))
		}
		h := Hash(uint64(ids[i]))
		if before, known := p.before[h]; !known {
			p.before[h] = last
		} else if before != last {
			return nil, fmt.Errorf("%s has the id %d at position %d, but it followed another id before: ids must stand for the whole prefix", name, ids[i], i)
		}
		hashes[i], last = h, h
	}
	return hashes, nil
}

func (p *parser) done() (*Trace, error) {
	t := p.trace
	if len(t.Requests) == 0 {
		return nil, errors.New("the trace has no requests")
	}
	t.Sort()
	return t, nil
}

// Files lists the traces of a directory, by name; of anything else, its path alone.
func Files(path string) []string {
	plain, _ := filepath.Glob(filepath.Join(path, "*.jsonl"))
	gzipped, _ := filepath.Glob(filepath.Join(path, "*.jsonl.gz"))
	if len(plain)+len(gzipped) == 0 {
		return []string{path} // if it cannot be read, that says why
	}
	return append(plain, gzipped...)
}
