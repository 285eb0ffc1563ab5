package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/sim"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

// report is the JSON that the command writes.
type report struct {
	Trace        string          `json:"trace"`
	Requests     int             `json:"requests"`
	Engine       string          `json:"engine"`
	Workers      int             `json:"workers"`
	Ranks        int             `json:"ranks"`
	KVTokens     []int64         `json:"kv_tokens"`
	ToldKVTokens []int64         `json:"told_kv_tokens,omitempty"`
	ToldTimes    float64         `json:"told_times,omitempty"`
	Seeds        []uint64        `json:"seeds"`
	Sessions     string          `json:"sessions"`
	Slow         []sim.Slow      `json:"slow,omitempty"`
	Join         map[int]float64 `json:"join,omitempty"`
	Saturation   float64         `json:"saturation_speed,omitempty"`
	Cells        []*sim.Result   `json:"cells"`
}

func writeJSON(w io.Writer, o *options, t *trace.Trace, saturation float64, results []*sim.Result) error {
	e, c := json.NewEncoder(w), &o.cluster
	e.SetIndent("", "  ")
	return e.Encode(report{
		Trace: t.Name, Requests: len(t.Requests), Engine: c.Engine.Name, Workers: c.Workers, Ranks: c.Ranks,
		KVTokens: c.KVTokens, ToldKVTokens: c.ToldTokens, ToldTimes: c.ToldTimes, Slow: c.Slow, Join: c.Join,
		Seeds: o.seeds, Sessions: o.sessions, Saturation: saturation, Cells: results,
	})
}

// describe says what the trace is replayed against.
func describe(c *sim.Cluster) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d workers", c.Workers)
	if c.Ranks > 1 {
		fmt.Fprintf(&b, " with %d ranks each", c.Ranks)
	}
	fmt.Fprintf(&b, " (%s) of %s KV tokens", c.Engine.Name, commas(c.KVTokens))
	switch {
	case len(c.ToldTokens) > 0:
		fmt.Fprintf(&b, " (told: %s)", commas(c.ToldTokens))
	case c.ToldTimes > 0:
		fmt.Fprintf(&b, " (told: %g times that)", c.ToldTimes)
	}
	for _, s := range c.Slow {
		fmt.Fprintf(&b, ", worker %d slower by %g from %g to %g", s.Worker, s.Factor, s.From, s.To)
	}
	for _, w := range slices.Sorted(maps.Keys(c.Join)) {
		fmt.Fprintf(&b, ", worker %d joins at %g", w, c.Join[w])
	}
	return b.String()
}

func commas[T any](values []T) string {
	return strings.ReplaceAll(strings.Trim(fmt.Sprint(values), "[]"), " ", ",")
}

// writeTable writes each figure with its ratio to that of the first policy.
func writeTable(w io.Writer, o *options, t *trace.Trace, saturation float64, results []*sim.Result) error {
	fmt.Fprintf(w, "%s: %d requests, %s", t.Name, len(t.Requests), describe(&o.cluster))
	if o.sessions != "none" {
		fmt.Fprintf(w, ", sessions by key")
	}
	if saturation > 0 {
		fmt.Fprintf(w, ", saturation of %s at speed %.3g", o.saturate, saturation)
	}
	fmt.Fprintf(w, ", seeds %s; times in ms; in brackets relative to %s\n", commas(o.seeds), o.policies[0])
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "speed\tpolicy\tknowledge\tTTFT mean\tp50\tp99\te2e mean\thit ratio\timbalance\treq/s\tspread")
	for _, r := range results {
		v := r.Relative
		fmt.Fprintf(tw, "%.4g\t%s\t%s\t%.0f (%.3f)\t%.0f (%.2f)\t%.0f (%.2f)\t%.0f (%.2f)\t%.3f (%.2f)\t%.2f (%.2f)\t%.2f (%.2f)\t%.3f\n",
			r.Speed, r.Policy, r.Knowledge, r.MeanTTFT, v.MeanTTFT, r.P50TTFT, v.P50TTFT, r.P99TTFT, v.P99TTFT, r.MeanE2E, v.MeanE2E,
			r.HitRatio, v.HitRatio, r.Imbalance, v.Imbalance, r.PerSecond, v.PerSecond, r.Spread)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	if err := writeBuckets(w, o, results); err != nil {
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

// writeBuckets writes mean and p50 TTFT over time, one table for each speed.
func writeBuckets(w io.Writer, o *options, results []*sim.Result) error {
	if o.buckets == 0 {
		return nil
	}
	for same := range slices.Chunk(results, len(o.policies)) {
		fmt.Fprintf(w, "\nspeed %.4g: TTFT by time of arrival in ms, mean (p50)\n", same[0].Speed)
		tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		fmt.Fprintf(tw, "seconds\t%s\n", strings.Join(o.policies, "\t"))
		for i, b := range same[0].Buckets {
			fmt.Fprintf(tw, "%.0f", b.Seconds)
			for _, r := range same {
				fmt.Fprintf(tw, "\t%.0f (%.0f)", r.Buckets[i].MeanTTFT, r.Buckets[i].P50TTFT)
			}
			fmt.Fprintln(tw)
		}
		if err := tw.Flush(); err != nil {
			return err
		}
	}
	return nil
}
