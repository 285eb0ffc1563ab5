package nvext

import (
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/tidwall/gjson"
)

// The members of the objects within nvext, by their index in the names.
const (
	fPriority = iota
	fStrictPriority
	fOSL
	fSpeculativePrefill
	fLatencySensitivity
	hintCount
)

const (
	fSessionID = iota
	fAction
	fTimeout
	controlCount
)

const (
	fParamsID = iota
	fParamsRID
	fParamsOffset
	fParamsReplace
	fParamsDrop
	paramCount
)

const (
	fCacheType = iota
	fCacheTTL
	cacheCount
)

const (
	fRequiredTaints = iota
	fPreferredTaints
	constraintCount
)

const (
	fTTFTTarget = iota
	fITLTarget
	routerCount
)

const (
	fOverlapScoreCredit = iota
	fPrefillLoadScale
	fRouterTemperature
	fAssumeKVReuse
	fTrackPrefillTokens
	fSharedCacheMultiplier
	fOverlapScoreWeight
	fAllowed
	overrideCount
)

const (
	fURL = iota
	uploadCount
)

var (
	hintNames       = [hintCount]string{"priority", "strict_priority", "osl", "speculative_prefill", "latency_sensitivity"}
	controlNames    = [controlCount]string{"session_id", "action", "timeout"}
	paramNames      = [paramCount]string{"id", "rid", "offset", "replace", "drop_previous_output"}
	cacheNames      = [cacheCount]string{"type", "ttl"}
	constraintNames = [constraintCount]string{"required_taints", "preferred_taints"}
	routerNames     = [routerCount]string{"ttft_target", "itl_target"}
	overrideNames   = [overrideCount]string{
		"overlap_score_credit", "prefill_load_scale", "router_temperature", "assume_kv_reuse",
		"track_prefill_tokens", "shared_cache_multiplier", "overlap_score_weight", "allowed_worker_ids",
	}
	uploadNames = [uploadCount]string{"url"}
)

// sections reads the objects within nvext.
func (p *parser) sections(top *object) {
	p.hints(top)
	p.control(top)
	p.params(top)
	p.cache(top)
	p.override(top)
	p.upload(top)
	var at [constraintCount]rawjson.Span
	if o, ok := top.enter(fRoutingConstraints, "nvext.routing_constraints", constraintNames[:], at[:]); ok {
		p.ext.RoutingConstraints = RoutingConstraints{o.taints(fRequiredTaints), o.weights(fPreferredTaints)}
	}
	var to [routerCount]rawjson.Span
	if o, ok := top.enter(fRouter, "nvext.router", routerNames[:], to[:]); ok {
		p.ext.Router.TTFTTarget = o.number(fTTFTTarget, 0, unbounded, wantNumber)
		p.ext.Router.ITLTarget = o.number(fITLTarget, 0, unbounded, wantNumber)
	}
}

func (p *parser) hints(top *object) {
	var at [hintCount]rawjson.Span
	o, ok := top.enter(fAgentHints, "nvext.agent_hints", hintNames[:], at[:])
	if !ok {
		return
	}
	n, ok := o.signed(fPriority, Priorities, 32, wantI32)
	p.ext.AgentHints = AgentHints{
		Priority:           Opt[int32]{int32(n), ok},
		StrictPriority:     o.u32(fStrictPriority, Priorities),
		OSL:                o.u32(fOSL, 0),
		SpeculativePrefill: o.bool(fSpeculativePrefill),
		LatencySensitivity: o.number(fLatencySensitivity, Priorities, unbounded, wantNumber),
	}
}

// control reads session_control, which must have a session's id. An empty one
// is none, and then there is nothing to do with it.
func (p *parser) control(top *object) {
	var at [controlCount]rawjson.Span
	o, ok := top.enter(fSessionControl, "nvext.session_control", controlNames[:], at[:])
	if !ok {
		return
	}
	c := &p.ext.SessionControl
	c.SessionID = o.text(fSessionID, 0)
	c.Action = o.action()
	seconds := uint64(DefaultTimeout.Seconds())
	if n, ok := o.unsigned(fTimeout, 0, 64, wantU64); ok {
		seconds, c.Timed = n, true
	}
	_, ok = o.value(fSessionID)
	switch {
	case !ok:
		o.invalid(fSessionID, 0, wantString, nothing)
	case c.SessionID != "":
		c.Timeout = p.opt.clamp(seconds)
	case c.Action != ActionNone:
		o.invalid(fSessionID, 0, "a string that is not empty", "an empty one")
	}
}

