package discovery

import (
	"context"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
)

// loadTimeout is how long an engine may take to report its load.
const loadTimeout = time.Second

// askLoads asks the engines for their load where the operator wants that and it is due.
func (p *Prober) askLoads(ctx context.Context) {
	for _, w := range p.workers() {
		if q, due := p.pool.ClaimLoad(time.Now(), w); due {
			go p.askLoad(ctx, w, q)
		}
	}
}

// askLoad asks an engine for its load. A failure says nothing of the worker's health: the page
// may be slow while requests are not.
func (p *Prober) askLoad(whole context.Context, w *pool.Worker, q pool.LoadQuestion) {
	ctx, cancel := context.WithTimeout(whole, loadTimeout)
	defer cancel()
	list, page := engine.Loads(q.Type, q.Page, func(path string) (int, []byte) {
		status, answer, err := p.client.Fetch(ctx, w.Dial, http.MethodGet, path, nil, nil, engine.MaxBody)
		if err != nil {
			return 0, nil
		}
		return status, answer
	})
	if whole.Err() != nil { // the configuration has ended
		w.DropLoad()
		return
	}
	p.pool.ReportLoad(time.Now(), w, list, page)
}
