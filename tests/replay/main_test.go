package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "small.jsonl")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

const small = `{"name":"small","block":16,"closed":false}
{"t":0,"in":40,"out":3,"think":-1,"h":[0,1],"s":0,"k":0}
{"t":1,"in":40,"out":3,"think":-1,"h":[0,1],"s":1,"k":0}
{"t":2,"in":20,"out":3,"think":-1,"h":[2],"s":2,"k":0}
`

func TestReportsEachCell(t *testing.T) {
	args := []string{"-trace", write(t, small), "-policy", "lmetric,dynamo", "-speed", "1,2", "-workers", "2", "-kv-tokens", "1000", "-knowledge", "exact", "-slow", "0:2,1:1.5@0.5-1", "-join", "1@0.2", "-engine", "small"}
	var out, progress bytes.Buffer
	if err := run(append(args, "-json"), &out, &progress); err != nil {
		t.Fatal(err)
	}
	var got report
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if got.Trace != "small" || got.Requests != 3 || len(got.Cells) != 4 || len(got.Slow) != 2 || got.Slow[1].From != 0.5 || got.Join[1] != 0.2 || got.Engine != "small" {
		t.Fatalf("got %s", out.Bytes())
	}
	for i, c := range got.Cells {
		policy, knowledge, speed := "lmetric", "exact", 1+float64(i/2)
		if i%2 == 1 {
			policy = "dynamo"
		}
		if c.Policy != policy || c.Knowledge != knowledge || c.Speed != speed || c.Relative == nil {
			t.Errorf("cell %d is %+v", i, c)
		}
		if i%2 == 0 && c.Relative.MeanTTFT != 1 {
			t.Errorf("the first policy is %v of itself", c.Relative.MeanTTFT)
		}
	}
	out.Reset()
	if err := run(args, &out, &progress); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(out.String(), "\n"); n != 6 || !strings.Contains(out.String(), "lmetric") {
		t.Errorf("a table of %d lines:\n%s", n, out.String())
	}
}

func TestBadFlags(t *testing.T) {
	path := write(t, small)
	for want, args := range map[string][]string{
		"-trace is missing":       {},
		"no such file":            {"-trace", path + "x"},
		`-policy has "x"`:         {"-trace", path, "-policy", "dynamo,x"},
		`"dynamo" twice`:          {"-trace", path, "-policy", "dynamo,dynamo"},
		`-speed has "0"`:          {"-trace", path, "-speed", "1,0"},
		`-slow has "9:2"`:         {"-trace", path, "-slow", "9:2"},
		`-slow has "x"`:           {"-trace", path, "-slow", "1:x"},
		`-slow has "1:2@1-0.5"`:   {"-trace", path, "-slow", "1:2@1-0.5"},
		`-slow has "1:2@x-1"`:     {"-trace", path, "-slow", "1:2@x-1"},
		`-join has "1@0"`:         {"-trace", path, "-join", "1@0"},
		`-join has "9@0.5"`:       {"-trace", path, "-join", "9@0.5"},
		`-kv-tokens has "0"`:      {"-trace", path, "-kv-tokens", "1,0"},
		"2 values of KV tokens":   {"-trace", path, "-kv-tokens", "100,100"},
		`-told-kv-tokens has "y"`: {"-trace", path, "-told-kv-tokens", "xy"},
		`unknown engine "x"`:      {"-trace", path, "-engine", "x"},
		"ranks is -1":             {"-trace", path, "-ranks", "-1"},
		"there is none":           {"-trace", path, "-workers", "1", "-join", "0@0.5"},
		`-knowledge is "some"`:    {"-trace", path, "-knowledge", "some"},
		`-sessions is "some"`:     {"-trace", path, "-sessions", "some"},
		`-seed has "1"`:           {"-trace", path, "-seed", "1,1"},
		`-seed has "-1"`:          {"-trace", path, "-seed", "-1"},
		"-saturation is missing":  {"-trace", path, "-speed", "low"},
		`-saturation is "x"`:      {"-trace", path, "-saturation", "x"},
		`-half is "third"`:        {"-trace", path, "-half", "third"},
		`unexpected argument "y"`: {"-trace", path, "y"},
		"line 1":                  {"-trace", write(t, "{}")},
		"does not fit":            {"-trace", path, "-kv-tokens", "20"},
	} {
		var out, progress bytes.Buffer
		if err := run(args, &out, &progress); err == nil || !strings.Contains(err.Error(), want) || out.Len() > 0 {
			t.Errorf("%v: error %v and output %q, want %q", args, err, out.String(), want)
		}
	}
}

func TestWriteErrorsAreReported(t *testing.T) {
	var progress bytes.Buffer
	for _, more := range [][]string{nil, {"-json"}} {
		if err := run(append([]string{"-trace", write(t, small)}, more...), failing{}, &progress); !errors.Is(err, os.ErrClosed) {
			t.Errorf("%v: error %v", more, err)
		}
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, os.ErrClosed }

func TestCurvesAndCharts(t *testing.T) {
	dir := t.TempDir()
	args := []string{"-trace", write(t, conversations("x")), "-policy", "dynamo,lmetric", "-workers", "2", "-speed", "1,2"}
	draw := func(name string, more ...string) (out, svg string) {
		var b, progress bytes.Buffer
		path := filepath.Join(dir, name)
		if err := run(append(append(args, "-svg", path), more...), &b, &progress); err != nil {
			t.Fatal(err)
		}
		drawn, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return b.String(), string(drawn)
	}
	out, svg := draw("lines.svg", "-buckets", "5", "-json")
	var got report
	if err := json.Unmarshal([]byte(out), &got); err != nil {
		t.Fatal(err)
	}
	for _, c := range got.Cells {
		n := 0
		for _, b := range c.Buckets {
			n += b.Requests
			if b.P50TTFT <= 8 || b.MeanTTFT <= 8 {
				t.Errorf("%s: %+v", c.Policy, b)
			}
		}
		if len(c.Buckets) != 5 || n != 60 {
			t.Errorf("%s: %d requests in %d buckets", c.Policy, n, len(c.Buckets))
		}
	}
	if n := strings.Count(svg, "<polyline"); n != 2*2*2 {
		t.Errorf("%d lines in %s", n, svg)
	}
	if _, again := draw("lines.svg", "-buckets", "5"); again != svg {
		t.Error("two drawings of the same differ")
	}
	if out, _ := draw("lines.svg", "-buckets", "5"); strings.Count(out, "\n") != 2+4+2*(2+1+5) {
		t.Errorf("a table of\n%s", out)
	}
	if _, svg := draw("bars.svg"); strings.Count(svg, "<rect") != 1+2+2*2*2 {
		t.Errorf("bars: %s", svg)
	}
}
