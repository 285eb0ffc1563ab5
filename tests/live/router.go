package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/cluster"
)

// router is a Caddy with kv_router, in this process.
type router struct {
	engines    []string // dial addresses
	url, admin string
}

// startRouter starts the router before engines, and waits until it knows their types.
func startRouter(ctx context.Context, cl *cluster.Cluster, engines []string, log, directives string) (*router, error) {
	r := &router{engines: engines}
	for _, to := range []*string{&r.url, &r.admin} {
		addr, err := canned.FreeAddr()
		if err != nil {
			return nil, err
		}
		*to = addr
	}
	globals := fmt.Sprintf("\tadmin %s\n\tlog default {\n\t\toutput file %q\n\t}\n", r.admin, log)
	err := cl.Load(globals, fmt.Sprintf("http://%s {\n\tkv_router %s {\n\t\tresponse_headers %s\n\t\t%s\n\t}\n}\n",
		r.url, strings.Join(engines, " "), headers, directives))
	if err != nil {
		return nil, err
	}
	r.url = "http://" + r.url
	if _, err := call(ctx, http.MethodGet, r.url+"/v1/models"); err != nil {
		return nil, err
	}
	_, err = r.await(ctx, toBeExact, func(w *worker) bool { return w.Engine.Type != "" })
	return r, err
}

// worker is a part of what the admin API shows of a worker.
type worker struct {
	ID     uint64 `json:"id"`
	Dial   string `json:"dial"`
	Engine struct {
		Type string `json:"type"`
	} `json:"engine"`
	Streams []stream `json:"kv_events"`
}

// stream is what the admin API shows of a rank's KV events.
type stream struct {
	State      string            `json:"state"`
	Knowledge  string            `json:"knowledge"`
	Sequence   *uint64           `json:"sequence"`
	Gaps       uint64            `json:"gaps"`
	Replays    uint64            `json:"replays"`
	Reconnects uint64            `json:"reconnects"`
	Restarts   uint64            `json:"restarts"`
	Stored     uint64            `json:"stored_blocks"`
	Removed    uint64            `json:"removed_blocks"`
	Cleared    uint64            `json:"cleared"`
	Skipped    map[string]uint64 `json:"skipped_events"`
	Held       map[string]int64  `json:"cached_blocks"`
}

// isExact returns whether the router knows all that the worker's ranks hold.
func (w *worker) isExact() bool {
	for i := range w.Streams {
		if s := &w.Streams[i]; s.State != "live" || s.Knowledge != "exact" {
			return false
		}
	}
	return len(w.Streams) > 0
}

// workers returns what the admin API shows, in the order of the engines.
func (r *router) workers(ctx context.Context) ([]worker, error) {
	body, err := call(ctx, http.MethodGet, "http://"+r.admin+"/kv_router/pools/default/workers")
	if err != nil {
		return nil, err
	}
	var list, sorted []worker
	if err := json.Unmarshal(body, &list); err != nil {
		return nil, fmt.Errorf("reading the admin API: %w", err)
	}
	for _, addr := range r.engines {
		for _, w := range list {
			if w.Dial == addr {
				sorted = append(sorted, w)
			}
		}
	}
	if len(sorted) != len(r.engines) {
		return nil, fmt.Errorf("the admin API has %d workers", len(list))
	}
	return sorted, nil
}

// await waits until a condition holds for each worker. It returns how long that took.
func (r *router) await(ctx context.Context, limit time.Duration, is func(*worker) bool) (time.Duration, error) {
	for begun := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		list, err := r.workers(ctx)
		if err != nil {
			return 0, err
		}
		if !slices.ContainsFunc(list, func(w worker) bool { return !is(&w) }) {
			return time.Since(begun), nil
		}
		if time.Since(begun) > limit {
			b, _ := json.Marshal(list)
			return 0, fmt.Errorf("the workers are not as they should be after %v: %s", limit, b)
		}
	}
}
