package dispatch

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/pool"
)

// Outcomes of a request with a target of the time to the first token.
const (
	promiseKept    = "kept"
	promiseLate    = "late"
	promiseRefused = "refused"
	promiseDemoted = "demoted"
)

// compare compares the first token of a stream with its prediction, and with its class's target.
func (d *Dispatch) compare(s *pool.Seat, t time.Time) {
	class := d.plan.Class
	if class == nil {
		return
	}
	actual := t.Sub(d.ready)
	switch target := d.plan.TTFT; {
	case target == 0:
	case s.Demoted:
		d.promised(promiseDemoted)
	case actual > target:
		d.promised(promiseLate)
	default:
		d.promised(promiseKept)
	}
	if predicted := s.Predicted.Sub(d.ready); d.attempts == 1 && predicted > 0 && !s.Demoted && !s.Worker.IsBackup() {
		d.Pool.Promises.Compare(class.Name, d.plan.TTFT, predicted, actual, t)
		d.Metrics.predictions.WithLabelValues(d.Pool.Name, class.Name).Observe(predicted.Seconds() / max(actual.Seconds(), 1e-3))
	}
}

// promised counts what became of a request's target.
func (d *Dispatch) promised(outcome string) {
	d.Metrics.promises.WithLabelValues(d.Pool.Name, d.plan.Class.Name, outcome).Inc()
}
