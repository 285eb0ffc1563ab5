package nvext

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
	in []field
	// to is where the value goes. A value that is not plain has read, which reads it. A field that
	// needs a grant has to, unless it is an object or the annotations.
	to   func(*Ext) any
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
	{name: "greed_sampling", to: func(e *Ext) any { return &e.GreedSampling }},
	{name: "use_raw_prompt", to: func(e *Ext) any { return &e.UseRawPrompt }},
	{name: "backend_instance_id", needs: Pins, to: func(e *Ext) any { return &e.BackendInstanceID }},
	{name: "decode_worker_id", needs: Pins, to: func(e *Ext) any { return &e.DecodeWorkerID }},
	{name: "prefill_worker_id", needs: Pins, to: func(e *Ext) any { return &e.PrefillWorkerID }},
	{name: "dp_rank", needs: Pins, to: func(e *Ext) any { return &e.DPRank }},
	{name: "prefill_dp_rank", needs: Pins, to: func(e *Ext) any { return &e.PrefillDPRank }},
	{name: "max_thinking_tokens", to: func(e *Ext) any { return &e.MaxThinkingTokens }},
	{name: "request_timestamp_ms"},
	{name: "cache_salt", to: func(e *Ext) any { return &e.CacheSalt }},
	{
		name: "annotations", needs: Explain,
		read: words(func(e *Ext, name string) { e.Annotations |= annotationNamed(name) }),
	},
	{
		name: "extra_fields", needs: Explain, to: func(e *Ext) any { return &e.ExtraFields },
		read: words(func(e *Ext, name string) { e.ExtraFields |= fieldNamed(name) }),
	},
	{name: "allowed_worker_ids", needs: Overrides, own: true, to: func(e *Ext) any { return &e.AllowedWorkerIDs }, read: workers},
	{name: "token_data", read: tokenData},
	{name: "agent_hints", in: hintFields},
	{name: "session_control", own: true, in: controlFields, read: sessionControl},
	{name: "session_params", own: true, in: paramFields, read: sessionParams},
	{
		name: "cache_control", needs: Priorities, own: true, in: cacheFields,
		to: func(e *Ext) any { return &e.CacheTTL }, read: cacheControl,
	},
	{name: "router_config_override", needs: Overrides, own: true, in: overrideFields},
	{name: "metadata_upload", needs: Uploads, in: uploadFields},
	{name: "routing_constraints", needs: Overrides, in: constraintFields},
	{name: "router", in: routerFields},
}

var hintFields = []field{
	{name: "priority", needs: Priorities, to: func(e *Ext) any { return &e.AgentHints.Priority }},
	{name: "strict_priority", needs: Priorities, to: func(e *Ext) any { return &e.AgentHints.StrictPriority }},
	{name: "osl", to: func(e *Ext) any { return &e.AgentHints.OSL }},
	{name: "speculative_prefill", to: func(e *Ext) any { return &e.AgentHints.SpeculativePrefill }},
	{name: "latency_sensitivity", needs: Priorities, to: func(e *Ext) any { return &e.AgentHints.LatencySensitivity }},
}

var controlFields = []field{
	{name: "session_id", required: true, to: func(e *Ext) any { return &e.SessionControl.SessionID }},
	{name: "action", read: action},
	{name: "timeout", read: timeout},
}

var paramFields = []field{
	{name: "id", to: func(e *Ext) any { return &e.SessionParams.ID }},
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
	{name: "overlap_score_credit", needs: Overrides, to: func(e *Ext) any { return &e.Override.OverlapScoreCredit }},
	{name: "prefill_load_scale", needs: Overrides, to: func(e *Ext) any { return &e.Override.PrefillLoadScale }},
	{name: "router_temperature", needs: Overrides, to: func(e *Ext) any { return &e.Override.Temperature }},
	{name: "shared_cache_multiplier", needs: Overrides},
	{name: "assume_kv_reuse", needs: Overrides, to: func(e *Ext) any { return &e.Override.AssumeKVReuse }},
	{name: "track_prefill_tokens", needs: Overrides, to: func(e *Ext) any { return &e.Override.TrackPrefillTokens }},
	{name: "allowed_worker_ids", needs: Overrides, read: workers},
}

var uploadFields = []field{
	{name: "url", needs: Uploads, required: true, to: func(e *Ext) any { return &e.MetadataUpload }, read: uploadURL},
}

var constraintFields = []field{
	{
		name: "required_taints", needs: Overrides, to: func(e *Ext) any { return &e.RoutingConstraints.RequiredTaints },
		read: words(func(e *Ext, name string) {
			e.RoutingConstraints.RequiredTaints = append(e.RoutingConstraints.RequiredTaints, name)
		}),
	},
	{
		name: "preferred_taints", needs: Overrides, to: func(e *Ext) any { return &e.RoutingConstraints.PreferredTaints },
		read: preferredTaints,
	},
}

var routerFields = []field{{name: "ttft_target"}, {name: "itl_target"}}
