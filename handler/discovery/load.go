package discovery

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
)

const (
	// loadPeriod is the least time between two questions to an engine about its load: a second,
	// but timers are not exact.
	loadPeriod = 900 * time.Millisecond
	// loadTimeout is how long an engine may take to answer.
	loadTimeout = time.Second
	// loadLacks is how long an engine may report no load before the router warns of it. A busy one
	// may answer too late for a while.
	loadLacks = 15 * time.Second
)

// loadReports are the reports of a worker's engine about its load. They are a correction, and
// nothing waits for them.
type loadReports struct {
	mu     sync.Mutex
	asking bool
	next   time.Time // when the engine may be asked again
	known  time.Time // when all ranks were last reported, or the router began to ask; zero: it does not ask
}

// askLoads asks the engines for their load where the operator wants that and it is due.
func (p *Prober) askLoads(ctx context.Context, t time.Time) {
	for _, w := range p.workers() {
		if x := Of(w); x.claimLoad(t) {
			go p.askLoad(ctx, x)
		}
	}
}

// askLoad asks an engine for its load. A failure says nothing of the worker's health: the page
// may be slow while requests are not.
func (p *Prober) askLoad(whole context.Context, x *Watch) {
	ctx, cancel := context.WithTimeout(whole, loadTimeout)
	defer cancel()
	list := engine.Loads(x.worker.Engine().Type, func(path string) (int, []byte) {
		status, answer, err := p.client.Fetch(ctx, x.worker.Dial, http.MethodGet, path, nil, nil, engine.MaxBody)
		if err != nil {
			return 0, nil
		}
		return status, answer
	})
	x.reportLoad(time.Now(), list)
}

// claimLoad returns whether the engine must be asked for its load now. The caller then asks, and
// calls reportLoad. Other callers get false meanwhile.
func (x *Watch) claimLoad(t time.Time) bool {
	w, r := x.worker, &x.loads
	asks := x.wantsLoad() && engine.ReportsLoad(w.Engine().Type) && !w.Health.Reach().Away() && !x.pool.IsIdle(t)
	r.mu.Lock()
	defer r.mu.Unlock()
	if !asks {
		r.known, r.next = time.Time{}, time.Time{}
		return false
	}
	if r.known.IsZero() {
		r.known = t
	}
	if r.asking || t.Before(r.next) {
		return false
	}
	r.asking, r.next = true, t.Add(loadPeriod)
	return true
}

// wantsLoad returns whether the operator wants reports of the worker's load.
func (x *Watch) wantsLoad() bool {
	on := x.pool.Settings.Load().Worker(x.worker.Dial).EngineLoad
	return on != nil && *on
}

// reportLoad records what the engine has just reported of its load, if anything. A rank that is not in
// the list has an unknown load, which is not the same as none.
func (x *Watch) reportLoad(t time.Time, list []engine.RankLoad) {
	all := x.applyLoad(t, list)
	r := &x.loads
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.asking = false; all {
		r.known = t
	}
}

// applyLoad gives the scheduler the load of the ranks. It returns whether all were reported.
func (x *Watch) applyLoad(t time.Time, list []engine.RankLoad) (all bool) {
	w, scheduler := x.worker, x.pool.Scheduler
	ranks := w.Ranks()
	if ranks == 1 { // it may be one of a larger set
		if len(list) != 1 || w.Engine().Info.DPSize > 1 {
			return false // the engine chooses among its ranks itself
		}
		scheduler.ReportLoad(t, w.Target(0), list[0].EngineLoad)
		return true
	}
	reported := 0
	for i := range list {
		if list[i].Rank < ranks {
			scheduler.ReportLoad(t, w.Target(list[i].Rank), list[i].EngineLoad)
			reported++
		}
	}
	return reported == ranks
}

// lacksLoad returns whether the load of a worker's engine is wanted and unknown.
func (x *Watch) lacksLoad(t time.Time) bool {
	if kind := x.worker.Engine().Type; !x.wantsLoad() || !engine.ReportsLoad(kind) {
		return x.wantsLoad() && kind != ""
	}
	x.loads.mu.Lock()
	defer x.loads.mu.Unlock()
	return !x.loads.known.IsZero() && t.Sub(x.loads.known) > loadLacks
}
