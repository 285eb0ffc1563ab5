package worker

import (
	"sync/atomic"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
)

// Engine returns what is known of the worker's engine: type, info and settings. The caller
// must not change it.
func (w *Worker) Engine() *engine.Engine { return w.engine.Load() }

// Describe stores what is known of the worker's engine. Its type is the configured one, or
// else the one that it shows. changed: the worker serves other parts of requests than before.
func (w *Worker) Describe(set Settings, info engine.Info) (changed bool) {
	e := engine.Engine{Type: info.Type, Info: info, Settings: engine.Settings{
		Priority: engine.Switch(set.Priority), ThinkingBudget: engine.Switch(set.ThinkingBudget),
		CacheSalt: engine.Switch(set.CacheSalt), Sessions: engine.Switch(set.Sessions), DynamoInstance: set.DynamoInstanceID,
		Role: engine.Role(set.Role), MooncakePort: set.MooncakePort,
	}}
	if set.Engine != EngineAuto {
		e.Type = set.Engine
	}
	w.engine.Store(&e)
	if info.Asleep {
		w.drain.Or(drainAsleep)
	} else {
		w.drain.And(^drainAsleep)
	}
	w.findOnDemand()
	tokens, alone := e.Room()
	w.room.tokens.Store(tokens)
	w.room.alone.Store(alone)
	now := uint32(servedBy(&e))
	return w.serves.Swap(now) != now
}

// room is how long a request may be on a worker: see [engine.Engine.Room].
type room struct {
	tokens atomic.Int64
	alone  atomic.Bool
}

// IsShort returns whether the worker probably has no room for a prompt and its answer, in tokens. 0 is
// unknown.
func (w *Worker) IsShort(prompt, answer int64) bool {
	most := w.room.tokens.Load()
	if most == 0 || prompt == 0 {
		return false
	}
	return prompt > most || prompt+answer > most && !w.room.alone.Load()
}

// IsLonger returns whether the worker may have room for more tokens.
func (w *Worker) IsLonger(than int64) bool {
	most := w.room.tokens.Load()
	return most == 0 || most > than
}

// Room returns the most tokens that a request may have on the worker, 0 if that is unknown.
func (w *Worker) Room() int64 { return w.room.tokens.Load() }
