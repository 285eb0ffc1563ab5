package pool

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// Saturated is for which workers a saturation holds: those of a role that serve a model.
type Saturated struct {
	Role  engine.Role
	Model string // empty: any
}

// mostModels bounds the saturations that are shown. Those of all models, and of the first ones by name, are.
const mostModels = 256

// Saturations returns how busy workers are, from 0 to 1, on average. That of all whole requests is always
// there. It is 1 while requests wait. Engines that sleep or drain do not count, nor do backups.
func (p *Pool) Saturations(t time.Time) map[Saturated]float64 {
	workers, set := make(map[Saturated]float64), p.Settings.Load()
	sums := map[Saturated]float64{{Role: engine.RoleBoth}: 0}
	for _, w := range p.All() {
		if w.IsBackup() || w.Draining() || !p.IsUpstream(set, w) {
			continue
		}
		one, role := p.saturation(t, w), w.Engine().Role()
		for _, of := range append(w.BaseModels(), "") {
			if key := (Saturated{role, of}); observe.IsModelLabel(of) {
				sums[key] += one
				workers[key]++
			}
		}
	}
	for key, n := range workers {
		sums[key] /= n
	}
	p.queue.saturate(sums)
	if len(sums) > mostModels {
		keys := slices.SortedFunc(maps.Keys(sums), func(a, b Saturated) int { return cmp.Compare(a.Model, b.Model) })
		for _, key := range keys[mostModels:] {
			delete(sums, key)
		}
	}
	return sums
}

// saturation returns how busy a worker is: by its slots, by its KV cache, and by whether it has room.
func (p *Pool) saturation(t time.Time, w *worker.Worker) (most float64) {
	if !w.TakesRequests(t) || w.IsFull() {
		return 1
	}
	if running, limit := w.Running(); limit > 0 {
		most = float64(running) / float64(limit)
	}
	load, crowded := p.Load(t, w), 0.0
	if load.CapacityTokens > 0 {
		most = max(most, (load.PromptBlocks+float64(load.OutputBlocks))*float64(p.Settings.Load().BlockSize)/float64(load.CapacityTokens))
	}
	for rank := range w.Ranks() {
		if room, _ := p.Scheduler.Room(t, w.Target(rank)); room < kvscore.SomeRoom {
			crowded += 1 / float64(w.Ranks())
		}
	}
	return min(1, max(most, crowded))
}

// saturate sets what requests wait for to 1.
func (q *waiters) saturate(sums map[Saturated]float64) {
	if q.length.Load() == 0 {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, l := range q.lanes {
		for key := range sums {
			if l.background || (key.Role == engine.RolePrefill) != (l.want.Part == worker.Prefill) {
				continue
			}
			if key.Model == "" || key.Model == l.want.Model {
				sums[key] = 1
			}
		}
	}
}
