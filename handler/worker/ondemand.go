package worker

import (
	"sync/atomic"
)

// onDemand is what a worker has loaded that loads models on demand, such as Ollama, llama-swap or
// llama.cpp's router. To load another model takes seconds, and may push out the present one.
type onDemand struct {
	does atomic.Bool
	last atomic.Pointer[string] // the model of the last request; nil: there was none
}

// LoadsOnDemand returns whether the worker loads models on demand.
func (o *onDemand) LoadsOnDemand() bool { return o.does.Load() }

// Requested records that the worker gets a request for a model.
func (o *onDemand) Requested(model string) {
	if last := o.last.Load(); model != "" && o.does.Load() && (last == nil || *last != model) {
		o.last.Store(&model)
	}
}

// Factors of the cost of a worker that must load the model first, and of one that would push out
// another model for it. Both together are more than few requests that wait for a loaded model.
const mustLoad, mustSwap = 5, 10
