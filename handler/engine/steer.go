package engine

import "github.com/caddy-kvrouter/kvrouter/handler/nvext"

// steering is a member of an engine's own by which a client has what nvext would
// need a grant for.
type steering struct {
	member string
	grant  nvext.Grants
	heeded bool
}

// guard cuts out the members that steer the engine in what the client is not
// trusted with. Those that the engine does not heed stay: to these it may have
// something to say.
func (f *fit) guard() {
	if f.Body == nil {
		return
	}
	for _, s := range f.steerings() {
		if !s.heeded || f.Grants&s.grant != 0 {
			continue
		}
		if isNull(f.Body.Value(s.member)) {
			continue
		}
		f.Dropped |= s.grant
		if !f.Body.Changed(s.member) { // else the router's own is in its place
			f.Body.Cut(s.member)
		}
	}
}

// steerings returns the members that steer this engine. A rank is one of an
// engine that does not tell how many it has, too, and of one that is not known.
func (f *fit) steerings() []steering {
	ordered := f.Settings.Priority == On
	unknown := f.Type == "" || f.Type == Other
	switch f.Type {
	case SGLang:
		evicts := f.evicts()
		return append(ranks(true),
			steering{namePriority, nvext.Priorities, evicts || f.Settings.Priority.or(f.Info.Priority)},
			steering{nameRetention, nvext.Priorities, evicts})
	case LlamaCpp:
		return []steering{{"id_slot", nvext.Pins, true}}
	}
	return append(ranks(unknown), steering{namePriority, nvext.Priorities, ordered})
}

const namePriority, nameRetention, nameRank, nameOldRank = "priority", "retention_seconds", "routed_dp_rank", "data_parallel_rank"

func ranks(heeded bool) []steering {
	return []steering{{nameRank, nvext.Pins, heeded}, {nameOldRank, nvext.Pins, heeded}, {"disagg_prefill_dp_rank", nvext.Pins, heeded}}
}
