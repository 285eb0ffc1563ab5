package sim

import (
	"slices"
	"time"
)

// Bucket is the figures of the requests that arrived in one part of the time.
type Bucket struct {
	// Seconds is the middle of the part, since the start.
	Seconds  float64 `json:"seconds"`
	Requests int     `json:"requests"`
	MeanTTFT float64 `json:"ttft_mean_ms"`
	P50TTFT  float64 `json:"ttft_p50_ms"`
}

// curve cuts the time up to the last arrival into equal parts. The warm-up counts.
func (r *replay) curve(parts int) []Bucket {
	var last time.Duration
	for i := range r.requests {
		last = max(last, r.requests[i].arrived)
	}
	width := last/time.Duration(parts) + 1
	ttfts := make([][]float64, parts)
	for i := range r.requests {
		q := &r.requests[i]
		at := int(q.arrived / width)
		ttfts[at] = append(ttfts[at], milliseconds(q.first-q.arrived))
	}
	buckets := make([]Bucket, parts)
	for i, all := range ttfts {
		b := &buckets[i]
		b.Seconds, b.Requests = (time.Duration(i)*width + width/2).Seconds(), len(all)
		if len(all) == 0 {
			continue
		}
		slices.Sort(all)
		for _, t := range all {
			b.MeanTTFT += t / float64(len(all))
		}
		b.P50TTFT = quantile(all, 0.5)
	}
	return buckets
}
