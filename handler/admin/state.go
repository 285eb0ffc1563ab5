package admin

import (
	"maps"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/dispatch"
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/quota"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"

	"github.com/caddyserver/caddy/v2"
)

// stateView is what the page and the command status show of a pool. It is small enough to be asked
// for each second, and has no prompt, no session, and no secret.
type stateView struct {
	Version  string   `json:"version"` // of the router
	Pool     string   `json:"pool"`
	Pools    []string `json:"pools"` // all there are
	CanDrain bool     `json:"can_drain"`
	Until    int64    `json:"history_until"`
	Policy   string   `json:"policy"`
	Waiting  int      `json:"waiting_requests"`
	queuedView
	ByClass  []classView        `json:"classes"`
	Sessions int                `json:"sessions"`
	Recent   recentView         `json:"recent"`
	History  []pointView        `json:"history"`
	Workers  []workerView       `json:"workers"`
	Choices  []pastView         `json:"choices"`
	Open     []observe.Incident `json:"incidents"`
	Routers  []peerView         `json:"routers"`
	Limits   *quota.Standing    `json:"limits,omitzero"`
}

const statusTenants = 5

// classView is what waits of a class, and what became of its requests in the last five minutes.
type classView struct {
	pool.Queued
	Outcomes map[string]int64 `json:"outcomes"`
	Refused  int64            `json:"refused_requests"`
}

// viewClasses returns the classes that have a target, or have been refused or waited lately.
func viewClasses(p *pool.Pool, waiting []pool.Queued, t time.Time) []classView {
	recent, list := p.Outcomes.Recent(t), []classView{}
	add := func(of pool.Queued) {
		v := classView{of, map[string]int64{}, 0}
		maps.Copy(v.Outcomes, recent[of.Class])
		for outcome, n := range v.Outcomes {
			if !slices.Contains(dispatch.Served, outcome) {
				v.Refused += n
			}
		}
		list = append(list, v)
		delete(recent, of.Class)
	}
	for _, q := range waiting {
		add(q)
	}
	for _, class := range slices.Sorted(maps.Keys(recent)) {
		add(pool.Queued{Class: class})
	}
	return list
}

// recentView is what happened in the last five minutes.
type recentView struct {
	Requests  int64    `json:"requests"`
	Attempts  int64    `json:"attempts"`
	Failed    int64    `json:"failed_attempts"`
	P50       float64  `json:"ttft_p50_ms,omitzero"`
	P99       float64  `json:"ttft_p99_ms,omitzero"`
	Pace      float64  `json:"inter_token_ms,omitzero"`
	PlainP50  float64  `json:"plain_answer_p50_ms,omitzero"`
	PlainP99  float64  `json:"plain_answer_p99_ms,omitzero"`
	PlainPace float64  `json:"plain_answer_per_token_ms,omitzero"`
	Reports   int64    `json:"hit_reports"`
	Hits      *float64 `json:"reported_hit_ratio,omitzero"`
	Foreseen  *float64 `json:"predicted_hit_ratio,omitzero"`
}

// pointView is a slot of a history, of ten seconds.
type pointView struct {
	Attempts int64    `json:"attempts"`
	Failed   int64    `json:"failed_attempts,omitzero"`
	P50      float64  `json:"ttft_p50_ms,omitzero"`
	Hits     *float64 `json:"reported_hit_ratio,omitzero"`
}

func viewRecent(s *observe.Sums) recentView {
	return recentView{
		Requests: s.Requests, Attempts: s.Attempts, Failed: s.Failed,
		P50: ms(s.FirstTokens.Quantile(0.5)), P99: ms(s.FirstTokens.Quantile(0.99)), Pace: ms(s.Pace()),
		PlainP50: ms(s.Plain.Quantile(0.5)), PlainP99: ms(s.Plain.Quantile(0.99)), PlainPace: ms(s.PlainPace()),
		Reports: s.Reports, Hits: share(s.Cached, s.Prompt), Foreseen: share(s.Predicted, s.Prompt),
	}
}

