package discovery

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/upstream"
)

// detectTimeout is how long a worker may take to answer the questions about its
// engine, some five short ones.
const detectTimeout = 3 * time.Second

// detect asks a worker about its engine, if that is due. It returns whether it was.
func (p *Prober) detect(ctx context.Context, w *pool.Worker) bool {
	set := p.pool.Settings.Load().Worker(w.Dial)
	if set.Engine == engine.Other || !w.Engine.Claim(time.Now()) {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, detectTimeout)
	defer cancel()
	get := func(path string) (int, []byte) {
		if path == pathModels && w.Refusals.Load() > 0 {
			return http.StatusUnauthorized, nil // it was just asked
		}
		status, body, err := p.client.Fetch(ctx, w.Dial, http.MethodGet, path, nil, nil, engine.MaxBody)
		if !p.saw(ctx, w, status, err) || err != nil && !errors.Is(err, upstream.ErrTooLong) {
			return 0, nil
		}
		return status, body
	}
	kind := p.pool.EngineOf(w).Type
	if kind == "" || kind == engine.Other || set.Engine == pool.EngineAuto && w.Engine.IsSilent() {
		p.pool.Learn(w, engine.Ask(get))
	} else {
		p.pool.Learn(w, engine.AskAs(kind, get))
	}
	return true
}
