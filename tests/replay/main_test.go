package main

import (
	"bytes"
	"io"
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
	args := []string{"-trace", write(t, small), "-policy", "lmetric,dynamo", "-speed", "1,2", "-workers", "2", "-kv-tokens", "1000", "-knowledge", "exact", "-slow", "1:1.5@0.5-1", "-engine", "small"}
	o, err := parse(args, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	_, got, err := o.replay(io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 4 {
		t.Fatalf("%d cells", len(got))
	}
	for i, c := range got {
		policy, speed := []string{"lmetric", "dynamo"}[i%2], 1+float64(i/2)
		if c.Policy != policy || c.Knowledge != "exact" || c.Speed != speed || i%2 == 0 && c.Relative.MeanTTFT != 1 {
			t.Errorf("cell %d is %+v", i, c)
		}
	}
	var out bytes.Buffer
	if err := run(args, &out, io.Discard); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(out.String(), "\n"); n != 6 || !strings.Contains(out.String(), "lmetric") {
		t.Errorf("a table of %d lines:\n%s", n, out.String())
	}
}

func TestBadFlags(t *testing.T) {
	path := write(t, small)
	for want, args := range map[string][]string{
		`-policy has "x"`:         {"-trace", path, "-policy", "dynamo,x"},
		`-speed has "0"`:          {"-trace", path, "-speed", "1,0"},
		`-slow is "x"`:            {"-trace", path, "-slow", "x"},
		`-kv-tokens has "0"`:      {"-trace", path, "-kv-tokens", "1,0"},
		`-told-kv-tokens has "y"`: {"-trace", path, "-told-kv-tokens", "xy"},
		`unknown engine "x"`:      {"-trace", path, "-engine", "x"},
		"there is no trace":       {"-suite", "-traces", t.TempDir()},
		`-knowledge is "exact"`:   {"-suite", "-traces", ".", "-knowledge", "exact"},
	} {
		if err := run(args, io.Discard, io.Discard); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: error %v, want %q", args, err, want)
		}
	}
}
