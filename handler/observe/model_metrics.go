package observe

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	// maxModelLabels bounds the models of a worker that metrics tell apart. modelOther stands for the
	// others.
	maxModelLabels = 16
	modelOther     = "other"
	// maxModelLabel is the longest name of a model in a label, in bytes.
	maxModelLabel = 128
)

// The collectors of workers and models. The series of a worker go when the pool forgets it.
var (
	workerOutcomes = Counter("worker_outcomes_total", "Attempts by outcome: that of the request, or why the request went on at another worker.",
		"worker", "model", "outcome")
	workerTokens = Counter("worker_tokens_total",
		"Tokens that the worker's answers report: of prompts, predicted as cached and reported as cached of these, and generated.", "worker", "model", "tokens")
	workerTTFT = Histogram("worker_time_to_first_token_seconds", prometheus.ExponentialBucketsRange(0.01, 120, 14),
		"Time from the choice of the worker to the first token of a streamed answer.", "worker", "model")
	workerITL = Histogram("worker_inter_token_latency_seconds", prometheus.ExponentialBucketsRange(0.002, 2, 10),
		"Mean time between the chunks of a streamed answer, once per answer.", "worker", "model")
)

// IsModelLabel returns whether metrics name a model.
func IsModelLabel(model string) bool { return len(model) <= maxModelLabel && utf8.ValidString(model) }

// Outcomes of attempts whose request went on at another worker. Metrics have them beside the outcomes
// of requests.
const (
	AttemptRetried   = "retried"   // it failed, and the router tried again
	AttemptResumed   = "resumed"   // its stream broke off
	AttemptDrained   = "drained"   // its worker drains
	AttemptPrefilled = "prefilled" // it was the prefill phase
	AttemptDeclined  = "declined"  // its engine lacks the model or the room, and another one may have it

	// AttemptClientError is the engine's answer to a mistake of the client.
	AttemptClientError = "client_error"
)

// attemptOutcomes are the outcomes of attempts.
var attemptOutcomes = [...]string{
	"ok", "engine_error", "unavailable", "broken", "client_gone", AttemptRetried, AttemptResumed, AttemptDrained, AttemptPrefilled, AttemptDeclined, AttemptClientError,
}

// requestOutcomes is how many of them, the first ones, are outcomes of requests.
const requestOutcomes = 5

// ModelMetrics count the requests of one worker for one model, as metrics and in [Recent].
type ModelMetrics struct {
	Model     string // as metrics name it: empty if the request names none, other if the worker does not list it
	recent    *Recent
	outcomes  [len(attemptOutcomes)]prometheus.Counter
	ttft, itl prometheus.Observer

	prompt, predicted, reported, generated prometheus.Counter
}

// Worker is what is shown of a worker's past: its series in metrics, and its last minutes.
type Worker struct {
	Recent     Recent
	pool, dial string

	mu      sync.Mutex
	byModel map[string]*ModelMetrics
	fault   string // why it was marked down last
}

// MarkedDown records why the worker was marked down.
func (w *Worker) MarkedDown(why string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fault = why
}

// Fault returns why the worker was marked down last, "" if it never was.
func (w *Worker) Fault() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.fault
}

// LastFailure returns it as an error that names the worker; nil if it was never marked down.
func (w *Worker) LastFailure() error {
	why := w.Fault()
	if why == "" {
		return nil
	}
	return fmt.Errorf("worker %s: %s", w.dial, why)
}

// NewWorker returns what is shown of the worker at an address.
func NewWorker(pool, dial string) *Worker {
	return &Worker{pool: pool, dial: dial, byModel: make(map[string]*ModelMetrics)}
}

