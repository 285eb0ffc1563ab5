package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

// writeTrace writes a trace of sessions that share a beginning of two blocks, with so
// many turns each.
func writeTrace(t *testing.T, closed bool, sessions, turns int) string {
	t.Helper()
	const block = 64
	var b bytes.Buffer
	fmt.Fprintf(&b, `{"name":"made","block":%d,"closed":%v}`+"\n", block, closed)
	for k := range turns {
		for s := range sessions {
			ids := []int{0, 1}
			for i := range 2 * (k + 1) {
				ids = append(ids, 1000*(s+1)+i)
			}
			h, _ := json.Marshal(ids)
			fmt.Fprintf(&b, `{"t":%g,"in":%d,"out":%d,"think":0.1,"h":%s,"s":%d,"k":%d}`+"\n",
				float64(k)+0.05*float64(s), block*len(ids)+s+1, 1+5*k, h, s, k)
		}
	}
	path := filepath.Join(t.TempDir(), "made.jsonl")
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// play runs the command and returns what it reports of its only trace.
func play(t *testing.T, args ...string) *report {
	t.Helper()
	var out bytes.Buffer
	if err := run(t.Context(), append(args, "-json"), &out, io.Discard); err != nil {
		t.Fatal(err)
	}
	var reports []*report
	if err := json.Unmarshal(out.Bytes(), &reports); err != nil || len(reports) != 1 {
		t.Fatalf("%d reports: %v", len(reports), err)
	}
	return reports[0]
}

func TestReplaysInRealAndVirtualTime(t *testing.T) {
	for _, closed := range []bool{false, true} {
		r := play(t, "-traces", writeTrace(t, closed, 6, 4), "-workers", "2", "-policy", "predicted_latency,round_robin",
			"-kv-tokens", "20000", "-speed", "2", "-scale", "0.5", "-warmup", "20ms", "-slice", "9s", "-sessions", "key", "-seed", "1")
		if len(r.Results) != 2 || r.LiveRank == "" || r.ReplayRank == "" {
			t.Fatalf("got %+v", r)
		}
		for _, res := range r.Results {
			f, p := res.Live, res.Predictions
			if res.Failed > 0 || f.Requests == 0 || f.MeanTTFT <= 0 || f.P99TTFT < f.P50TTFT || f.MeanE2E < f.MeanTTFT {
				t.Errorf("%s: %+v, %+v", res.Policy, f, res.health)
			}
			if p.Requests != f.Requests || p.Predicted <= 0 || p.Ratios[2] <= 0 {
				t.Errorf("%s: predictions %+v of %d requests", res.Policy, p, f.Requests)
			}
		}
	}
}

// TestBothTimesHaveTheSameHits has one worker with memory for all: nothing but the
// trace decides on the hits.
func TestBothTimesHaveTheSameHits(t *testing.T) {
	r := play(t, "-traces", writeTrace(t, false, 6, 4), "-workers", "1", "-policy", "least_load",
		"-kv-tokens", "40000", "-speed", "1", "-scale", "0.5", "-warmup", "800ms", "-slice", "9s", "-seed", "1")
	live, replay := r.Results[0].Live, r.Results[0].Replay
	if live.Requests != 18 || live.Requests != replay.Requests || live.HitRatio == 0 || live.HitRatio != replay.HitRatio {
		t.Errorf("live %+v, replay %+v", live, replay)
	}
}

func TestWritesTables(t *testing.T) {
	var out bytes.Buffer
	err := run(t.Context(), []string{
		"-traces", writeTrace(t, false, 4, 2), "-workers", "2", "-policy", "dynamo,least_load", "-kv-tokens", "20000",
		"-speed", "2", "-scale", "0.2", "-warmup", "300ms", "-slice", "2s",
	}, &out, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"made: ", "ranking by mean TTFT, live:", "predicted TTFT", "sent late"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing in\n%s", want, out.String())
		}
	}
}

