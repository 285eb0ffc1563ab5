package main

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/sim"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

// report is the JSON that the command writes.
type report struct {
	Trace        string          `json:"trace"`
	Requests     int             `json:"requests"`
	Workers      int             `json:"workers"`
	KVTokens     int64           `json:"kv_tokens"`
	ToldKVTokens int64           `json:"told_kv_tokens,omitempty"`
	Seed         uint64          `json:"seed"`
	Sessions     string          `json:"sessions"`
	Slow         map[int]float64 `json:"slow,omitempty"`
	Cells        []*sim.Result   `json:"cells"`
}

func writeJSON(w io.Writer, o *options, t *trace.Trace, results []*sim.Result) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(report{
		Trace: t.Name, Requests: len(t.Requests), Workers: o.workers, KVTokens: o.kv, ToldKVTokens: o.told,
		Seed: o.seed, Sessions: o.sessions, Slow: o.slow, Cells: results,
	})
}

// writeTable writes each figure with its ratio to that of the first policy.
func writeTable(w io.Writer, o *options, t *trace.Trace, results []*sim.Result) error {
	fmt.Fprintf(w, "%s: %d requests, %d workers of %d KV tokens", t.Name, len(t.Requests), o.workers, o.kv)
	if o.told != 0 {
		fmt.Fprintf(w, " (told: %d)", o.told)
	}
	if o.sessions != "none" {
		fmt.Fprintf(w, ", sessions bound by key")
	}
	fmt.Fprintf(w, ", seed %d; times in ms; in brackets relative to %s\n", o.seed, o.policies[0])
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "speed\tpolicy\tknowledge\tTTFT mean\tp50\tp99\te2e mean\thit ratio\timbalance\treq/s")
	for _, r := range results {
		v := r.Relative
		fmt.Fprintf(tw, "%g\t%s\t%s\t%.0f (%.3f)\t%.0f (%.2f)\t%.0f (%.2f)\t%.0f (%.2f)\t%.3f (%.2f)\t%.2f (%.2f)\t%.2f (%.2f)\n",
			r.Speed, r.Policy, r.Knowledge, r.MeanTTFT, v.MeanTTFT, r.P50TTFT, v.P50TTFT, r.P99TTFT, v.P99TTFT, r.MeanE2E, v.MeanE2E,
			r.HitRatio, v.HitRatio, r.Imbalance, v.Imbalance, r.PerSecond, v.PerSecond)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for _, r := range results {
		if r.PolicyFaults+r.Expired+r.Untracked > 0 {
			fmt.Fprintf(w, "%s at %g: %d choices spoilt by the policy, %d leases expired, %d prompts not in the mirror whole\n",
				r.Policy, r.Speed, r.PolicyFaults, r.Expired, r.Untracked)
		}
	}
	return nil
}
