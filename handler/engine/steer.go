package engine

import (
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
)

// steering is an engine's own member that does what nvext needs a grant for.
type steering struct {
	member string
	grant  nvext.Grants
	heeds  func(*Engine) bool // nil: the engine always heeds the member
	in     []string           // the path of the object that has the member; nil: the request itself
}

const namePriority, nameRank, nameOldRank = "priority", "routed_dp_rank", "data_parallel_rank"

var (
	// rankSteering are SGLang's members for ranks.
	rankSteering = []steering{
		{member: nameRank, grant: nvext.Pins},
		{member: nameOldRank, grant: nvext.Pins},
		{member: namePrefillRank, grant: nvext.Pins},
	}
	// prioritySteering is the priority of engines that do not report whether they
	// heed it.
	prioritySteering = []steering{{
		member: namePriority, grant: nvext.Priorities,
		heeds: func(e *Engine) bool { return e.Settings.Priority == On },
	}}
)

// guard removes the members that steer the engine without the client's grant.
// Members that the engine ignores stay.
func (f *adapter) guard() {
	for _, s := range f.steers {
		in, ok := f.Body, f.Grants&s.grant == 0 && (s.heeds == nil || s.heeds(f.Engine))
		for _, name := range s.in {
			if ok = ok && in.IsSet(name); ok {
				of := in
				if in, ok = of.Object(name); !ok && of.Given(name).First(of.Body) == '{' { // it has too many members
					of.Cut(name)
					f.Dropped |= s.grant
				}
			}
		}
		if !ok || !in.IsSet(s.member) {
			continue
		}
		f.Dropped |= s.grant
		if !in.Changed(s.member) { // else the router has replaced it
			in.Cut(s.member)
		}
	}
}