// share returns part/whole with three digits, nil if whole is 0.
func share(part, whole int64) *float64 {
	if whole == 0 {
		return nil
	}
	return new(round(float64(part) / float64(whole)))
}

func viewHistory(line []observe.Sums) (list []pointView) {
	for i := range line {
		s := &line[i]
		list = append(list, pointView{s.Attempts, s.Failed, ms(s.FirstTokens.Quantile(0.5)), share(s.Cached, s.Prompt)})
	}
	return list
}

// ms returns a duration in milliseconds, with a precision that is worth its bytes.
func ms(d time.Duration) float64 {
	if d >= 100*time.Millisecond {
		return float64(d.Milliseconds())
	}
	return float64(d.Round(100*time.Microsecond).Microseconds()) / 1e3
}

const slotSeconds = int64(observe.SlotTime / time.Second)

const shownChoices = 12

// viewState returns a pool's state. The histories begin at since, in Unix seconds. steers: the client may
// drain workers.
func viewState(p *pool.Pool, since int64, steers bool, t time.Time) *stateView {
	slot := observe.SlotOf(t) - 1 // the last that has ended
	v := &stateView{
		Version: observe.Version(), Pool: p.Name, CanDrain: steers, Pools: []string{}, Until: (slot + 1) * slotSeconds, Waiting: p.Waiting(), Sessions: p.Sessions.Len(),
		Choices: []pastView{}, History: []pointView{}, Open: openIncidents(p, t), Routers: []peerView{},
		Limits: p.Quota.Standing(t, statusTenants),
	}
	v.Classes, v.Tenants = p.Queued(t)
	v.ByClass = viewClasses(p, v.Classes, t)
	for _, p := range sortedPools() {
		v.Pools = append(v.Pools, p.Name)
	}
	if x := explainerOf(p); x != nil {
		v.Policy = x.policyName()
	}
	first := min(max(since/slotSeconds, slot+2-observe.RecentSlots), slot+1)
	var all observe.Sums
	line := make([]observe.Sums, slot+1-first)
	for i := range line {
		line[i].Slot = first + int64(i)
	}
	set := p.Settings.Load()
	workers := slices.DeleteFunc(sortedWorkers(p), func(w *worker.Worker) bool { return !p.IsUpstream(set, w) && !w.Draining() })
	v.Workers = viewWorkers(p, workers, t, &all, line)
	for i := range v.Workers {
		w := &v.Workers[i]
		w.Ranks, w.Taints, w.Engine.Info = nil, nil, engine.Info{} // so that it stays small
	}
	v.Recent, v.History = viewRecent(&all), append(v.History, viewHistory(line)...)
	for _, c := range p.Choices.Past(shownChoices, "", 0) {
		v.Choices = append(v.Choices, viewPast(&c, false, steers, t))
	}
	if s := viewShare(p, t); s != nil {
		v.Routers = s.Peers
	}
	return v
}

// round leaves three digits of a share.
func round(f float64) float64 { return float64(int64(f*1e3+0.5)) / 1e3 }

func getState(r *http.Request, p *pool.Pool) (any, error) { return stateSince(r, "since", p, true) }

// stateSince returns the state with the slots from the time that a parameter has. steers: the client
// may drain workers.
func stateSince(r *http.Request, param string, p *pool.Pool, steers bool) (*stateView, error) {
	since, err := numberIn(r, param)
	if err != nil {
		return nil, err
	}
	return viewState(p, since, steers, time.Now()), nil
}

// numberIn returns a number of the query, 0 if it is not there.
func numberIn(r *http.Request, name string) (int64, error) {
	s := r.URL.Query().Get(name)
	if s == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 {
		return 0, apiError(http.StatusBadRequest, "%s: must be a whole number from 0, got %q", name, s)
	}
	return n, nil
}

func (x *Explainer) policyName() string {
	if m, ok := x.Dispatcher.Policy.(caddy.Module); ok {
		return m.CaddyModule().ID.Name()
	}
	return ""
}
