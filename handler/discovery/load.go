package discovery

import (
	"context"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

const loadTimeout = time.Second

// askLoads asks the engines for their load where the operator wants that and it is due.
func (p *Prober) askLoads(ctx context.Context, t time.Time) {
	for _, w := range p.workers() {
		if claimLoad(p.pool, w, t) {
			go p.askLoad(ctx, w)
		}
	}
}

// askLoad asks an engine for its load. A failure says nothing of the worker's health: the page
// may be slow while requests are not.
func (p *Prober) askLoad(whole context.Context, w *worker.Worker) {
	ctx, cancel := context.WithTimeout(whole, loadTimeout)
	defer cancel()
	list := engine.Loads(w.Engine().Type, func(path string) (int, []byte) {
		status, answer, err := p.client.Fetch(ctx, w.Dial, http.MethodGet, path, nil, nil, engine.MaxBody)
		if err != nil {
			return 0, nil
		}
		return status, answer
	})
	reportLoad(p.pool, w, time.Now(), list)
}

// claimLoad returns whether an engine must be asked for its load now. The caller then asks, and
// calls reportLoad. Other callers get false meanwhile.
func claimLoad(p *pool.Pool, w *worker.Worker, t time.Time) bool {
	return w.ClaimLoad(t, wantsLoad(w) && engine.ReportsLoad(w.Engine().Type) && !w.Health.Reach().Away() && !p.IsIdle(t))
}

func wantsLoad(w *worker.Worker) bool {
	on := w.Settings().EngineLoad
	return on != nil && *on
}

// reportLoad records what an engine has just reported of its load, if anything. A rank that is not in
// the list has an unknown load, which is not the same as none.
func reportLoad(p *pool.Pool, w *worker.Worker, t time.Time, list []engine.RankLoad) {
	ranks, reported := w.Ranks(), 0
	if ranks == 1 { // it may be one of a larger set
		if len(list) == 1 && w.Engine().Info.DPSize <= 1 { // else the engine chooses among its ranks itself
			p.Scheduler.ReportLoad(t, w.Target(0), list[0].EngineLoad)
			reported = 1
		}
		list = nil
	}
	for i := range list {
		if list[i].Rank < ranks {
			p.Scheduler.ReportLoad(t, w.Target(list[i].Rank), list[i].EngineLoad)
			reported++
		}
	}
	w.LoadReported(t, reported == ranks)
}

func lacksLoad(w *worker.Worker, t time.Time) bool {
	kind := w.Engine().Type
	return wantsLoad(w) && (kind != "" && !engine.ReportsLoad(kind) || w.LacksLoad(t))
}
