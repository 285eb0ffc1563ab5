package admin

import (
	"cmp"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"

	"github.com/caddyserver/caddy/v2"
)

// stateView is what the page and the command status show of a pool. It is small enough to be asked
// for each second, and has no prompt, no session, and no secret.
type stateView struct {
	Pool  string   `json:"pool"`
	Pools []string `json:"pools"` // all there are
	// Steers is whether the page may drain workers.
	Steers bool `json:"steers"`
	// Slot is the last slot of ten seconds in the lines.
	Slot     int64           `json:"slot"`
	Policy   string          `json:"policy"`
	Waiting  int             `json:"waiting_requests"`
	Sessions int             `json:"sessions"`
	Recent   recentView      `json:"recent"`
	Line     []pointView     `json:"line"`
	Workers  []workerState   `json:"workers"`
	Choices  []pastView      `json:"choices"`
	Open     []pool.Incident `json:"incidents"`
	Routers  []peerView      `json:"routers"`
}

// workerState is a worker in a few words and figures. Unknown figures are absent.
type workerState struct {
	Dial  string `json:"dial"`
	State string `json:"state"`
	// Role is prefill or decode; empty for both.
	Role engine.Role `json:"role,omitzero"`
	// Signs are what sets the worker apart from its peers: slow, failing, cold.
	Signs      []string `json:"signs"`
	Engine     string   `json:"engine"`
	Models     []string `json:"models"`
	Running    int      `json:"running_requests"`
	MaxRunning int64    `json:"max_running_requests,omitzero"`
	// Waiting are the requests that the engine reports as waiting in it.
	Waiting *int64 `json:"engine_waiting_requests,omitzero"`
	// Active is the share of the KV cache that active requests use, Held the share that it holds.
	Active   float64     `json:"kv_active"`
	Held     float64     `json:"kv_held"`
	Capacity int64       `json:"kv_capacity_tokens"`
	Events   string      `json:"kv_events"`
	Notes    int         `json:"engine_notes"` // warnings and contradictions
	Drain    bool        `json:"drain_by_admin_api"`
	Recent   recentView  `json:"recent"`
	Line     []pointView `json:"line"`

	slowness float64 // of prefills, in relation to the prediction; 0 is unknown
}

// recentView is what happened in the last five minutes.
type recentView struct {
	Attempts int64    `json:"attempts"`
	Failed   int64    `json:"failed_attempts"`
	P50      float64  `json:"ttft_p50_ms,omitzero"`
	P99      float64  `json:"ttft_p99_ms,omitzero"`
	Pace     float64  `json:"inter_token_ms,omitzero"`
	Hits     *float64 `json:"reported_hit_ratio,omitzero"`
	Foreseen *float64 `json:"predicted_hit_ratio,omitzero"`
}

// pointView is a slot of a line.
type pointView struct {
	Attempts int64    `json:"n"`
	Failed   int64    `json:"failed,omitzero"`
	P50      float64  `json:"ttft,omitzero"`
	Hits     *float64 `json:"hits,omitzero"`
}

func viewRecent(s *pool.Sums) recentView {
	return recentView{
		Attempts: s.Attempts, Failed: s.Failed, P50: ms(s.TTFT(0.5)), P99: ms(s.TTFT(0.99)), Pace: ms(s.Pace()),
		Hits: share(s.Cached, s.Prompt), Foreseen: share(s.Predicted, s.Prompt),
	}
}

// recentOf returns the sums of a worker's last five minutes.
func recentOf(w *pool.Worker, t time.Time) *pool.Sums {
	sum := new(pool.Sums)
	w.Past.Recent.Add(t, sum, nil)
	return sum
}

// share returns part/whole with three digits, nil if whole is 0.
func share(part, whole int64) *float64 {
	f := ratio(part, whole)
	if f != nil {
		*f = round(*f)
	}
	return f
}

