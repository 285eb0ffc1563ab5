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
		return unmarshalError(err, raw)
	}
	if p.trace.BlockTokens == 0 {
		return p.first(&l, raw)
	}
	return p.request(&l)
}

// first reads the header, or the first request of Mooncake's format.
func (p *parser) first(l *line, raw []byte) error {
	if l.Timestamp != nil {
		p.mooncake, p.trace.BlockTokens = true, mooncakeBlock
		return p.request(l)
	}
	if l.Block == nil {
		return fmt.Errorf(`%s is neither a header with "block" nor a Mooncake request with "timestamp"`, excerpt(raw))
	}
	if *l.Block < 1 || *l.Block > maxTokens {
		return fmt.Errorf("block is %d, want 1 to %d", *l.Block, maxTokens)
	}
	if l.Name != nil {
		p.trace.Name = *l.Name
	}
	p.trace.BlockTokens, p.trace.Closed, p.trace.Sessions = *l.Block, l.Closed, true
	if l.Closed {
		p.sessions = make(map[int]int)
	}
	return nil
}

func (p *parser) request(l *line) error {
	names := [...]string{"t", "in", "out", "h"}
	at, in, out, ids, unit := l.T, l.In, l.Out, l.Hashes, float64(time.Second)
	if p.mooncake {
		names = [...]string{"timestamp", "input_length", "output_length", "hash_ids"}
		at, in, out, ids, unit = l.Timestamp, l.InputLen, l.OutputLen, l.HashIDs, float64(time.Millisecond)
	}
	within := func(i int, v *int, least int) error {
		if v == nil {
			return fmt.Errorf("%s is missing", names[i])
		}
		if *v < least || *v > maxTokens {
			return fmt.Errorf("%s is %d, want %d to %d", names[i], *v, least, maxTokens)
		}
		return nil
	}
	switch {
	case at == nil:
		return fmt.Errorf("%s is missing", names[0])
	case !(*at >= 0 && *at*unit <= maxSeconds*float64(time.Second)):
		return fmt.Errorf("%s is %v, want 0 to %g s", names[0], *at, float64(maxSeconds))
	}
	if err := errors.Join(within(1, in, 1), within(2, out, 0)); err != nil {
		return err
	}
	r := Request{At: time.Duration(math.Round(*at * unit)), In: *in, Out: max(1, *out)}
	if err := p.session(l, &r); err != nil {
		return err
	}
	var err error
	if r.Blocks, err = p.blocks(ids, *in, names[3]); err != nil {
		return err
	}
	p.trace.Requests = append(p.trace.Requests, r)
	return nil
}

func (p *parser) session(l *line, r *Request) error {
	if p.mooncake {
		return nil
	}
	switch {
	case l.Session == nil && p.trace.Closed:
		return errors.New("s is missing in a closed loop")
	case l.Session == nil:
		p.trace.Sessions = false
		return nil
	case *l.Session < 0 || *l.Session > maxNumber:
		return fmt.Errorf("s is %d, want 0 to %d", *l.Session, maxNumber)
	case l.Turn < 0 || l.Turn > maxNumber:
		return fmt.Errorf("k is %d, want 0 to %d", l.Turn, maxNumber)
	}
	r.Session, r.Turn = *l.Session, l.Turn
	if !p.trace.Closed {
		return nil
	}
	if last, ok := p.sessions[r.Session]; ok && l.Turn <= last {
		return fmt.Errorf("k is %d, but session %d had turn %d before", l.Turn, r.Session, last)
	}
	p.sessions[r.Session] = l.Turn
	if !(l.Think >= 0 && l.Think <= maxSeconds) {
		return fmt.Errorf("think is %v, want 0 to %g s", l.Think, float64(maxSeconds))
	}
	r.Think = time.Duration(math.Round(l.Think * float64(time.Second)))
	return nil
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

// unmarshalError says which value is wrong.
func unmarshalError(err error, raw []byte) error {
	if typ, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return fmt.Errorf("%s is a JSON %s, want %s", typ.Field, typ.Value, typ.Type)
	}
	return fmt.Errorf("parsing %s: %w", excerpt(raw), err)
}

func excerpt(raw []byte) string {
	const most = 60
	if len(raw) > most {
		return fmt.Sprintf("%q...", raw[:most])
	}
	return fmt.Sprintf("%q", raw)
}

// Files lists the traces of a directory, by name; of anything else, its path alone.
func Files(path string) (files []string, err error) {
	if info, err := os.Stat(path); err != nil || !info.IsDir() {
		return []string{path}, nil //nolint:nilerr // whoever reads the file reports it
	}
	for _, pattern := range []string{"*.jsonl", "*.jsonl.gz"} {
		found, err := filepath.Glob(filepath.Join(path, pattern))
		if err != nil {
			return nil, err
		}
		files = append(files, found...)
	}
	return files, nil
}
