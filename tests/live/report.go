package main

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
)

// tie is how many times longer a mean TTFT is, at most, that counts as the same.
const tie = 1.05

// report is one slice with all policies.
type report struct {
	Trace      string    `json:"trace"`
	Requests   int       `json:"requests"`
	Workers    int       `json:"workers"`
	KVTokens   int64     `json:"kv_tokens"`
	Speed      float64   `json:"speed"`
	Scale      float64   `json:"scale"`
	WarmUp     float64   `json:"warm_up_seconds"`
	Slice      float64   `json:"slice_seconds"`
	Results    []*result `json:"results"`
	LiveRank   string    `json:"live_ranking,omitempty"`
	ReplayRank string    `json:"replay_ranking"`
	// Tau is Kendall's rank correlation; null if all policies are the same.
	Tau *float64 `json:"kendall_tau,omitempty"`
}

// compare ranks the policies.
func (r *report) compare(live bool) {
	names := make([]string, len(r.Results))
	a, b := make([]float64, len(names)), make([]float64, len(names))
	for i, res := range r.Results {
		names[i], a[i], b[i] = res.Policy, res.Live.MeanTTFT, res.Replay.MeanTTFT
	}
	r.ReplayRank = ranking(names, b)
	if !live {
		return
	}
	r.LiveRank = ranking(names, a)
	if tau, ok := kendall(a, b); ok {
		r.Tau = &tau
	}
}

// order compares two means: 0 if they are a tie.
func order(a, b float64) int {
	if max(a, b) <= tie*min(a, b) {
		return 0
	}
	return cmp.Compare(a, b)
}

// kendall returns Kendall's tau-b of two lists of means; false if one of them is all
// ties.
func kendall(a, b []float64) (tau float64, ok bool) {
	sum, inA, inB := 0, 0, 0
	for i := range a {
		for j := range i {
			x, y := order(a[i], a[j]), order(b[i], b[j])
			sum += x * y
			inA += x * x
			inB += y * y
		}
	}
	if inA == 0 || inB == 0 {
		return 0, false
	}
	return float64(sum) / math.Sqrt(float64(inA)*float64(inB)), true
}

// ranking lists the policies, the best first. Those that tie with the one before them
// have an equals sign.
func ranking(names []string, means []float64) string {
	at := make([]int, len(names))
	for i := range at {
		at[i] = i
	}
	slices.SortStableFunc(at, func(i, j int) int { return cmp.Compare(means[i], means[j]) })
	var b strings.Builder
	for k, i := range at {
		switch {
		case k == 0:
		case order(means[i], means[at[k-1]]) == 0:
			b.WriteString(" = ")
		default:
			b.WriteString(" < ")
		}
		b.WriteString(names[i])
	}
	return b.String()
}

// write writes the tables of a slice.
func (r *report) write(w io.Writer, live bool) error {
	fmt.Fprintf(w, "%s: %d requests in %.0f s after %.0f s of warm-up, %d workers of %d KV tokens, speed %.3g, scale %g; times in ms of the engines\n",
		r.Trace, r.Requests, r.Slice, r.WarmUp, r.Workers, r.KVTokens, r.Speed, r.Scale)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "policy\t\tcounted\tTTFT mean\tp50\tp99\te2e mean\thit ratio\tlive/replay")
	for _, res := range r.Results {
		if live {
			res.Live.write(tw, res.Policy, "live")
			fmt.Fprintf(tw, "%.3f\n", res.Live.MeanTTFT/res.Replay.MeanTTFT)
		}
		res.Replay.write(tw, res.Policy, "replay")
		fmt.Fprintln(tw)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(w, "ranking by mean TTFT, replay: %s\n", r.ReplayRank)
	if !live {
		return nil
	}
	fmt.Fprintf(w, "ranking by mean TTFT, live:   %s\n", r.LiveRank)
	if r.Tau != nil {
		fmt.Fprintf(w, "Kendall's tau: %.2f\n", *r.Tau)
	} else {
		fmt.Fprintln(w, "Kendall's tau: none, for all are ties")
	}
	return r.writeRuns(w)
}

func (f *figures) write(w io.Writer, policy, kind string) {
	fmt.Fprintf(w, "%s\t%s\t%d\t%.0f\t%.0f\t%.0f\t%.0f\t%.3f\t", policy, kind, f.Requests, f.MeanTTFT, f.P50TTFT, f.P99TTFT, f.MeanE2E, f.HitRatio)
}

// writeRuns writes the predictions of the live runs and how far they can be believed.
func (r *report) writeRuns(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "\npredicted TTFT\tof\tpredicted mean\tobserved mean\tobserved/predicted p5\tp25\tp50\tp75\tp95\t|o/p-1| p50\tp90\t|o-p| p50\tp90")
	for _, res := range r.Results {
		p := res.Predictions
		fmt.Fprintf(tw, "%s\t%d\t%.0f\t%.0f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.0f\t%.0f\n", res.Policy, p.Requests, p.Predicted, p.Observed,
			p.Ratios[0], p.Ratios[1], p.Ratios[2], p.Ratios[3], p.Ratios[4], p.Median, p.P90, p.Absolute[0], p.Absolute[1])
	}
	fmt.Fprintln(tw, "\nlive run\tfailed\tsent late p50\tp99\tmax\tsteps late max\tcores\tseconds\truns\t\t\t\t")
	for _, res := range r.Results {
		fmt.Fprintf(tw, "%s\t%d\t%.1f\t%.1f\t%.1f\t%.1f\t%.2f\t%.0f\t%d\t\t\t\t\n",
			res.Policy, res.Failed, res.Late[0], res.Late[1], res.Late[2], res.Lag, res.Cores, res.Seconds, res.Runs)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for _, res := range r.Results {
		if res.Failed > 0 {
			fmt.Fprintf(w, "%s: %d requests failed, such as: %s\n", res.Policy, res.Failed, res.Error)
		}
	}
	return nil
}
