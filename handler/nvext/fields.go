package nvext

import (
	"strconv"
	"strings"
)

// field is a field of nvext, or of an object within it. Some fields are checked only:
// nothing here reads their values.
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
	// in has the fields of a value that is an object.
	in []field
	// read stores the value in the parser's ext.
	read func(p *parser)
}

// maxFields is the largest number of fields in one object.
const maxFields = 22

const nameTokenData = "token_data"

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
	{name: "greed_sampling", read: func(p *parser) { p.ext.GreedSampling = p.bool() }},
	{name: "use_raw_prompt", read: func(p *parser) { p.ext.UseRawPrompt = p.bool() }},
	{name: "backend_instance_id", needs: Pins, read: func(p *parser) { p.ext.BackendInstanceID = p.uint64() }},
	{name: "decode_worker_id", needs: Pins, read: func(p *parser) { p.ext.DecodeWorkerID = p.uint64() }},
	{name: "prefill_worker_id", needs: Pins, read: func(p *parser) { p.ext.PrefillWorkerID = p.uint64() }},
	{name: "dp_rank", needs: Pins, read: func(p *parser) { p.ext.DPRank = p.rank() }},
	{name: "prefill_dp_rank", needs: Pins, read: func(p *parser) { p.ext.PrefillDPRank = p.rank() }},
	{name: "max_thinking_tokens", read: func(p *parser) { p.ext.MaxThinkingTokens = p.uint32() }},
	{name: "request_timestamp_ms", read: func(p *parser) { p.number(anyNumber) }},
	{name: "cache_salt", read: func(p *parser) { p.ext.CacheSalt = p.text() }},
	{name: "annotations", needs: Explain, read: func(p *parser) {
		p.words(func(name string) { p.ext.Annotations |= annotationNamed(name) })
	}},
	{name: "extra_fields", needs: Explain, read: func(p *parser) {
		p.words(func(name string) { p.ext.ExtraFields |= fieldNamed(name) })
	}},
	{name: "allowed_worker_ids", needs: Overrides, own: true, read: func(p *parser) { p.ext.AllowedWorkerIDs = p.ids() }},
	{name: nameTokenData, read: (*parser).tokenData},
	{name: "agent_hints", in: hintFields},
	{name: "session_control", own: true, in: controlFields, read: (*parser).sessionControl},
	{name: "session_params", own: true, in: paramFields, read: func(p *parser) { p.ext.SessionParams.Span = p.at }},
	{name: "cache_control", needs: Priorities, own: true, in: cacheFields, read: (*parser).cacheControl},
	{name: "router_config_override", needs: Overrides, own: true, in: overrideFields},
	{name: "metadata_upload", needs: Uploads, in: uploadFields},
	{name: "routing_constraints", needs: Overrides, in: constraintFields},
	{name: "router", in: routerFields},
}

var hintFields = []field{
	{name: "priority", needs: Priorities, read: func(p *parser) {
		n := integer(p, 32, wantI32, strconv.ParseInt)
		p.ext.AgentHints.Priority = Opt[int32]{int32(n.Value), n.Set}
	}},
	{name: "strict_priority", needs: Priorities, read: func(p *parser) { p.ext.AgentHints.StrictPriority = p.uint32() }},
	{name: "osl", read: func(p *parser) { p.ext.AgentHints.OSL = p.uint32() }},
	{name: "speculative_prefill", read: func(p *parser) { p.ext.AgentHints.SpeculativePrefill = p.bool() }},
	{name: "latency_sensitivity", needs: Priorities, read: func(p *parser) { p.ext.AgentHints.LatencySensitivity = p.number(anyNumber) }},
}

var controlFields = []field{
	{name: "session_id", required: true, read: func(p *parser) { p.ext.SessionControl.SessionID = p.text() }},
	{name: "action", read: func(p *parser) { p.ext.SessionControl.Action = p.action() }},
	{name: "timeout", read: func(p *parser) {
		n := p.uint64()
		p.ext.SessionControl.Timeout, p.ext.SessionControl.Timed = p.opt.clamp(n.Value), n.Set
	}},
}

