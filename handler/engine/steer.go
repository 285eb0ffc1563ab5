package engine

import (
	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// steering is an engine's own member that does what nvext needs a grant for.
type steering struct {
	member string
	grant  nvext.Grants
	heeds  func(*Engine) bool // nil: the engine always heeds the member
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

// guardExtraArgs removes a transfer of KV blocks from the members that vLLM passes on to its
// scheduler, as guard does from the request itself.
func (f *adapter) guardExtraArgs() {
	if f.Type != VLLM || f.Grants&nvext.Pins != 0 {
		return
	}
	cut := func(in *rawjson.Editor, ok bool) {
		if ok && !isNull(in.Value(nameTransfer)) {
			in.Cut(nameTransfer)
			f.Dropped |= nvext.Pins
		}
	}
	if !isNull(f.Body.Value("vllm_xargs")) {
		cut(f.Body.Object("vllm_xargs"))
	}
	if f.API != api.NameTokens {
		return
	}
	if in, ok := f.Body.Object(nameSampling); ok && !isNull(in.Value("extra_args")) {
		cut(in.Object("extra_args"))
	}
}

// guard removes the members that steer the engine without the client's grant.
// Members that the engine ignores stay.
func (f *adapter) guard() {
	for _, s := range f.steers {
		if f.Grants&s.grant != 0 || s.heeds != nil && !s.heeds(f.Engine) || !f.Body.IsSet(s.member) {
			continue
		}
		f.Dropped |= s.grant
		if !f.Body.Changed(s.member) { // else the router has replaced it
			f.Body.Cut(s.member)
		}
	}
}
