package worker

import (
	"github.com/caddy-kvrouter/kvrouter/handler/engine"
)

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
