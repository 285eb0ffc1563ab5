package admin

import (
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"github.com/caddy-kvrouter/kvrouter/kvscore/events"
	"github.com/prometheus/client_golang/prometheus"
)

// eventsView is what the router follows of one publisher of KV events. Ages are absent before
// the first batch, Lag while it is unknown.
type eventsView struct {
	Rank int `json:"dp_rank"`
	worker.Following
	LastBatch *float64          `json:"last_batch_seconds_ago,omitzero"`
	Lag       float64           `json:"lag_seconds,omitzero"`
	Skipped   map[string]uint64 `json:"skipped_events"`
	Held      map[string]int64  `json:"cached_blocks"`
}

func viewEvents(w *worker.Worker, t time.Time) []eventsView {
	following := w.Following()
	list := make([]eventsView, 0, len(following))
	for rank, f := range following {
		v := eventsView{
			Rank: rank, Following: f, Lag: f.Lag.Seconds(), Skipped: skipped(&f), Held: make(map[string]int64),
		}
		if !f.LastBatch.IsZero() {
			v.LastBatch = new(t.Sub(f.LastBatch).Seconds())
		}
		for tier, n := range f.Held {
			if n > 0 {
				v.Held[cache.Tier(tier).String()] = n
			}
		}
		list = append(list, v)
	}
	return list
}

func skipped(f *worker.Following) map[string]uint64 {
	by := make(map[string]uint64)
	for r, n := range f.Skipped {
		if n > 0 {
			by[events.Reason(r).String()] = n
		}
	}
	if f.Malformed > 0 {
		by["malformed_message"] = f.Malformed
	}
	return by
}

var (
	descExact   = poolDesc("exact_index_bytes", "Size of the index of what the engines' KV events say.")
	descTexts   = poolDesc("text_map_bytes", "Size of the map of texts to token blocks.")
	descLearned = poolDesc("learned_texts_total",
		"Prompts of text on workers with KV events, by what the router learned of their token blocks.", "outcome")
	descFollowed = rankDesc("kv_events_state",
		"1 for the state of the stream of KV events, and for what requests of token ids use: exact, partial "+
			"or approximate knowledge.", "state", "knowledge")
	descBehind = rankDesc("kv_events_last_batch_seconds", "Time since the last batch of KV events came.")
	descLag    = rankDesc("kv_events_lag_seconds",
		"Age of the last batch of KV events at its arrival, by the engine's clock.")
	descGaps       = rankDesc("kv_events_gaps_total", "Gaps in the sequence of batches of KV events.")
	descReplays    = rankDesc("kv_events_replays_total", "Replays of earlier KV events that the router asked for.")
	descReconnects = rankDesc("kv_events_reconnects_total",
		"Connections to the publisher of KV events after the first.")
	descRestarts      = rankDesc("kv_events_restarts_total", "Restarts of the publisher: the sequence fell, or the last batch is another one.")
	descApplied       = rankDesc("kv_events_blocks_total", "Blocks that KV events stored or removed.", "kind")
	descSkippedEvents = rankDesc("kv_events_skipped_total", "KV events that the router did not use, by reason.", "reason")
	descHeld          = rankDesc("kv_events_held_blocks",
		"Blocks that the worker's rank has cached, as its KV events say.", "tier")
)

func collectTexts(to sink, s *cache.Size) {
	to.gauge(descTexts, float64(s.TextBytes))
	for outcome, n := range map[string]uint64{
		"with_answer": s.Whole, "prompt_only": s.Prompts, "uncounted": s.Uncounted, "unseen": s.Unseen,
		"ambiguous": s.Ambiguous, "contradiction": s.Lessons.Contradictions,
	} {
		to.emit(descLearned, prometheus.CounterValue, float64(n), outcome)
	}
}

func collectEvents(to sink, w *worker.Worker, t time.Time) {
	following := w.Following()
	for rank := range following {
		f, to := &following[rank], to.with(strconv.Itoa(rank))
		to.gauge(descFollowed, 1, f.State.String(), f.Knowledge.String())
		if !f.LastBatch.IsZero() {
			to.gauge(descBehind, t.Sub(f.LastBatch).Seconds())
		}
		if f.Lag != 0 {
			to.gauge(descLag, f.Lag.Seconds())
		}
		count := func(d *prometheus.Desc, n uint64, labels ...string) {
			to.emit(d, prometheus.CounterValue, float64(n), labels...)
		}
		count(descGaps, f.Gaps)
		count(descReplays, f.Replays)
		count(descReconnects, f.Reconnects)
		count(descRestarts, f.Restarts)
		count(descApplied, f.Stored, "stored")
		count(descApplied, f.Removed, "removed")
		for reason, n := range skipped(f) {
			count(descSkippedEvents, n, reason)
		}
		for tier, n := range f.Held {
			if n > 0 || tier == int(cache.Device) {
				to.gauge(descHeld, float64(n), cache.Tier(tier).String())
			}
		}
	}
}