// viewLine returns the slots that have ended.
func viewLine(line []pool.Sums) []pointView {
	list := make([]pointView, len(line))
	for i := range line {
		s := &line[i]
		list[i] = pointView{Attempts: s.Attempts, Failed: s.Failed, P50: ms(s.TTFT(0.5)), Hits: share(s.Cached, s.Prompt)}
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

// shownChoices is how many of the last choices the state has.
const shownChoices = 12

// viewState returns a pool's state. The lines have the slots after since. steers: the client may
// drain workers.
func viewState(p *pool.Pool, since int64, steers bool, t time.Time) *stateView {
	v := &stateView{
		Pool: p.Name, Steers: steers, Pools: []string{}, Slot: pool.SlotOf(t) - 1, Waiting: p.Waiting(), Sessions: p.Sessions.Len(),
		Workers: []workerState{}, Choices: []pastView{}, Open: p.Incidents.Open(t), Routers: []peerView{},
	}
	for _, p := range sortedPools() {
		v.Pools = append(v.Pools, p.Name)
	}
	if x := explainerOf(p); x != nil {
		v.Policy = x.policyName()
	}
	first := min(max(since+1, v.Slot+2-pool.RecentSlots), v.Slot+1)
	line := func() []pool.Sums {
		list := make([]pool.Sums, v.Slot+1-first)
		for i := range list {
			list[i].Slot = first + int64(i)
		}
		return list
	}
	var all pool.Sums
	whole, proxy := line(), proxyOf(p)
	workers := p.All()
	slices.SortFunc(workers, func(a, b *pool.Worker) int { return cmp.Compare(a.Dial, b.Dial) })
	set, sums := p.Settings.Load(), make([]pool.Sums, 0, len(workers))
	for _, w := range workers {
		if !p.IsUpstream(set, w) && !w.Draining() {
			continue
		}
		var sum pool.Sums
		part := line()
		w.Past.Recent.Add(t, &sum, part)
		all.Add(&sum)
		for i := range part {
			whole[i].Add(&part[i])
		}
		s := viewWorkerState(p, w, t, proxy)
		s.Recent, s.Line = viewRecent(&sum), viewLine(part)
		v.Workers, sums = append(v.Workers, s), append(sums, sum)
	}
	findApart(v.Workers, sums)
	v.Recent, v.Line = viewRecent(&all), viewLine(whole)
	for _, c := range p.Past(shownChoices, "", 0) {
		v.Choices = append(v.Choices, viewPast(&c, false, steers, t))
	}
	if s := viewShare(p, t); s != nil {
		v.Routers = s.Peers
	}
	return v
}

func viewWorkerState(p *pool.Pool, w *pool.Worker, t time.Time, proxy map[string]proxyState) workerState {
	e, load := viewEngine(p, w), p.Load(t, w)
	running, limit := w.Running()
	asked, _ := w.Drains()
	s := workerState{
		Dial: w.Dial, Signs: []string{}, Engine: strings.TrimSpace(e.Type + " " + e.Version), Models: []string{},
		Running: load.Requests, MaxRunning: limit, Capacity: load.CapacityTokens, Drain: asked,
		Notes: len(e.Warnings) + len(e.Contradictions),
	}
	if role := w.Engine().Role(); role != engine.RoleBoth {
		s.Role = role
	}
	if configured, listed := w.ModelsOf(); configured != nil {
		s.Models = configured
	} else if listed != nil {
		s.Models = listed
	}
	held := load.CachedTokens
	if following := w.Following(); len(following) > 0 {
		held = 0
		for rank := range following {
			f := &following[rank]
			held += f.Held[cache.Device] * int64(f.BlockTokens)
			s.Events = f.State.String() + " " + f.Knowledge.String()
		}
	}
	if load.CapacityTokens > 0 {
		blocks := load.PromptBlocks + float64(load.OutputBlocks)
		s.Active = round(blocks * float64(p.Settings.Load().BlockSize) / float64(load.CapacityTokens))
		s.Held = round(float64(held) / float64(load.CapacityTokens))
	}
	for rank := range w.Ranks() {
		l, _ := p.Scheduler.Load(t, w.Target(rank))
		if l.Timings >= fewSamples {
			s.slowness = max(s.slowness, l.Slowness)
		}
		if !l.EngineAt.IsZero() {
			if s.Waiting == nil {
				s.Waiting = new(int64)
			}
			*s.Waiting += int64(l.Engine.Waiting)
		}
	}
	health := w.Health.State(t)
	s.State = stateOf(w, &health, proxy, load.Requests == 0, limit > 0 && running >= limit)
	if load.ErrorsApart() {
		s.Signs = append(s.Signs, signFailing)
	}
	return s
}

// round leaves three digits of a share.
func round(f float64) float64 { return float64(int64(f*1e3+0.5)) / 1e3 }

func getState(r *http.Request, p *pool.Pool) (any, error) { return stateSince(r, "since", p, true) }

// stateSince returns the state with the slots after the one that a parameter has. steers: the client
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
