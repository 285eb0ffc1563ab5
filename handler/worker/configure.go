package worker

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
)

// New returns a worker of a pool, which need not know it.
func New(pool string, set Settings) *Worker {
	w := &Worker{
		Dial: set.Dial, ID: set.ID, Past: observe.NewWorker(pool, set.Dial), slots: new(slots), probed: make(chan struct{}),
		derenders: make(chan struct{}, 1),
	}
	w.Describe(set, engine.Info{})
	w.dp.Store(int32(set.DPSize))
	w.LimitSlots(set)
	w.See(time.Now().Unix())
	w.Configure(set)
	return w
}

// Succeed takes over the requests and the drain of the worker that was at the same address with another
// id.
func (w *Worker) Succeed(old *Worker) {
	w.slots = old.slots // the address still runs its requests
	if asked, _ := old.DrainAsked(); asked {
		w.drains.set(drainAsked, true) // the operator drained the address
	}
}

// Describe stores what is known of the worker's engine. Its type is the configured one, or
// else the one that it shows. changed: the worker serves other parts of requests than before,
// or pairs with other workers.
func (w *Worker) Describe(set Settings, info engine.Info) (changed bool) {
	e := engine.Engine{Type: info.Type, Info: info, Settings: engine.Settings{
		Priority: engine.Switch(set.Priority), ThinkingBudget: engine.Switch(set.ThinkingBudget),
		CacheSalt: engine.Switch(set.CacheSalt), Sessions: engine.Switch(set.Sessions), DynamoInstance: set.DynamoInstanceID,
		Role: engine.Role(set.Role), MooncakePort: set.MooncakePort,
	}}
	switch {
	case set.IsBackup(): // nobody has asked it
		e.Type = engine.Other
	case set.Engine != EngineAuto:
		e.Type = set.Engine
	}
	old := w.engine.Swap(&e)
	w.drains.set(drainAsleep, info.Asleep)
	w.findOnDemand()
	tokens, alone := e.Room()
	w.room.tokens.Store(tokens)
	w.room.alone.Store(alone)
	now := uint32(servedBy(&e))
	changed = w.serves.Swap(now) != now
	return changed || (w.IsPrefill() || w.IsDecode()) && !e.Alike(old)
}

// Configure stores the worker's settings.
func (w *Worker) Configure(set Settings) {
	w.drains.set(drainConfigured, set.Drain != nil && *set.Drain)
	w.waking.may.Store(set.Wake != nil && *set.Wake)
	w.taints.Store(&set.Taints)
	w.model.Store(&set.Model)
	if len(set.Models) == 0 {
		w.configured.Store(nil)
		return
	}
	models := make(map[string]bool, len(set.Models))
	for _, m := range set.Models {
		models[m] = true
	}
	w.configured.Store(&models)
}

// LimitSlots applies the worker's limit, as configured or as its engine reports it. The
// engine reports the limit of one rank.
func (w *Worker) LimitSlots(set Settings) {
	limit := int64(set.MaxRunning)
	if set.MaxRunning == LimitAuto {
		info, ranks := &w.Engine().Info, w.Ranks()
		if ranks == 1 { // the engine may have ranks that the router does not choose
			ranks = max(1, info.DPSize)
		}
		limit = int64(info.MaxRunning) * int64(ranks)
	}
	w.slots.limit.Store(limit)
}
