package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
)

// predictions are the predicted times to first token of a run, by worker and length of
// the prompt, in the order of the choices.
type predictions map[placement][]float64

type placement struct {
	dial   string
	tokens int
}

// readPredictions reads what the router has logged of its choices. A line does not name
// its request; worker, length and order do well enough.
func readPredictions(log string) (predictions, error) {
	f, err := os.Open(log) //nolint:gosec // it is ours
	if err != nil {
		return nil, err
	}
	defer f.Close()
	p := make(predictions)
	in := bufio.NewScanner(f)
	in.Buffer(nil, 1<<20)
	for in.Scan() {
		if !strings.Contains(in.Text(), `"predicted_ttft_ms"`) {
			continue
		}
		var line struct {
			Upstream string  `json:"upstream"`
			Tokens   int     `json:"prompt_tokens"`
			TTFT     float64 `json:"predicted_ttft_ms"`
		}
		if err := json.Unmarshal(in.Bytes(), &line); err != nil {
			return nil, fmt.Errorf("reading the router's log: %w", err)
		}
		at := placement{line.Upstream, line.Tokens}
		p[at] = append(p[at], line.TTFT)
	}
	return p, in.Err()
}

// accuracy is how well the times to first token were predicted.
type accuracy struct {
	// Requests is how many were compared.
	Requests int `json:"requests"`
	// Predicted and Observed are means, in ms of the engines' time.
	Predicted float64 `json:"predicted_mean_ms"`
	Observed  float64 `json:"observed_mean_ms"`
	// Ratios are quantiles of observed / predicted: those of 0.05, 0.25, 0.5, 0.75 and
	// 0.95.
	Ratios [5]float64 `json:"observed_over_predicted"`
	// Median and P90 are quantiles of |observed/predicted - 1|.
	Median float64 `json:"error_median"`
	P90    float64 `json:"error_p90"`
	// Absolute are the median and the 90th percentile of |observed - predicted|, in ms
	// of the engines' time.
	Absolute [2]float64 `json:"absolute_error_ms"`
}

// pair is one prediction and what came, in ms of the engines' time.
type pair struct{ predicted, observed float64 }

func newAccuracy(pairs []pair) *accuracy {
	a := &accuracy{Requests: len(pairs)}
	if len(pairs) == 0 {
		return a
	}
	var ratios, errors, apart []float64
	for _, p := range pairs {
		a.Predicted += p.predicted / float64(len(pairs))
		a.Observed += p.observed / float64(len(pairs))
		apart = append(apart, math.Abs(p.observed-p.predicted))
		if p.predicted > 0 {
			ratios = append(ratios, p.observed/p.predicted)
			errors = append(errors, math.Abs(p.observed/p.predicted-1))
		}
	}
	slices.Sort(ratios)
	slices.Sort(errors)
	slices.Sort(apart)
	for i, q := range []float64{0.05, 0.25, 0.5, 0.75, 0.95} {
		a.Ratios[i] = quantile(ratios, q)
	}
	a.Median, a.P90 = quantile(errors, 0.5), quantile(errors, 0.9)
	a.Absolute = [2]float64{quantile(apart, 0.5), quantile(apart, 0.9)}
	return a
}

// quantile returns the smallest value of a sorted list that so many are not above; 0 if
// the list is empty.
func quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	i := int(math.Ceil(q*float64(len(sorted)))) - 1
	return sorted[min(max(i, 0), len(sorted)-1)]
}
