package engine

import (
	"fmt"
	"slices"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/tests/engine/batch"
)

// Model is how fast an engine is, and how much it holds.
type Model struct {
	Name string
	// Budget is the most tokens in one step.
	Budget int
	batch.StepModel
	// Memory is the share of the KV tokens of a worker that this engine has.
	Memory float64
	// Mocker says that steps take as long as in Dynamo's engine simulator, in place of that formula.
	Mocker bool
}

// models are the presets; none is calibrated.
var models = []Model{
	// About an 8B model on one H100.
	{Name: "h100", Budget: 4096, StepModel: batch.DefaultStepModel, Memory: 1},
	// About the same on a card of a third of its speed, in small steps.
	{Name: "small", Budget: 2048, StepModel: batch.StepModel{Base: 12, PerToken: 0.12, Attention: 4e-6, DecodeContext: 1.5e-4}, Memory: 1},
	// A card of twice the speed, in large steps.
	{Name: "big", Budget: 8192, StepModel: batch.StepModel{Base: 6, PerToken: 0.018, Attention: 0.7e-6, DecodeContext: 2.5e-5}, Memory: 1},
	// A model with dear attention, which leaves little memory.
	{Name: "attention", Budget: 4096, StepModel: batch.StepModel{Base: 10, PerToken: 0.03, Attention: 6e-6, DecodeContext: 2e-4}, Memory: 0.65},
	// The default one with other steps.
	{Name: "steps_40ms", Budget: 4096, StepModel: batch.StepModel{Base: 40, PerToken: 0.04, Attention: 1.5e-6, DecodeContext: 5e-5}, Memory: 1},
	{Name: "steps_2k", Budget: 2048, StepModel: batch.DefaultStepModel, Memory: 1},
	{Name: "steps_16k", Budget: 16384, StepModel: batch.DefaultStepModel, Memory: 1},
	// That of Dynamo 1.6.1, with its default timing.
	{Name: "mocker", Budget: 8192, Memory: 1, Mocker: true},
}

// Default returns the model that is used if nothing else is said.
func Default() *Model { return &models[0] }

// Models returns the names of all models, the default first.
func Models() []string {
	names := make([]string, len(models))
	for i := range models {
		names[i] = models[i].Name
	}
	return names
}

// Find returns the model of a name.
func Find(name string) (*Model, error) {
	i := slices.IndexFunc(models, func(m Model) bool { return m.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("unknown engine %q, want one of %s", name, strings.Join(Models(), ", "))
	}
	return &models[i], nil
}

// StepMS returns how many milliseconds a step takes. Context is the tokens of the jobs that decode,
// usage the share of the KV memory that they fill. Attention is the sum n·(k + n/2) of the prefills.
func (m *Model) StepMS(decoding, context, prefilled int, attention, usage float64) (ms float64) {
	if !m.Mocker {
		return m.MS(decoding+prefilled, attention, float64(context))
	}
	if n := float64(prefilled); n > 0 {
		ms = 16.50142 + 0.01518344*n + 4.209989e-7*n*n
	}
	if usage = min(usage, 1); decoding > 0 { // jobs that share blocks count each of them
		ms += 5.74 + 54.01*usage - 25.74*usage*usage
	}
	return ms
}

// PrefillMS returns how many milliseconds n tokens behind k held ones take on an
// engine that does nothing else.
func (m *Model) PrefillMS(k, n int) (ms float64) {
	for ; n > 0; n -= m.Budget {
		step := min(n, m.Budget)
		ms += m.StepMS(0, 0, step, float64(step)*(float64(k)+float64(step)/2), 0)
		k += step
	}
	return ms
}
