package batch

import "time"

// StepModel says how long one step of continuous batching takes:
//
//	Base + PerToken * tokens
//	     + Attention * sum over prefill chunks of n*(k + n/2)
//	     + DecodeContext * sum over decodes of their context
//
// where n is a chunk's tokens and k the tokens before it. All coefficients are in
// milliseconds.
type StepModel struct {
	Base          float64 `json:"base"`
	PerToken      float64 `json:"per_token"`
	Attention     float64 `json:"attention"`
	DecodeContext float64 `json:"decode_context"`
}

// DefaultStepModel is about a model of 8 billion parameters on one H100. It was
// not calibrated.
var DefaultStepModel = StepModel{Base: 8, PerToken: 0.04, Attention: 1.5e-6, DecodeContext: 5e-5}

// work is what one step does.
type work struct {
	tokens    int
	attention float64 // sum of n*(k + n/2)
	context   float64 // sum of the decodes' contexts, in tokens
	drag      float64
}

func (w *work) prefill(k, n int) {
	w.tokens += n
	w.attention += float64(n) * (float64(k) + float64(n)/2)
}

func (w *work) decode(context int) {
	w.tokens++
	w.context += float64(context)
}

// duration returns how long a step with this work takes; 0 if there is none.
func (m StepModel) duration(w work) time.Duration {
	if w.tokens == 0 {
		return 0
	}
	return max(1, time.Duration(m.MS(w.tokens, w.attention, w.context)*max(1, w.drag)*float64(time.Millisecond)))
}

// MS returns how many milliseconds a step with so many tokens and these sums takes.
func (m StepModel) MS(tokens int, attention, context float64) float64 {
	return m.Base + m.PerToken*float64(tokens) + m.Attention*attention + m.DecodeContext*context
}