// ModelMetrics returns the metrics for a model. known: the operator or the engine lists it. Only such models
// have metrics of their own: other names come from clients.
func (w *Worker) ModelMetrics(model string, known bool) *ModelMetrics {
	label := model
	if model != "" && (!IsModelLabel(model) || !known) {
		label = modelOther
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if label != "" && len(w.byModel) >= maxModelLabels && w.byModel[label] == nil {
		label = modelOther
	}
	f := w.byModel[label]
	if f == nil {
		f = w.newModelMetrics(strings.Clone(label)) // the request's body may hold it
		w.byModel[f.Model] = f
	}
	return f
}

func (w *Worker) newModelMetrics(model string) *ModelMetrics {
	of := []string{w.pool, w.dial, model}
	f := &ModelMetrics{
		Model: model, recent: &w.Recent, ttft: workerTTFT.WithLabelValues(of...), itl: workerITL.WithLabelValues(of...),
		prompt: workerTokens.WithLabelValues(append(of, "prompt")...), predicted: workerTokens.WithLabelValues(append(of, "predicted")...),
		reported: workerTokens.WithLabelValues(append(of, "reported")...), generated: workerTokens.WithLabelValues(append(of, "generated")...),
	}
	for i, outcome := range attemptOutcomes {
		f.outcomes[i] = workerOutcomes.WithLabelValues(append(of, outcome)...)
	}
	return f
}

// Ended counts an attempt. failed: it failed by the worker's fault, as far as the router knows.
func (f *ModelMetrics) Ended(outcome string, failed bool) {
	i := slices.Index(attemptOutcomes[:], outcome)
	if i < 0 {
		return
	}
	f.outcomes[i].Inc()
	f.recent.note(time.Now(), func(s *Sums) {
		s.Active = 1
		s.Attempts++
		if i < requestOutcomes || outcome == AttemptClientError { // its request ended with it
			s.Requests++
		}
		if failed {
			s.Failed++
		}
	})
}

// FirstToken counts a first token that came at t, so long after the choice of the worker.
func (f *ModelMetrics) FirstToken(t time.Time, after time.Duration) {
	f.ttft.Observe(after.Seconds())
	f.recent.note(t, func(s *Sums) { s.FirstTokens.note(after) })
}

// Answered counts a plain answer that came at t, so long after the choice of the worker. tokens are
// those of the answer, if they are known.
func (f *ModelMetrics) Answered(t time.Time, after time.Duration, tokens int64) {
	f.recent.note(t, func(s *Sums) {
		s.Plain.note(after)
		if tokens > 0 {
			s.plain, s.plainTokens = s.plain+after, s.plainTokens+tokens
		}
	})
}

// Pace counts the mean time between the chunks of an answer.
func (f *ModelMetrics) Pace(mean time.Duration) {
	f.itl.Observe(mean.Seconds())
	f.recent.note(time.Now(), func(s *Sums) { s.Paces, s.paces = s.Paces+1, s.paces+mean })
}

// Generated counts the tokens of an answer.
func (f *ModelMetrics) Generated(n int64) { f.generated.Add(float64(n)) }

// Compared counts the tokens of a prompt: all, those predicted as cached, and those reported as
// cached.
func (f *ModelMetrics) Compared(prompt, predicted, reported int64) {
	f.prompt.Add(float64(prompt))
	f.predicted.Add(float64(predicted))
	f.reported.Add(float64(reported))
	f.recent.note(time.Now(), func(s *Sums) {
		s.Reports++
		s.Prompt, s.Predicted, s.Cached = s.Prompt+prompt, s.Predicted+predicted, s.Cached+reported
	})
}

// ForgetModels deletes the metrics of models that are not listed any more.
func (w *Worker) ForgetModels(listed func(model string) bool) {
	w.forget(func(model string) bool { return model != "" && model != modelOther && !listed(model) })
}

// forget deletes the metrics of models.
func (w *Worker) forget(which func(model string) bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for model := range w.byModel {
		if which(model) {
			delete(w.byModel, model)
			deleteSeries(prometheus.Labels{"pool": w.pool, "worker": w.dial, "model": model})
		}
	}
}

// ForgetMetrics deletes the metrics of all models.
func (w *Worker) ForgetMetrics() { w.forget(func(string) bool { return true }) }