// sessionControl completes session_control. An empty session_id means that the
// request has no session, so there can be no action.
func (p *parser) sessionControl() {
	c := &p.ext.SessionControl
	switch {
	case c.SessionID == "":
		c.Timeout = 0
		if c.Action != ActionNone {
			p.section, p.field = p.field.name, &controlFields[0]
			p.invalid(wantFull, "an empty one")
		}
	case !c.Timed:
		c.Timeout = p.opt.clamp(uint64(DefaultTimeout.Seconds()))
	}
}

var paramFields = []field{
	{name: "id", read: func(p *parser) { p.ext.SessionParams.ID = p.text() }},
	{name: "rid", read: func(p *parser) { p.text() }},
	{name: "offset", read: func(p *parser) { integer(p, 64, wantI64, strconv.ParseInt) }},
	{name: "replace", read: func(p *parser) { p.bool() }},
	{name: "drop_previous_output", read: func(p *parser) { p.bool() }},
}

var cacheFields = []field{
	{name: "type", needs: Priorities, read: func(p *parser) {
		if s, ok := p.str(); ok && s != "ephemeral" {
			p.invalid(`"ephemeral"`, describeWord(s))
		}
	}},
	{name: "ttl", needs: Priorities, read: func(p *parser) { p.ext.CacheTTL = Some(p.ttl()) }},
}

// cacheControl completes cache_control, which may lack the time to live.
func (p *parser) cacheControl() {
	p.ext.CacheTTL = Some(p.opt.retention(p.ext.CacheTTL.Or(DefaultTTL)))
}

var overrideFields = []field{
	{name: "overlap_score_credit", needs: Overrides, read: func(p *parser) { p.ext.Override.OverlapScoreCredit = p.number(notNegative) }},
	{name: "prefill_load_scale", needs: Overrides, read: func(p *parser) { p.ext.Override.PrefillLoadScale = p.number(notNegative) }},
	{name: "router_temperature", needs: Overrides, read: func(p *parser) { p.ext.Override.RouterTemperature = p.number(notNegative) }},
	{name: "shared_cache_multiplier", needs: Overrides, read: func(p *parser) { p.number(fraction) }},
	{name: "assume_kv_reuse", needs: Overrides, read: func(p *parser) { p.ext.Override.AssumeKVReuse = p.bool() }},
	{name: "track_prefill_tokens", needs: Overrides, read: func(p *parser) { p.ext.Override.TrackPrefillTokens = p.bool() }},
	{name: "overlap_score_weight", needs: Overrides, read: (*parser).scoreWeight},
	{name: "allowed_worker_ids", needs: Overrides, read: func(p *parser) { p.ext.AllowedWorkerIDs = p.ids() }},
}

// scoreWeight reads overlap_score_weight, the older name of prefill_load_scale.
// The value 0 also turned off the credit. The newer names win: they have been
// read before.
func (p *parser) scoreWeight() {
	weight, r := p.number(notNegative), &p.ext.Override
	if !r.PrefillLoadScale.Set {
		r.PrefillLoadScale = weight
	}
	if weight.Set && weight.Value == 0 && !r.OverlapScoreCredit.Set {
		r.OverlapScoreCredit = weight
	}
}

var uploadFields = []field{
	{name: "url", needs: Uploads, required: true, read: func(p *parser) {
		p.ext.MetadataUpload = strings.TrimSpace(p.text())
		if p.ext.MetadataUpload == "" {
			p.invalid(wantFull, "an empty one")
		}
	}},
}

var constraintFields = []field{
	{name: "required_taints", needs: Overrides, read: func(p *parser) { p.ext.RoutingConstraints.RequiredTaints = p.taints() }},
	{name: "preferred_taints", needs: Overrides, read: func(p *parser) { p.ext.RoutingConstraints.PreferredTaints = p.weights() }},
}

var routerFields = []field{
	{name: "ttft_target", read: func(p *parser) { p.number(anyNumber) }},
	{name: "itl_target", read: func(p *parser) { p.number(anyNumber) }},
}
