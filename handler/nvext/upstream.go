package nvext

import (
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// Cuts appends the parts of an nvext that a Dynamo frontend must not get, in
// order and without overlaps. These are cut out, each with its comma:
//   - fields that need a grant which g lacks, as Restrict drops them
//   - the router's own fields (router_config_override, allowed_worker_ids)
//   - fields that Dynamo 1.3 and later refuse: session_control, session_params,
//     cache_control, null, and all unknown fields
//   - all but the last of several fields of one name, so that no other reader
//     takes the first
//   - cache_salt, if noSalt says that a tenant's salt stands for it
//
// All other bytes stay, and the result is valid JSON. The ids of pins are those
// of this router's workers, not Dynamo's: a caller that can translate them sends
// headers, which win, and grants no Pins here. Parse must have accepted the nvext.
func Cuts(cuts []rawjson.Edit, raw []byte, g Grants, noSalt bool) []rawjson.Edit {
	i := rawjson.SkipSpace(raw, 0)
	if i == len(raw) || raw[i] != '{' {
		return cuts
	}
	u := upstream{raw: raw, grants: g, noSalt: noSalt, cuts: cuts}
	u.object(i, levelTop)
	return u.cuts
}

// upstream collects the cuts.
type upstream struct {
	raw    []byte
	grants Grants
	noSalt bool
	cuts   []rawjson.Edit
}

// level is which object of an nvext is being read.
type level uint8

const (
	levelTop level = iota
	levelHints
	levelConstraints
	levelRouter
	levelUpload
)

var levelNames = [...][]string{
	levelTop: topNames[:], levelHints: hintNames[:], levelConstraints: constraintNames[:],
	levelRouter: routerNames[:], levelUpload: uploadNames[:],
}

// object collects the cuts in the object at raw[i].
func (u *upstream) object(i int, l level) {
	names := levelNames[l]
	var last [topCount]int // where the last key of each name is
	c := rawjson.Enter(u.raw, i)
	for c.Next() {
		if n := slices.Index(names, c.Name()); n >= 0 {
			last[n] = c.KeyAt
		}
		c.Value()
	}
	cut := rawjson.Cutter{Edits: &u.cuts}
	c = rawjson.Enter(u.raw, i)
	for c.Next() {
		n := slices.Index(names, c.Name())
		v := c.Value()
		if n < 0 || c.KeyAt != last[n] || v.IsNull(u.raw) || u.refused(l, n, v) {
			cut.Drop(&c, v)
			continue
		}
		cut.Keep(&c)
		u.within(l, n, v)
	}
}

// refused tells whether field n with value v is not to be sent.
func (u *upstream) refused(l level, n int, v rawjson.Span) bool {
	if l == levelHints {
		return u.grants&Priorities == 0 && (n == fPriority || n == fStrictPriority || n == fLatencySensitivity)
	}
	if l != levelTop {
		return false
	}
	switch n {
	case fBackendInstanceID, fPrefillWorkerID, fDecodeWorkerID:
		return u.grants&Pins == 0
	case fDPRank, fPrefillDPRank:
		return u.grants&Pins == 0 || string(v.Of(u.raw)) == "4294967295"
	case fRoutingConstraints:
		return u.grants&Overrides == 0
	case fMetadataUpload:
		return u.grants&Uploads == 0
	case fExtraFields:
		return u.grants&Explain == 0
	case fRouterConfigOverride, fAllowedWorkerIDs, fCacheControl, fSessionControl, fSessionParams:
		return true
	case fCacheSalt:
		return u.noSalt
	}
	return false
}

// within collects the cuts in the value of a field that stays.
func (u *upstream) within(l level, n int, v rawjson.Span) {
	if l != levelTop {
		return
	}
	switch n {
	case fAnnotations:
		u.annotations(v.Start)
	case fAgentHints:
		u.object(v.Start, levelHints)
	case fRoutingConstraints:
		u.object(v.Start, levelConstraints)
	case fRouter:
		u.object(v.Start, levelRouter)
	case fMetadataUpload:
		u.object(v.Start, levelUpload)
	}
}

// annotations collects the cuts in the list at raw[i].
func (u *upstream) annotations(i int) {
	granted := annotationsHarmless
	if u.grants&Explain != 0 {
		granted = ^annotationOwned
	}
	cut := rawjson.Cutter{Edits: &u.cuts}
	c := rawjson.Enter(u.raw, i)
	for c.Next() {
		v := c.Value()
		if annotationNamed(v.Text(u.raw))&granted == 0 {
			cut.Drop(&c, v)
		} else {
			cut.Keep(&c)
		}
	}
}
