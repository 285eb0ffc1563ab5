package worker

import (
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
)

// Part is a part of a request that a worker serves.
type Part uint8

// The parts.
const (
	Any     Part = iota // of a request that computes no prompt: any worker can serve it
	Whole               // all of it
	Answer              // all of it, or only the answer to a prompt that another worker computes
	Prefill             // only its prompt
)

// serves are the parts that a worker serves, as bits of Worker.serves: what role it has, and
// whether its engine can serve whole requests.
type serves uint32

const (
	forPrefill serves = 1 << iota
	forDecode
	onlyLegs // no whole requests
	holdsOn  // it is for prefills, and cannot hand them over now
)

func servedBy(e *engine.Engine) (s serves) {
	switch e.Role() {
	case engine.RolePrefill:
		if s = forPrefill; !e.HandsOver() {
			s |= holdsOn
		}
	case engine.RoleDecode:
		s = forDecode
	case engine.RoleBoth:
	}
	if !e.ServesWhole() {
		s |= onlyLegs
	}
	return s
}

// IsPrefill and IsDecode return whether the worker is for one part of requests.
func (w *Worker) IsPrefill() bool { return serves(w.serves.Load())&forPrefill != 0 }
func (w *Worker) IsDecode() bool  { return serves(w.serves.Load())&forDecode != 0 }

// ServesWhole returns whether the worker can serve a whole request.
func (w *Worker) ServesWhole() bool { return serves(w.serves.Load())&onlyLegs == 0 }

// ServesPart returns whether the worker serves a part of requests. reluctant: it is for prefills, but can
// serve a whole request.
func (w *Worker) ServesPart(part Part) (yes, reluctant bool) {
	s := serves(w.serves.Load())
	switch {
	case part == Any:
	case part == Prefill:
		return s&forPrefill != 0 && s&holdsOn == 0, false
	case part == Answer && s&forDecode != 0:
	case s&onlyLegs != 0:
		return false, false
	case s&forPrefill != 0:
		return true, true
	}
	return true, false
}