func (o *object) action() Action {
	v, ok := o.value(fAction)
	switch {
	case !ok:
		return ActionNone
	case v.Type != gjson.String:
		o.wrong(fAction, wantString, v)
		return ActionNone
	}
	for _, a := range []Action{ActionOpen, ActionBind, ActionClose} {
		if v.Str == a.String() {
			return a
		}
	}
	o.invalid(fAction, 0, `"open", "bind" or "close"`, describeWord(v))
	return ActionNone
}

func (p *parser) params(top *object) {
	var at [paramCount]rawjson.Span
	o, ok := top.enter(fSessionParams, "nvext.session_params", paramNames[:], at[:])
	if !ok {
		return
	}
	n, ok := o.signed(fParamsOffset, 0, 64, wantI64)
	p.ext.SessionParams = SessionParams{
		ID: o.text(fParamsID, 0), RID: o.text(fParamsRID, 0), Offset: Opt[int64]{n, ok},
		Replace: o.bool(fParamsReplace), DropPreviousOutput: o.bool(fParamsDrop),
		Span: top.at[fSessionParams],
	}
}

func (p *parser) cache(top *object) {
	var at [cacheCount]rawjson.Span
	o, ok := top.enter(fCacheControl, "nvext.cache_control", cacheNames[:], at[:])
	if !ok {
		return
	}
	v, ok := o.value(fCacheType)
	switch {
	case ok && v.Type != gjson.String:
		o.wrong(fCacheType, wantString, v)
	case ok && v.Str != "ephemeral":
		o.invalid(fCacheType, Priorities, `"ephemeral"`, describeWord(v))
	}
	p.ext.CacheTTL = Some(p.opt.retention(o.ttl(fCacheTTL, Priorities)))
}

// override reads router_config_override. overlap_score_weight is what
// prefill_load_scale was called before; at 0 it turned the credit off, too.
func (p *parser) override(top *object) {
	var at [overrideCount]rawjson.Span
	o, ok := top.enter(fRouterConfigOverride, "nvext.router_config_override", overrideNames[:], at[:])
	if !ok {
		return
	}
	weight := o.number(fOverlapScoreWeight, Overrides, positive, wantPositive)
	r := RouterConfigOverride{
		OverlapScoreCredit:    o.number(fOverlapScoreCredit, Overrides, positive, wantPositive),
		PrefillLoadScale:      o.number(fPrefillLoadScale, Overrides, positive, wantPositive),
		RouterTemperature:     o.number(fRouterTemperature, Overrides, positive, wantPositive),
		SharedCacheMultiplier: o.number(fSharedCacheMultiplier, Overrides, fraction, wantFraction),
		AssumeKVReuse:         o.bool(fAssumeKVReuse),
		TrackPrefillTokens:    o.bool(fTrackPrefillTokens),
	}
	if weight.Set && !r.PrefillLoadScale.Set {
		r.PrefillLoadScale = weight
	}
	if weight.Set && weight.Value == 0 && !r.OverlapScoreCredit.Set {
		r.OverlapScoreCredit = weight
	}
	p.ext.Override = r
	if ids := o.ids(fAllowed, Overrides); ids != nil {
		p.ext.AllowedWorkerIDs = ids
	}
}

func (p *parser) upload(top *object) {
	var at [uploadCount]rawjson.Span
	o, ok := top.enter(fMetadataUpload, "nvext.metadata_upload", uploadNames[:], at[:])
	if !ok {
		return
	}
	url := strings.TrimSpace(o.text(fURL, Uploads))
	v, ok := o.value(fURL)
	switch {
	case !ok:
		o.invalid(fURL, Uploads, wantString, nothing)
	case v.Type == gjson.String && url == "":
		o.invalid(fURL, Uploads, "a string that is not empty", "an empty one")
	}
	p.ext.MetadataUpload = url
}
