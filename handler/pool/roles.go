package pool

import (
	"slices"

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

// Transfers returns whether a worker is for one part of requests.
func (p *Pool) Transfers() bool {
	return slices.ContainsFunc(p.All(), func(w *Worker) bool { return w.IsPrefill() || w.IsDecode() })
}

// ServesWhole returns whether the worker can serve a whole request.
func (w *Worker) ServesWhole() bool { return serves(w.serves.Load())&onlyLegs == 0 }

// judgeRole returns whether the worker serves the part of a request: Fits, Reluctant or
// OtherRole.
func (w *Worker) judgeRole(want *Wants) Verdict {
	s := serves(w.serves.Load())
	switch {
	case want.Part == Any:
	case want.Part == Prefill:
		if s&forPrefill == 0 || s&holdsOn != 0 {
			return OtherRole
		}
	case want.Part == Answer && s&forDecode != 0:
	case s&onlyLegs != 0:
		return OtherRole
	case s&forPrefill != 0 && want.Only == nil:
		return Reluctant
	}
	return Fits
}
