package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestMain lets the test binary be the program's own processes, as the program
// itself can.
func TestMain(m *testing.M) {
	child, err := runChild(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if !child {
		os.Exit(m.Run())
	}
}

func TestCommandLineIsChecked(t *testing.T) {
	for _, args := range [][]string{
		{"-contenders", "caddy,nobody"},
		{"-cells", "3k-c1"},
		{"-with", "x"},
		{"-with", "x=port=cmd"},
		{"-with", "x=99999=cmd"},
		{"-with", "caddy=0=cmd"},
		{"-with", "x=0=cmd", "-with", "x=0=cmd"},
		{"-with", "a/b=0=cmd"},
		{"-with", `a\b=0=cmd`},
		{"-with", "..=0=cmd"},
		{"-with", "a,b=0=cmd"},
		{"-contenders", "caddy,kv_router, caddy"},
		{"-cells", "1k-c1,1k-c1"},
		{"-rounds", "0"},
		{"rest"},
	} {
		if _, err := parse(args, io.Discard); err == nil {
			t.Errorf("%v is accepted", args)
		}
	}
	o, err := parse([]string{"-with", "x=1234=run --a=b", "-contenders", "x,caddy", "-cells", "16k-c1"}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if x := o.contenders[0]; x.name != "x" || x.port != 1234 || x.command != "run --a=b" {
		t.Errorf("got %+v", x)
	}
	if len(o.contenders) != 2 || len(o.cells) != 1 || o.cells[0].size != 16<<10 {
		t.Errorf("got %v %v", contenderNames(o.contenders), o.cells)
	}
}

func TestIncompleteAnswersAreErrors(t *testing.T) {
	const sse, plain = "text/event-stream; charset=utf-8", "application/json"
	for _, c := range []struct {
		contentType, end string
		good             bool
	}{
		{sse, "data: {}\n\ndata: [DONE]\n\n", true},
		{sse, "data: {}\n\n", false},
		{sse, "data: {}\n\ndata: [DO", false},
		{plain, `{"choices":[],"usage":{"prompt_tokens":1}}`, true},
		{plain, `{"choices":[],"usage":{"prompt_tokens":1}`[:30], false},
		{plain, `{"error":{}}`, false},
		{plain, ``, false},
	} {
		if err := whole(c.contentType, []byte(c.end)); (err == nil) != c.good {
			t.Errorf("%q: %v", c.end, err)
		}
	}
}

// The whole program, briefly: all built-in contenders and one of -with.
func TestBenchRuns(t *testing.T) {
	if testing.Short() {
		t.Skip("builds a Caddy")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	out := filepath.Join(t.TempDir(), "samples.json")
	var tables, progress bytes.Buffer
	err := run(ctx, []string{
		"-rounds", "1", "-time", "100ms", "-warmup", "50ms", "-cells", "1k-c1,16k-s100-c32", "-md", "-json", out,
		"-with", "second=0=exec {caddy} reverse-proxy --from http://127.0.0.1:{port} --to {upstream1} --to {upstream2}",
	}, &tables, &progress)
	if err != nil {
		t.Fatalf("%v\n%s", err, progress.String())
	}
	for _, want := range []string{
		"| direct | caddy | kv_router | kv_router-session | kv_router-header | kv_router-tokens | second |",
		"### CPU time per request", "| 1k-c1 |", "| 16k-s100-c32 |", "No contender had errors.",
	} {
		if !strings.Contains(tables.String(), want) {
			t.Errorf("no %q in\n%s", want, tables.String())
		}
	}
	var samples struct{ Samples []map[string]any }
	data, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	mustRead(t, string(data), &samples)
	if len(samples.Samples) != 14 {
		t.Errorf("%d samples", len(samples.Samples))
	}
	for _, s := range samples.Samples {
		if s["requests"].(float64) == 0 || s["errors"].(float64) != 0 || s["p50_ms"] == nil {
			t.Errorf("got %v", s)
		}
		if _, _, noClock := cpuTime(os.Getpid(), nil); noClock == nil && s["contender"] != "direct" && s["cpu_ms"] == nil {
			t.Errorf("no CPU time: %v", s)
		}
	}
}

func mustRead(t *testing.T, s string, into any) {
	t.Helper()
	if err := json.Unmarshal([]byte(s), into); err != nil {
		t.Fatalf("%s: %v", s, err)
	}
}
