package discovery

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

const (
	// loadPeriod is the time between two questions to an engine about its load. loadSlack is
	// how much earlier a question may come: timers are not exact.
	loadPeriod, loadSlack = time.Second, 100 * time.Millisecond
	// loadTimeout is how long an engine may take to answer.
	loadTimeout = time.Second
	// loadAskedLess is the longest such time, for an engine that does not answer.
	loadAskedLess = 30 * time.Second
	// loadLacks is how long an engine may report no load before the router warns of it.
	loadLacks = 10 * time.Second
)

// loadReports are the reports of a worker's engine about its load. They are a correction, and
// nothing waits for them.
type loadReports struct {
	mu       sync.Mutex
	asking   bool
	next     time.Time // when the engine may be asked again
	failures int       // in a row
	page     int       // see engine.Loads
	known    time.Time // when all ranks were last reported, or the router began to ask; zero: it does not ask
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
	list, page := engine.Loads(x.worker.Engine().Type, x.loads.first(), func(path string) (int, []byte) {
		status, answer, err := p.client.Fetch(ctx, x.worker.Dial, http.MethodGet, path, nil, nil, engine.MaxBody)
		if err != nil {
			return 0, nil
		}
		return status, answer
	})
	if whole.Err() != nil { // the configuration has ended
		x.loads.end()
		return
	}
	x.reportLoad(time.Now(), list, page)
}

// claimLoad returns whether the engine must be asked for its load now. The caller then asks, and
// calls reportLoad or loads.end. Other callers get false meanwhile.
func (x *Watch) claimLoad(t time.Time) bool {
	w, r := x.worker, &x.loads
	asks := x.wantsLoad() && engine.ReportsLoad(w.Engine().Type) && !w.Health.Reach().Away() && !x.pool.IsIdle(t)
	r.mu.Lock()
	defer r.mu.Unlock()
	if !asks {
		r.known, r.next, r.failures = time.Time{}, time.Time{}, 0
		return false
	}
	if r.known.IsZero() {
		r.known = t
	}
	if r.asking || t.Before(r.next.Add(-loadSlack)) {
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

// first returns the page to begin with.
func (r *loadReports) first() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.page
}

// end ends a question that has no result.
func (r *loadReports) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asking = false
}

// reportLoad records what the engine has just reported of its load, and the page on which it
// did. A rank that is not in the list has an unknown load, which is not the same as none. The
// router asks an engine without an answer less and less often.
func (x *Watch) reportLoad(t time.Time, list []engine.RankLoad, page int) {
	all := x.applyLoad(t, list)
	r := &x.loads
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asking, r.page = false, page
	if len(list) == 0 {
		r.failures++
		r.next = t.Add(min(loadPeriod<<min(r.failures, 8), loadAskedLess))
		return
	}
	r.failures = 0
	if all {
		r.known = t
	}
}

// applyLoad gives the scheduler the load of the ranks. It returns whether all were reported.
func (x *Watch) applyLoad(t time.Time, list []engine.RankLoad) (all bool) {
	w, scheduler := x.worker, x.pool.Scheduler
	ranks := w.Ranks()
	if ranks == 1 { // the engine may choose among its ranks itself
		if len(list) < max(1, w.Engine().Info.DPSize) {
			return false
		}
		scheduler.ReportLoad(t, w.Target(0), sumOf(list))
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

func sumOf(list []engine.RankLoad) (sum kvscore.EngineLoad) {
	for i := range list {
		l := &list[i]
		sum.Running += l.Running
		sum.Waiting += l.Waiting
		if l.WaitingTokens < 0 || sum.WaitingTokens < 0 {
			sum.WaitingTokens = -1
		} else {
			sum.WaitingTokens += l.WaitingTokens
		}
	}
	return sum
}

// lacksLoad returns what the operator can do if the load of a worker's engine is wanted and
// unknown; empty otherwise.
func (x *Watch) lacksLoad(t time.Time, kind string) (advice string) {
	switch {
	case !x.wantsLoad() || kind == "":
		return ""
	case !engine.ReportsLoad(kind):
		return "set engine_load off: engines of this type report no load"
	}
	x.loads.mu.Lock()
	defer x.loads.mu.Unlock()
	if x.loads.known.IsZero() || t.Sub(x.loads.known) <= loadLacks {
		return ""
	}
	return loadAdvice[kind]
}

// loadAdvice is what the operator can do, by engine type.
var loadAdvice = map[string]string{
	engine.VLLM:     "let the router read vLLM's /metrics within a second",
	engine.SGLang:   "let the router read SGLang's /v1/loads within a second; set api_key if it needs one",
	engine.LlamaCpp: "start llama.cpp with --metrics",
}
