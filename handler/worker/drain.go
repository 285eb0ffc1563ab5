package worker

import "time"

// Reasons why a worker drains, as bits of Worker.drain.
const (
	drainConfigured uint32 = 1 << iota
	drainAsked             // by the admin API
	drainMoves             // by the admin API, and streams are moved away
	drainAsleep            // the engine sleeps
)

// Draining returns whether the worker gets no new requests.
func (w *Worker) Draining() bool { return w.drain.Load() != 0 }

// Drains returns who wants that the worker drains: the admin API, the configuration, or both.
func (w *Worker) Drains() (asked, configured bool) {
	reasons := w.drain.Load()
	return reasons&drainAsked != 0, reasons&drainConfigured != 0
}

// Asleep returns whether the worker drains because its engine sleeps.
func (w *Worker) Asleep() bool { return w.drain.Load()&drainAsleep != 0 }

// AskDrain begins or ends the admin API's wish that the worker drains. It returns whether the worker had
// the other one, and the number of the call.
func (w *Worker) AskDrain(drains bool) (changed bool, version uint64) {
	version = w.drainVersion.Add(1)
	return w.setDrain(drains), version
}

// DrainAsked returns the admin API's wish, and the number of the call that it comes from, 0 if there was
// none.
func (w *Worker) DrainAsked() (asked bool, version uint64) {
	return w.drain.Load()&drainAsked != 0, w.drainVersion.Load()
}

// MoveStreams has the streams of a draining worker move to others, as far as they can. It returns
// whether that is new.
func (w *Worker) MoveStreams() (changed bool) { return w.drain.Or(drainMoves)&drainMoves == 0 }

// MovesStreams returns whether the streams of the worker are to move to others.
func (w *Worker) MovesStreams() bool { return w.drain.Load()&drainMoves != 0 }

// FollowDrain takes over what another router's admin API was told, unless this one knows of a later
// call. If two calls come at once, the drain counts.
func (w *Worker) FollowDrain(drains bool, version uint64) (changed bool) {
	own := w.drainVersion.Load()
	if version < own || version == own && !drains {
		return false
	}
	w.drainVersion.Store(version)
	return w.setDrain(drains)
}

// setDrain begins or ends the admin API's wish that the worker drains.
func (w *Worker) setDrain(drains bool) (changed bool) {
	if drains {
		return w.drain.Or(drainAsked)&drainAsked == 0
	}
	return w.drain.And(^(drainAsked|drainMoves))&drainAsked != 0
}

// TakesRequests returns whether the worker is neither marked down, hung nor draining.
func (w *Worker) TakesRequests(t time.Time) bool { return !w.Draining() && w.Health.Available(t) }
