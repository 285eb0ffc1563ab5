package exactness

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"
)

// Worker is a part of what the admin API says of a worker.
type Worker struct {
	ID     uint64 `json:"id"`
	Dial   string `json:"dial"`
	Health struct {
		MarkedDownUntil *time.Time `json:"marked_down_until"`
	} `json:"health"`
	Events []struct {
		State      string            `json:"state"`
		Connected  bool              `json:"connected"`
		Complete   bool              `json:"complete"`
		Knowledge  string            `json:"knowledge"`
		Error      *string           `json:"error"`
		Lag        *float64          `json:"lag_seconds"`
		Sequence   *uint64           `json:"sequence"`
		Gaps       uint64            `json:"gaps"`
		Replays    uint64            `json:"replays"`
		Reconnects uint64            `json:"reconnects"`
		Restarts   uint64            `json:"restarts"`
		BlockSize  *int              `json:"block_size_tokens"`
		Stored     uint64            `json:"stored_blocks"`
		Removed    uint64            `json:"removed_blocks"`
		Cleared    uint64            `json:"cleared"`
		Skipped    map[string]uint64 `json:"skipped_events"`
		Held       map[string]int64  `json:"held_blocks"`
	} `json:"kv_events"`
}

// IsExact returns whether the router knows all that the worker's ranks hold.
func (w *Worker) IsExact(ranks int) bool {
	for i := range w.Events {
		if e := &w.Events[i]; e.State != "live" || e.Knowledge != "exact" {
			return false
		}
	}
	return len(w.Events) == ranks
}

// Router is a router with one pool.
type Router struct {
	Admin   string   // address of its admin endpoint
	Engines []string // dial addresses
}

// Workers returns what the admin API says, in the order of the engines.
func (r *Router) Workers(ctx context.Context) ([]Worker, error) {
	const pools = "/kv_router/pools"
	var named []struct {
		Name string `json:"name"`
	}
	if err := r.ask(ctx, pools, &named); err != nil {
		return nil, err
	}
	if len(named) != 1 {
		return nil, fmt.Errorf("the admin API has %d pools", len(named))
	}
	var list, sorted []Worker
	if err := r.ask(ctx, pools+"/"+named[0].Name+"/workers", &list); err != nil {
		return nil, err
	}
	for _, addr := range r.Engines {
		for _, w := range list {
			if w.Dial == addr {
				sorted = append(sorted, w)
			}
		}
	}
	if len(sorted) != len(r.Engines) {
		return nil, fmt.Errorf("the admin API has %d workers", len(list))
	}
	return sorted, nil
}

func (r *Router) ask(ctx context.Context, path string, to any) error {
	body, err := Call(ctx, http.MethodGet, "http://"+r.Admin+path)
	if err != nil {
		return err
	}
	return json.Unmarshal(body, to)
}

// Await waits until a condition holds for each worker. It returns how long that took.
func (r *Router) Await(ctx context.Context, limit time.Duration, is func(*Worker) bool) (time.Duration, error) {
	for begun := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		list, err := r.Workers(ctx)
		if err != nil {
			return 0, err
		}
		if !slices.ContainsFunc(list, func(w Worker) bool { return !is(&w) }) {
			return time.Since(begun), nil
		}
		if time.Since(begun) > limit {
			b, _ := json.Marshal(list)
			return 0, fmt.Errorf("the streams are not as they should be after %v: %s", limit, b)
		}
	}
}

// Call returns the body of an answer with status 200.
func Call(ctx context.Context, method, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s answered %d: %.300s", url, resp.StatusCode, got)
	}
	return got, err
}
