package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
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
	args := []string{"-suite", "-traces", dir, "-seed", "1,2", "-knowledge", "both", "-policy", "dynamo,lmetric,min_ttft,sticky_hash,predicted_latency,pool", "-told-kv-tokens", "x0.5"}
	o, err := parse(args, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	got, err := o.runSuite(io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	// Both traces have 3 loads, one of them overload, each without keys and with.
	if len(got.Cells) != 14 {
		t.Fatalf("%d cells", len(got.Cells))
	}
	for _, c := range got.Cells {
		want := 10 // with dynamo, predicted_latency, lmetric and min_ttft twice
		if c.Sessions == "none" {
			want--
		}
		if len(c.Policies) != want || c.Policies["dynamo"].Relative.MeanTTFT != 1 || c.Policies["dynamo"].Requests != 54 {
			t.Errorf("%s: %d policies, base %+v", c.String(), len(c.Policies), c.Policies["dynamo"])
		}
		for name, r := range c.Policies {
			if name != "pool" && name != "predicted_latency" && !strings.HasSuffix(name, exactly) && r.MeanTTFT < c.Policies[c.Best].MeanTTFT {
				t.Errorf("%s: %s is faster than the best, %s", c.String(), name, c.Best)
			}
			if exact := r.Knowledge == "exact"; exact != strings.HasSuffix(name, exactly) && name != "pool" {
				t.Errorf("%s has %s knowledge", name, r.Knowledge)
			}
		}
		if c.OverBest[c.Best] != 1 || c.BestExact == "" {
			t.Errorf("%s: best %q is %v of itself, best with exact knowledge %q", c.String(), c.Best, c.OverBest[c.Best], c.BestExact)
		}
	}
	for _, p := range got.Policies {
		if p.Policy == "dynamo" && (p.MeanTTFT != 1 || p.Cells != 14 || p.OverBest < 1 || p.Worst < p.OverBest) {
			t.Errorf("the base is %+v in all", p)
		}
	}
	var out bytes.Buffer
	if err := writeSuite(&out, o, got); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(out.String(), "\n"); n != 1+3*(3+14)+13 {
		t.Errorf("a table of %d lines:\n%s", n, out.String())
	}
}

func TestSetupsByName(t *testing.T) {
	for name, want := range map[string][]setup{
		"cc_agent_a.jsonl.gz": {{"cc_agent_a.", 8, 2_000_000, 0, false}, {"cc_agent_a.", 32, 500_000, 0, false}},
		"cc_agent_b.jsonl.gz": {otherwise}, "synth:idle": {{"synth:idle", 8, 200_000, 0, true}}, "synth:chat": {{"synth:", 8, 200_000, 0, false}},
	} {
		if got := setupsOf(name); !slices.Equal(got, want) {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestOnlyTheRoutersOwnPoliciesHaveKeys(t *testing.T) {
	o := &options{policies: []string{"dynamo", "lmetric", "sticky_hash", "predicted_latency", "pool"}, knowledge: "approximate"}
	for sessions, want := range map[string][]variant{
		"none": {{"dynamo", false, false}, {"lmetric", false, false}, {"predicted_latency", false, false}, {"pool", false, false}},
		"key":  {{"dynamo", false, false}, {"lmetric", false, false}, {"sticky_hash", false, false}, {"predicted_latency", false, true}, {"pool", false, false}},
	} {
		if got, err := o.variants(sessions); err != nil || !slices.Equal(got, want) {
			t.Errorf("sessions %s: %v, %v", sessions, got, err)
		}
	}
}
