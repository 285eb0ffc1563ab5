package nvext

import "github.com/tidwall/gjson"

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
func Cuts(cuts []Span, raw []byte, g Grants, noSalt bool) []Span {
	i := skipSpace(raw, 0)
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
	cuts   []Span
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
	w := enter(u.raw, i)
	for w.next() {
		if n := index(names, w.name()); n >= 0 {
			last[n] = w.keyAt
		}
		w.value()
	}
	c := cutter{u: u, open: -1}
	w = enter(u.raw, i)
	for w.next() {
		n := index(names, w.name())
		v := w.value()
		if n < 0 || w.keyAt != last[n] || string(u.raw[v.Start:v.End]) == "null" || u.refused(l, n, v) {
			c.drop(w.keyAt, v.End, w.comma)
			continue
		}
		c.keep(w.comma)
		u.within(l, n, v)
	}
}

// refused tells whether field n with value v is not to be sent.
func (u *upstream) refused(l level, n int, v Span) bool {
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
		return u.grants&Pins == 0 || string(u.raw[v.Start:v.End]) == "4294967295"
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
func (u *upstream) within(l level, n int, v Span) {
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
	c := cutter{u: u, open: -1}
	w := enter(u.raw, i)
	for w.next() {
		v := w.value()
		if annotationNamed(gjson.Parse(view(u.raw[v.Start:v.End])).Str)&granted == 0 {
			c.drop(v.Start, v.End, w.comma)
		} else {
			c.keep(w.comma)
		}
	}
}

// cutter cuts members out of one object or array. It is called for all members
// in order, with the comma before each (-1 for the first). A member that is cut
// takes the comma before it once a member was kept, until then the comma behind it.
type cutter struct {
	u    *upstream
	kept bool
	open int // the cut that takes the next comma, -1 for none
}

func (c *cutter) keep(comma int) {
	c.shut(comma)
	c.kept = true
}

func (c *cutter) drop(start, end, comma int) {
	c.shut(comma)
	if c.kept {
		start = comma
	} else {
		c.open = len(c.u.cuts)
	}
	c.u.cuts = append(c.u.cuts, Span{start, end})
}

func (c *cutter) shut(comma int) {
	if c.open >= 0 {
		c.u.cuts[c.open].End = comma + 1
		c.open = -1
	}
}
