package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// benched is what a run has left.
type benched struct {
	tables, progress string
	samples          []struct{ Contender string }
	incomplete       []string
	err              error
}

// bench runs the program without building a Caddy, for contenders that need
// none.
func bench(ctx context.Context, t *testing.T, progress *onWrite, args ...string) benched {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	out := filepath.Join(t.TempDir(), "samples.json")
	var tables bytes.Buffer
	b := benched{err: run(ctx, append(args, "-caddy", "none", "-json", out), &tables, progress)}
	b.tables, b.progress = tables.String(), progress.buf.String()
	data, err := os.ReadFile(out)
	if err != nil {
		t.Fatalf("%v, %v\n%s", b.err, err, b.progress)
	}
	var file struct {
		Samples    []struct{ Contender string }
		Incomplete []string
	}
	if err := json.Unmarshal(data, &file); err != nil {
		t.Fatal(err)
	}
	b.samples, b.incomplete = file.Samples, file.Incomplete
	return b
}

// onWrite calls a function when something was written that has a text in it.
type onWrite struct {
	buf  bytes.Buffer
	text string
	call func()
}

// Write implements io.Writer.
func (w *onWrite) Write(p []byte) (int, error) {
	n, err := w.buf.Write(p)
	if w.text != "" && strings.Contains(string(p), w.text) {
		w.call()
	}
	return n, err
}

// A contender that dies is marked, and the others go on.
func TestDeadContenderIsMarked(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b := bench(t.Context(), t, &onWrite{}, "-rounds", "3", "-warmup", "20ms", "-time", "80ms", "-cells", "1k-c1",
		"-with", "mortal=0=exec "+self+" "+mortalRouter+" {port} {upstream1} 5", "-contenders", "direct,mortal")
	if b.err == nil {
		t.Error("no error")
	}
	n := 0
	for _, s := range b.samples {
		if s.Contender == "direct" {
			n++
		}
	}
	if n != 3 || len(b.samples) != n {
		t.Errorf("samples %v, want three of direct", b.samples)
	}
	if len(b.incomplete) != 1 || !strings.Contains(b.incomplete[0], "in round 1, cell 1k-c1: mortal has ended: enough of it") {
		t.Errorf("incomplete: %q", b.incomplete)
	}
	for _, want := range []string{"INCOMPLETE: in round 1, cell 1k-c1: mortal has ended", "mortal (ended)", "1k-c1 "} {
		if !strings.Contains(b.tables, want) {
			t.Errorf("no %q in\n%s", want, b.tables)
		}
	}
	if strings.Contains(b.tables, "No contender had errors") {
		t.Errorf("all is well in\n%s", b.tables)
	}
}

// What was measured before an interrupt is reported.
func TestInterruptedRunReports(t *testing.T) {
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	b := bench(ctx, t, &onWrite{text: "round 2", call: interrupt}, "-rounds", "100", "-warmup", "1ms", "-time", "20ms",
		"-cells", "1k-c1", "-contenders", "direct")
	if b.err == nil || errors.Is(b.err, context.DeadlineExceeded) {
		t.Errorf("error %v", b.err)
	}
	if len(b.samples) != 2 || len(b.incomplete) != 1 || !strings.Contains(b.incomplete[0], "in round 3, cell 1k-c1: interrupted") {
		t.Errorf("%d samples, incomplete: %q", len(b.samples), b.incomplete)
	}
	for _, want := range []string{"INCOMPLETE: in round 3", "Requests per second", "direct"} {
		if !strings.Contains(b.tables, want) {
			t.Errorf("no %q in\n%s", want, b.tables)
		}
	}
}

func TestExecutableWithoutProc(t *testing.T) {
	file := filepath.Join(t.TempDir(), "bench")
	if err := os.WriteFile(file, nil, 0o700); err != nil { //nolint:gosec // it is to be executable
		t.Fatal(err)
	}
	nobody := func() (string, error) { return "", errors.New("no /proc") }
	if got, err := executable(nobody, file); err != nil || got != file {
		t.Errorf("got %q, %v, want what it was called by", got, err)
	}
	if got, err := executable(func() (string, error) { return "/x", nil }, file); err != nil || got != "/x" {
		t.Errorf("got %q, %v, want what the system says", got, err)
	}
	if got, err := executable(nobody, file+"2"); err == nil {
		t.Errorf("got %q of a file that is not there", got)
	}
}
