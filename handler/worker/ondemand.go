package worker

import (
	"sync/atomic"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
)

// onDemand is what a worker has loaded that loads models on demand, such as Ollama, llama-swap or
// llama.cpp's router. To load another model takes seconds, and may push out the present one.
type onDemand struct {
	does atomic.Bool
	last atomic.Pointer[string] // the model of the last request; nil: there was none
}

// LoadsOnDemand returns whether the worker loads models on demand.
func (w *Worker) LoadsOnDemand() bool { return w.onDemand.does.Load() }

// findOnDemand finds out whether the worker loads models on demand. It then lists several, and its engine is
// of no type that has one base model for its life.
func (w *Worker) findOnDemand() {
	list, kind := w.list.Load(), w.Engine().Type
	one := kind == engine.VLLM || kind == engine.SGLang || kind == engine.TRTLLM || kind == engine.Dynamo
	w.onDemand.does.Store(!one && list != nil && len(list.Entries)-len(list.Adapters) > 1)
}

// Requested records that the worker gets a request for a model.
func (w *Worker) Requested(model string) {
	if last := w.onDemand.last.Load(); model != "" && w.LoadsOnDemand() && (last == nil || *last != model) {
		w.onDemand.last.Store(&model)
	}
}

// Factors of the cost of a worker that must load the model first, and of one that would push out
// another model for it. Both together are more than few requests that wait for a loaded model.
const mustLoad, mustSwap = 5, 10

// LoadFactor returns the factor of the worker's cost for a model.
func (w *Worker) LoadFactor(model string) float64 {
	if model == "" || !w.LoadsOnDemand() {
		return 1
	}
	last, list := w.onDemand.last.Load(), w.list.Load()
	switch {
	case last != nil && *last == model, list != nil && list.Loaded[model]:
		return 1
	case last == nil && list != nil && len(list.Loaded) == 0:
		return mustLoad
	}
	return mustSwap
}
