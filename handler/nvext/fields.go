package nvext

import "math"

// field is a field of nvext, or of an object within it. Nothing here reads the values
// of some fields, which are known only.
type field struct {
	name string
	// needs is the grant without which the field has no effect, here or in a
	// Dynamo.
	needs Grants
	// own marks fields that no Dynamo gets: the router's own, and those that
	// Dynamo 1.3 refuses.
	own bool
	// required makes it an error if the object lacks the field, which is a string.
	required bool
	// in has the fields of a value that is an object. They are read before it.
	in   []field
	read reader
}

// maxFields is the largest number of fields in one object.
const maxFields = 22

// indexOf returns the index of the field of that name, -1 if there is none.
func indexOf(fields []field, name string) int {
	for n := range fields {
		if fields[n].name == name {
			return n
		}
	}
	return -1
}

// fields are the fields of nvext. Objects come last: an error in a plain field
// is reported first, and allowed_worker_ids of router_config_override wins.
var fields = []field{
	{name: "greed_sampling", read: boolean(func(e *Ext) *Opt[bool] { return &e.GreedSampling })},
	{name: "use_raw_prompt", read: boolean(func(e *Ext) *Opt[bool] { return &e.UseRawPrompt })},
	{
		name: "backend_instance_id", needs: Pins,
		read: integer64(func(e *Ext) *Opt[uint64] { return &e.BackendInstanceID }),
	},
	{name: "decode_worker_id", needs: Pins, read: integer64(func(e *Ext) *Opt[uint64] { return &e.DecodeWorkerID })},
	{
		name: "prefill_worker_id", needs: Pins,
		read: integer64(func(e *Ext) *Opt[uint64] { return &e.PrefillWorkerID }),
	},
	{name: "dp_rank", needs: Pins, read: rank(func(e *Ext) *Opt[uint32] { return &e.DPRank })},
	{name: "prefill_dp_rank", needs: Pins, read: rank(func(e *Ext) *Opt[uint32] { return &e.PrefillDPRank })},
	{name: "max_thinking_tokens", read: integer32(func(e *Ext) *Opt[uint32] { return &e.MaxThinkingTokens })},
	{name: "request_timestamp_ms"},
	{name: "cache_salt", read: text(func(e *Ext) *string { return &e.CacheSalt })},
	{
		name: "annotations", needs: Explain,
		read: words(func(e *Ext, name string) { e.Annotations |= annotationNamed(name) }),
	},
	{
		name: "extra_fields", needs: Explain,
		read: words(func(e *Ext, name string) { e.ExtraFields |= fieldNamed(name) }),
	},
	{name: "allowed_worker_ids", needs: Overrides, own: true, read: workers},
	{name: "token_data", read: tokenData},
	{name: "agent_hints", in: hintFields},
	{name: "session_control", own: true, in: controlFields, read: sessionControl},
	{name: "session_params", own: true, in: paramFields, read: sessionParams},
	{name: "cache_control", needs: Priorities, own: true, in: cacheFields, read: cacheControl},
	{name: "router_config_override", needs: Overrides, own: true, in: overrideFields},
	{name: "metadata_upload", needs: Uploads, in: uploadFields},
	{name: "routing_constraints", needs: Overrides, in: constraintFields},
	{name: "router", in: routerFields},
}

var hintFields = []field{
	{
		name: "priority", needs: Priorities,
		read: whole(math.MinInt32, math.MaxInt32, func(e *Ext) *Opt[int32] { return &e.AgentHints.Priority }),
	},
	{
		name: "strict_priority", needs: Priorities,
		read: integer32(func(e *Ext) *Opt[uint32] { return &e.AgentHints.StrictPriority }),
	},
	{name: "osl", read: integer32(func(e *Ext) *Opt[uint32] { return &e.AgentHints.OSL })},
	{name: "speculative_prefill", read: boolean(func(e *Ext) *Opt[bool] { return &e.AgentHints.SpeculativePrefill })},
	{
		name: "latency_sensitivity", needs: Priorities,
		read: number(-math.MaxFloat64, func(e *Ext) *Opt[float64] { return &e.AgentHints.LatencySensitivity }),
	},
}

var controlFields = []field{
	{name: "session_id", required: true, read: text(func(e *Ext) *string { return &e.SessionControl.SessionID })},
	{name: "action", read: action},
	{name: "timeout", read: timeout},
}

var paramFields = []field{
	{name: "id", read: text(func(e *Ext) *string { return &e.SessionParams.ID })},
	{name: "rid"},
	{name: "offset"},
	{name: "replace"},
	{name: "drop_previous_output"},
}

var cacheFields = []field{
	{name: "type", needs: Priorities, read: cacheType},
	{name: "ttl", needs: Priorities, read: ttl},
}

var overrideFields = []field{
	{
		name: "overlap_score_credit", needs: Overrides,
		read: number(0, func(e *Ext) *Opt[float64] { return &e.Override.OverlapScoreCredit }),
	},
	{
		name: "prefill_load_scale", needs: Overrides,
		read: number(0, func(e *Ext) *Opt[float64] { return &e.Override.PrefillLoadScale }),
	},
	{
		name: "router_temperature", needs: Overrides,
		read: number(0, func(e *Ext) *Opt[float64] { return &e.Override.RouterTemperature }),
	},
	{name: "shared_cache_multiplier", needs: Overrides},
	{
		name: "assume_kv_reuse", needs: Overrides,
		read: boolean(func(e *Ext) *Opt[bool] { return &e.Override.AssumeKVReuse }),
	},
	{
		name: "track_prefill_tokens", needs: Overrides,
		read: boolean(func(e *Ext) *Opt[bool] { return &e.Override.TrackPrefillTokens }),
	},
	{name: "allowed_worker_ids", needs: Overrides, read: workers},
}

var uploadFields = []field{{name: "url", needs: Uploads, required: true, read: uploadURL}}

var constraintFields = []field{
	{name: "required_taints", needs: Overrides, read: words(func(e *Ext, name string) {
		e.RoutingConstraints.RequiredTaints = append(e.RoutingConstraints.RequiredTaints, name)
	})},
	{name: "preferred_taints", needs: Overrides, read: preferredTaints},
}

var routerFields = []field{{name: "ttft_target"}, {name: "itl_target"}}
