package worker

import (
	"sync/atomic"
)

// drains says whether the worker drains.
type drains struct {
	reasons atomic.Uint32 // see drainConfigured
	version atomic.Uint64 // counts the calls of all routers' admin APIs that began or ended a drain
}

func (d *drains) set(reason uint32, is bool) {
	if is {
		d.reasons.Or(reason)
	} else {
		d.reasons.And(^reason)
	}
}

// Reasons why a worker drains, as bits.
const (
	drainConfigured uint32 = 1 << iota
	drainAsked             // by the admin API
	drainMoves             // by the admin API, and streams are moved away
	drainAsleep            // the engine sleeps
)

// Draining returns whether the worker gets no new requests.
func (d *drains) Draining() bool { return d.reasons.Load() != 0 }

// Drains returns who wants that the worker drains: the admin API, the configuration, or both.
func (d *drains) Drains() (asked, configured bool) {
	reasons := d.reasons.Load()
	return reasons&drainAsked != 0, reasons&drainConfigured != 0
}

// Asleep returns whether the worker drains because its engine sleeps.
func (d *drains) Asleep() bool { return d.reasons.Load()&drainAsleep != 0 }

// AskDrain begins or ends the admin API's wish that the worker drains. It returns whether the worker had
// the other one, and the number of the call.
func (d *drains) AskDrain(drains bool) (changed bool, version uint64) {
	version = d.version.Add(1)
	return d.setDrain(drains), version
}

// DrainAsked returns the admin API's wish, and the number of the call that it comes from, 0 if there was
// none.
func (d *drains) DrainAsked() (asked bool, version uint64) {
	return d.reasons.Load()&drainAsked != 0, d.version.Load()
}

// MoveStreams has the streams of a draining worker move to others, as far as they can. It returns
// whether that is new.
func (d *drains) MoveStreams() (changed bool) { return d.reasons.Or(drainMoves)&drainMoves == 0 }

// MovesStreams returns whether the streams of the worker are to move to others. An engine that sleeps holds what it
// gets until it is woken.
func (d *drains) MovesStreams() bool { return d.reasons.Load()&(drainMoves|drainAsleep) != 0 }

// FollowDrain takes over what another router's admin API was told, unless this one knows of a later
// call. If two calls come at once, the drain counts.
func (d *drains) FollowDrain(drains bool, version uint64) (changed bool) {
	own := d.version.Load()
	if version < own || version == own && !drains {
		return false
	}
	d.version.Store(version)
	return d.setDrain(drains)
}

func (d *drains) setDrain(drains bool) (changed bool) {
	if drains {
		return d.reasons.Or(drainAsked)&drainAsked == 0
	}
	return d.reasons.And(^(drainAsked|drainMoves))&drainAsked != 0
}
