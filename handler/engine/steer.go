package engine

import "github.com/caddy-kvrouter/kvrouter/handler/nvext"

// steering is an engine's own member that does what nvext needs a grant for.
type steering struct {
	member string
	grant  nvext.Grants
	heeded bool
}

const namePriority, nameRetention, nameRank, nameOldRank = "priority", "retention_seconds", "routed_dp_rank", "data_parallel_rank"

// guard removes the members that steer the engine without the client's grant.
// Members that the engine ignores stay.
func (f *fit) guard() {
	if f.Body == nil {
		return
	}
	for _, s := range f.steerings() {
		if !s.heeded || f.Grants&s.grant != 0 || isNull(f.Body.Value(s.member)) {
			continue
		}
		f.Dropped |= s.grant
		if !f.Body.Changed(s.member) { // else the router has replaced it
			f.Body.Cut(s.member)
		}
	}
}

// steerings returns the members that steer this engine. An engine of unknown type
// may heed ranks.
func (f *fit) steerings() []steering {
	unknown := f.Type == "" || f.Type == Other
	ranked, ordered := unknown, f.Settings.Priority == On
	var more []steering
	switch f.Type {
	case LlamaCpp:
		return []steering{{"id_slot", nvext.Pins, true}}
	case SGLang:
		evicts := f.evicts()
		ranked, ordered = true, evicts || f.Settings.Priority.or(f.Info.Priority)
		more = []steering{{nameRetention, nvext.Priorities, evicts}}
	}
	return append([]steering{
		{nameRank, nvext.Pins, ranked},
		{nameOldRank, nvext.Pins, ranked},
		{"disagg_prefill_dp_rank", nvext.Pins, ranked},
		{namePriority, nvext.Priorities, ordered},
	}, more...)
}
