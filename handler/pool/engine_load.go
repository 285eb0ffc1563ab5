package pool

import (
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

const (
	// loadPeriod is the time between two questions to an engine about its load. loadSlack is
	// how much earlier a question may come: timers are not exact.
	loadPeriod, loadSlack = time.Second, 100 * time.Millisecond
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

// LoadQuestion is a question to an engine about its load.
type LoadQuestion struct {
	Type string // of the engine
	Page int    // to begin with
}

// ClaimLoad returns whether a worker's engine must be asked for its load now. The caller then
// asks, and calls ReportLoad or DropLoad. Other callers get false meanwhile.
func (p *Pool) ClaimLoad(t time.Time, w *Worker) (q LoadQuestion, ok bool) {
	r := &w.loads
	if !p.wantsLoad(w) || !engine.ReportsLoad(p.EngineOf(w).Type) || w.Health.Reach().Away() || p.isIdle(t) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.known, r.next, r.failures = time.Time{}, time.Time{}, 0
		return q, false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.known.IsZero() {
		r.known = t
	}
	if r.asking || t.Before(r.next.Add(-loadSlack)) {
		return q, false
	}
	r.asking, r.next = true, t.Add(loadPeriod)
	return LoadQuestion{p.EngineOf(w).Type, r.page}, true
}

// wantsLoad returns whether the operator wants reports of a worker's load.
func (p *Pool) wantsLoad(w *Worker) bool {
	on := p.Settings.Load().Worker(w.Dial).EngineLoad
	return on != nil && *on
}

// DropLoad gives a question back that was not asked to its end.
func (w *Worker) DropLoad() {
	w.loads.mu.Lock()
	defer w.loads.mu.Unlock()
	w.loads.asking = false
}

// ReportLoad records what a worker's engine has just reported of its load, and the page on which
// it did. A rank that is not in the list has an unknown load, which is not the same as none. The
// router asks an engine without an answer less and less often.
func (p *Pool) ReportLoad(t time.Time, w *Worker, list []engine.RankLoad, page int) {
	all := p.applyLoad(t, w, list)
	r := &w.loads
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
func (p *Pool) applyLoad(t time.Time, w *Worker, list []engine.RankLoad) (all bool) {
	ranks := w.Ranks()
	if ranks == 1 { // the engine may choose among its ranks itself
		if len(list) < max(1, w.Engine.Info().DPSize) {
			return false
		}
		p.Scheduler.ReportLoad(t, w.Target(0), sumOf(list))
		return true
	}
	reported := 0
	for i := range list {
		if list[i].Rank < ranks {
			p.Scheduler.ReportLoad(t, w.Target(list[i].Rank), list[i].EngineLoad)
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
func (p *Pool) lacksLoad(t time.Time, w *Worker, kind string) (advice string) {
	switch {
	case !p.wantsLoad(w) || kind == "":
		return ""
	case !engine.ReportsLoad(kind):
		return "set engine_load off: engines of this type report no load"
	}
	w.loads.mu.Lock()
	defer w.loads.mu.Unlock()
	if w.loads.known.IsZero() || t.Sub(w.loads.known) <= loadLacks {
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
