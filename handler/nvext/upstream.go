package nvext

import (
	"slices"
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/tidwall/gjson"
)

// Generation is what a Dynamo takes in nvext.
type Generation uint8

// The generations.
const (
	// Dynamo10 is 1.0 to 1.2: sessions are in the body, fields that are not
	// known are passed over.
	Dynamo10 Generation = iota
	// Dynamo13 is 1.3 and later: session_control, session_params,
	// cache_control and all fields that are not known are a 400. The session
	// goes in HeaderSession.
	Dynamo13
)

// Edits appends the changes that an nvext needs before it goes on to a Dynamo,
// in order and without overlaps. What g does not grant is cut out, as Restrict
// drops it; so are fields that the generation refuses, the router's own
// (router_config_override, allowed_worker_ids), null, and of fields of one
// name all but the last, so that no other reader takes the first. A timeout
// or a ttl outside the bounds of o is moved into them, for 1.1 panics at a large
// one, a session has the id that o gives it, and a salt goes if o has it so.
// All other bytes stay, and the result is valid JSON.
//
// The ids of pins are those of this router's workers, not Dynamo's. Whoever
// can translate them sends headers, which win, and grants no Pins here. The
// nvext must be one that Parse has accepted.
func Edits(edits []rawjson.Edit, raw []byte, gen Generation, g Grants, o Options) []rawjson.Edit {
	i := rawjson.SkipSpace(raw, 0)
	if i == len(raw) || raw[i] != '{' {
		return edits
	}
	u := upstream{raw: raw, gen: gen, grants: g, opt: o, edits: edits}
	u.object(i, levelTop)
	return u.edits
}

// upstream collects the edits.
type upstream struct {
	raw    []byte
	gen    Generation
	grants Grants
	opt    Options
	edits  []rawjson.Edit
}

// level is which object of an nvext is being edited.
type level uint8

const (
	levelTop level = iota
	levelHints
	levelControl
	levelParams
	levelCache
	levelConstraints
	levelRouter
	levelUpload
)

var levelNames = [...][]string{
	levelTop: topNames[:], levelHints: hintNames[:], levelControl: controlNames[:], levelParams: paramNames[:], levelCache: cacheNames[:],
	levelConstraints: constraintNames[:], levelRouter: routerNames[:], levelUpload: uploadNames[:],
}

// object edits the object at raw[i].
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
	cut := rawjson.Cutter{Edits: &u.edits}
	c = rawjson.Enter(u.raw, i)
	for c.Next() {
		n := slices.Index(names, c.Name())
		v := c.Value()
		goes := u.gen == Dynamo13
		if n >= 0 {
			goes = c.KeyAt != last[n] || v.IsNull(u.raw) || u.refused(l, n, v)
		}
		if goes {
			cut.Drop(&c, v)
			continue
		}
		cut.Keep(&c)
		u.within(l, n, v)
	}
}

// refused tells whether field n with value v is not to be sent.
func (u *upstream) refused(l level, n int, v rawjson.Span) bool {
	switch l {
	case levelTop:
		switch n {
		case fBackendInstanceID, fPrefillWorkerID, fDecodeWorkerID:
			return u.grants&Pins == 0
		case fDPRank, fPrefillDPRank:
			return u.grants&Pins == 0 || string(v.Of(u.raw)) == "4294967295"
		case fRoutingConstraints:
			return u.grants&Overrides == 0
		case fRouterConfigOverride, fAllowedWorkerIDs:
			return true
		case fMetadataUpload:
			return u.grants&Uploads == 0
		case fExtraFields:
			return u.grants&Explain == 0
		case fCacheControl:
			return u.gen == Dynamo13 || u.grants&Priorities == 0
		case fSessionControl, fSessionParams:
			return u.gen == Dynamo13
		case fCacheSalt:
			return u.opt.NoSalt
		}
	case levelHints:
		switch n {
		case fPriority, fStrictPriority, fLatencySensitivity:
			return u.grants&Priorities == 0
		}
	case levelControl, levelParams, levelCache, levelConstraints, levelRouter, levelUpload:
	}
	return false
}

// within edits the value of a field that stays.
func (u *upstream) within(l level, n int, v rawjson.Span) {
	switch l {
	case levelTop:
		switch n {
		case fAnnotations:
			u.annotations(v.Start)
		case fAgentHints:
			u.object(v.Start, levelHints)
		case fSessionControl:
			u.object(v.Start, levelControl)
		case fSessionParams:
			u.object(v.Start, levelParams)
		case fCacheControl:
			u.object(v.Start, levelCache)
		case fRoutingConstraints:
			u.object(v.Start, levelConstraints)
		case fRouter:
			u.object(v.Start, levelRouter)
		case fMetadataUpload:
			u.object(v.Start, levelUpload)
		}
	case levelControl:
		switch n {
		case fTimeout:
			u.timeout(v)
		case fSessionID:
			u.session(v)
		}
	case levelParams:
		if n == fParamsID {
			u.session(v)
		}
	case levelCache:
		if n == fCacheTTL {
			u.ttl(v)
		}
	case levelHints, levelConstraints, levelRouter, levelUpload:
	}
}

// annotations edits the list at raw[i].
func (u *upstream) annotations(i int) {
	granted := annotationsHarmless
	if u.grants&Explain != 0 {
		granted = ^annotationOwned
	}
	cut := rawjson.Cutter{Edits: &u.edits}
	c := rawjson.Enter(u.raw, i)
	for c.Next() {
		v := c.Value()
		if annotationNamed(gjson.Parse(rawjson.View(v.Of(u.raw))).Str)&granted == 0 {
			cut.Drop(&c, v)
		} else {
			cut.Keep(&c)
		}
	}
}

// timeout moves a number of seconds into its bounds.
func (u *upstream) timeout(v rawjson.Span) {
	asked, err := strconv.ParseUint(rawjson.View(v.Of(u.raw)), 10, 64)
	if given := uint64(u.opt.clamp(asked) / time.Second); err == nil && given != asked {
		u.edits = append(u.edits, rawjson.Edit{Span: v, Text: strconv.AppendUint(nil, given, 10)})
	}
}

// session gives a session its id upstream.
func (u *upstream) session(v rawjson.Span) {
	id := gjson.Parse(rawjson.View(v.Of(u.raw))).Str
	if u.opt.Session != nil && id != "" {
		u.edits = append(u.edits, rawjson.Edit{Span: v, Text: rawjson.AppendString(nil, u.opt.Session(id))})
	}
}

// ttl moves the time that a prefix is to be kept below its bound. A text stays
// one, of seconds.
func (u *upstream) ttl(v rawjson.Span) {
	value := gjson.Parse(rawjson.View(v.Of(u.raw)))
	digits, unit := value.Raw, uint64(1)
	if value.Type == gjson.String {
		digits, unit = cutUnit(value.Str)
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	most := u.opt.retention(MaxTTL)
	if err != nil || n <= uint64(most/time.Second)/unit {
		return
	}
	text := strconv.FormatInt(int64(most/time.Second), 10)
	if value.Type == gjson.String {
		text = `"` + text + `"`
	}
	u.edits = append(u.edits, rawjson.Edit{Span: v, Text: []byte(text)})
}
