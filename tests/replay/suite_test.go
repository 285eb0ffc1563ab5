package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// conversations is a small trace: users who each go on with their own prompt.
func conversations(name string) string {
	var b strings.Builder
	fmt.Fprintf(&b, `{"name":%q,"block":16,"closed":false}`+"\n", name)
	for i := range 60 {
		session, turn := i%6, i/6
		var ids []string
		for k := range 4 * (turn + 1) {
			ids = append(ids, fmt.Sprint(session*1000+k))
		}
		fmt.Fprintf(&b, `{"t":%g,"in":%d,"out":5,"think":-1,"h":[%s],"s":%d,"k":%d}`+"\n", float64(i)*0.3, 64*(turn+1)+3, strings.Join(ids, ","), session, turn)
	}
	return b.String()
}

func TestTheSuite(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"toolagent_like", "another"} {
		if err := os.WriteFile(filepath.Join(dir, name+".jsonl"), []byte(conversations(name)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	args := []string{"-suite", "-traces", dir, "-seed", "1,2", "-knowledge", "both", "-policy", "dynamo,lmetric,min_ttft,sticky_hash,predicted_latency,pool", "-told-kv-tokens", "0.5"}
	o, err := parse(args, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	cells, err := o.cells(io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	// Both traces have 3 loads, one of them overload, each without keys and with.
	if len(cells) != 14 {
		t.Fatalf("%d cells", len(cells))
	}
	if err = o.fill(cells, io.Discard); err != nil {
		t.Fatal(err)
	}
	for _, c := range cells {
		want := 10 // with dynamo, predicted_latency, lmetric and min_ttft twice
		if c.sessions == "none" {
			want--
		}
		if len(c.policies) != want || c.policies["dynamo"].Relative.MeanTTFT != 1 || c.bestExact == "" {
			t.Errorf("%s: %d policies, base %+v, best with exact knowledge %q", c, len(c.policies), c.policies["dynamo"], c.bestExact)
		}
		for name, r := range c.policies {
			if name != "pool" && name != "predicted_latency" && !strings.HasSuffix(name, exactly) && r.MeanTTFT < c.policies[c.best].MeanTTFT {
				t.Errorf("%s: %s is faster than the best, %s", c, name, c.best)
			}
		}
	}
	var out bytes.Buffer
	if err := o.write(&out, cells); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(out.String(), "\n"); n != 1+3*(3+14)+13 {
		t.Errorf("a table of %d lines:\n%s", n, out.String())
	}

	for i, c := range cells[1:] {
		if c.over("predicted_latency") > cells[i].over("predicted_latency") {
			t.Errorf("%s comes after %s, which is better", c, cells[i])
		}
	}

	var picture bytes.Buffer
	if err = errors.Join(o.draw(&picture, cells), xml.Unmarshal(picture.Bytes(), new(struct{}))); err != nil {
		t.Error(err)
	}
	bars := 0
	for _, c := range cells {
		bars += len(c.policies)
	}
	var means bytes.Buffer
	if err = errors.Join(o.drawMeans(&means, o.totals(cells)), xml.Unmarshal(means.Bytes(), new(struct{}))); err != nil {
		t.Error(err)
	}
	for _, c := range []struct {
		picture string
		bars    int
	}{{picture.String(), bars}, {means.String(), len(o.totals(cells))}} {
		if got := strings.Count(c.picture, "<rect") - 1; got != c.bars || strings.Contains(c.picture, "%!") {
			t.Errorf("%d bars, want %d, or a bad format:\n%s", got, c.bars, c.picture)
		}
	}
}

func TestHindsightIsNoWorseThanTheRules(t *testing.T) {
	var out bytes.Buffer
	args := []string{"-hindsight", "-match", "^prompt_512, 2 x 60K, poisson, low$", "-policy", "predicted_latency,round_robin", "-tries", "20"}
	if err := run(args, &out, io.Discard); err != nil {
		t.Fatal(err)
	}
	_, row, _ := strings.Cut(out.String(), "low")
	var ttft, end, us, best float64
	var rule string
	if _, err := fmt.Sscan(row, &ttft, &us, &best, &rule, &end); err != nil {
		t.Fatalf("%v in:\n%s", err, out.String())
	}
	if ttft <= 0 || us < 1 || best < 1 || rule != "round_robin" || end <= ttft {
		t.Errorf("a table of\n%s", out.String())
	}
}
