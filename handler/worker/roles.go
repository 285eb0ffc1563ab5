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

// IsPrefill and IsDecode return whether the worker is for one part of requests.
func (w *Worker) IsPrefill() bool { return serves(w.serves.Load())&forPrefill != 0 }
func (w *Worker) IsDecode() bool  { return serves(w.serves.Load())&forDecode != 0 }

// IsBackup returns whether the worker serves only what no other one can.
func (w *Worker) IsBackup() bool { return serves(w.serves.Load())&forBackup != 0 }

// ServesWhole returns whether the worker can serve a whole request.
func (w *Worker) ServesWhole() bool { return serves(w.serves.Load())&onlyPhases == 0 }

// ServesPart returns whether the worker serves a part of requests. fallback: it is for prefills, but can
// serve a whole request.
func (w *Worker) ServesPart(part Part) (yes, fallback bool) {
	s := serves(w.serves.Load())
	switch {
	case s&forBackup != 0:
		return part != Prefill, false
	case part == Any:
	case part == Prefill:
		return s&forPrefill != 0 && s&holdsOn == 0, false
	case part == Answer && s&forDecode != 0:
	case s&onlyPhases != 0:
		return false, false
	case s&forPrefill != 0:
		return true, true
	}
	return true, false
}

// serves are the parts that a worker serves, as bits of Worker.serves: what role it has, and
// whether its engine can serve whole requests.
type serves uint32

const (
	forPrefill serves = 1 << iota
	forDecode
	onlyPhases // no whole requests
	holdsOn    // it is for prefills, and cannot hand them over now
	forBackup
)

func servedBy(e *engine.Engine) (s serves) {
	switch e.Role() {
	case engine.RolePrefill:
		if s = forPrefill; !e.HandsOver() {
			s |= holdsOn
		}
	case engine.RoleDecode:
		s = forDecode
	case engine.RoleBackup:
		s = forBackup
	case engine.RoleBoth:
	}
	if !e.ServesWhole() {
		s |= onlyPhases
	}
	return s
}