func TestCutsASliceOfAnOpenLoop(t *testing.T) {
	tr := &trace.Trace{BlockTokens: 16}
	for i := range 11 {
		tr.Requests = append(tr.Requests, trace.Request{At: time.Duration(i) * time.Second, In: i + 1})
	}
	s, err := cut(tr, 3*time.Second, 2*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	var got []int
	for _, q := range s.Requests {
		got = append(got, q.In-1)
	}
	if !slices.Equal(got, []int{2, 3, 4, 5, 6}) || s.Requests[1].At != time.Second || tr.Requests[3].At != 3*time.Second {
		t.Errorf("got %+v", s.Requests)
	}
}

func TestCutsASliceOfAClosedLoop(t *testing.T) {
	tr := &trace.Trace{BlockTokens: 16, Closed: true}
	for s := range 3 {
		for k := range 10 {
			tr.Requests = append(tr.Requests, trace.Request{At: time.Duration(s) * time.Second, Think: 2 * time.Second, Session: s, Turn: k})
		}
	}
	s, err := cut(tr, 3*time.Second, 2*time.Second) // from 7 s to 12 s
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, q := range s.Requests {
		got = append(got, fmt.Sprint(q.Session, q.Turn, q.At.Seconds(), q.Think.Seconds()))
	}
	want := []string{"0 4 1 0", "0 5 3 2", "1 3 0 0", "1 4 2 2", "1 5 4 2", "2 3 1 0", "2 4 3 2"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestPromptsShareTheBlocksOfTheTrace reads bodies as an engine does.
func TestPromptsShareTheBlocksOfTheTrace(t *testing.T) {
	tr := &trace.Trace{BlockTokens: 16, Requests: []trace.Request{
		{In: 50, Out: 3, Blocks: []uint64{trace.Hash(1), trace.Hash(2), trace.Hash(3)}},
		{In: 48, Out: 1, Blocks: []uint64{trace.Hash(1), trace.Hash(2), trace.Hash(4)}},
		{In: 50, Out: 1, Blocks: []uint64{trace.Hash(1), trace.Hash(2), trace.Hash(3)}},
	}}
	var prompts [][]uint32
	for n := range tr.Requests {
		var body struct {
			Prompt []uint32 `json:"prompt"`
			Max    int      `json:"max_tokens"`
		}
		if err := json.Unmarshal(appendBody(nil, tr, n), &body); err != nil {
			t.Fatal(err)
		}
		if len(body.Prompt) != tr.Requests[n].In || body.Max != tr.Requests[n].Out {
			t.Errorf("request %d has %d + %d tokens", n, len(body.Prompt), body.Max)
		}
		prompts = append(prompts, body.Prompt)
	}
	a, b, c := prompts[0], prompts[1], prompts[2]
	if !slices.Equal(a[:32], b[:32]) || slices.Equal(a[32:48], b[32:48]) || !slices.Equal(a[:48], c[:48]) || slices.Equal(a[48:], c[48:]) {
		t.Errorf("got %v", prompts)
	}
}

func TestRanksPolicies(t *testing.T) {
	names := []string{"a", "b", "c"}
	for _, c := range []struct {
		live, replay []float64
		rank         string
		tau          float64
		ok           bool
	}{
		{[]float64{1, 2, 3}, []float64{2, 3, 4}, "a < b < c", 1, true},
		{[]float64{3, 2, 1}, []float64{2, 3, 4}, "c < b < a", -1, true},
		{[]float64{1.04, 1, 3}, []float64{2, 2.01, 4}, "b = a < c", 1, true},
		{[]float64{1, 1, 1}, []float64{2, 3, 4}, "a = b = c", 0, false},
	} {
		if got := ranking(names, c.live); got != c.rank {
			t.Errorf("%v: %s, want %s", c.live, got, c.rank)
		}
		if tau, ok := kendall(c.live, c.replay); ok != c.ok || ok && max(tau-c.tau, c.tau-tau) > 1e-9 {
			t.Errorf("%v and %v: %v, %v", c.live, c.replay, tau, ok)
		}
	}
}

func TestAccuracy(t *testing.T) {
	a := newAccuracy([]pair{{100, 110}, {100, 90}, {200, 400}})
	if a.Requests != 3 || a.Observed != 200 || a.Ratios[2] != 1.1 || a.Median < 0.09 || a.Median > 0.11 || a.P90 != 1 || a.Absolute != [2]float64{10, 200} {
		t.Errorf("got %+v", a)
	}
	if a := newAccuracy(nil); a.Requests != 0 || a.Median != 0 {
		t.Errorf("of nothing: %+v", a)
	}
}

func TestBadFlags(t *testing.T) {
	for _, args := range []string{
		"", "-traces /nonexistent", "-traces . -policy fastest", "-traces . -workers 0", "-traces . -runs 0", "-traces . -scale 0",
		"-traces . -sessions yes", "-traces . -slice 0s", "-traces . -load 0", "-traces . -seed x", "-traces . extra", "-traces .",
	} {
		if err := run(t.Context(), strings.Fields(args), io.Discard, io.Discard); err == nil {
			t.Errorf("%q was taken", args)
		}
	}
}
