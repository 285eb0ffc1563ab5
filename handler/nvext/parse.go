package nvext

import (
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/tidwall/gjson"
)

// The fields of nvext, by their index in topNames.
const (
	fGreedSampling = iota
	fUseRawPrompt
	fAnnotations
	fBackendInstanceID
	fTokenData
	fMaxThinkingTokens
	fExtraFields
	fPrefillWorkerID
	fDecodeWorkerID
	fDPRank
	fPrefillDPRank
	fAgentHints
	fRequestTimestampMS
	fSessionControl
	fSessionParams
	fCacheControl
	fCacheSalt
	fRoutingConstraints
	fRouter
	fMetadataUpload
	fAllowedWorkerIDs
	fRouterConfigOverride
	topCount
)

var topNames = [topCount]string{
	"greed_sampling", "use_raw_prompt", "annotations", "backend_instance_id", "token_data", "max_thinking_tokens",
	"extra_fields", "prefill_worker_id", "decode_worker_id", "dp_rank", "prefill_dp_rank", "agent_hints",
	"request_timestamp_ms", "session_control", "session_params", "cache_control", "cache_salt", "routing_constraints",
	"router", "metadata_upload", "allowed_worker_ids", "router_config_override",
}

// parser reads one nvext into ext. It goes on behind an error, and keeps the
// first.
type parser struct {
	raw     []byte
	opt     Options
	ext     Ext
	err     *FieldError
	unknown UnknownError
	counted bool // the last token_data was a list of ids
}

// Parse reads the value of an nvext member. Null, as a value or of a field,
// counts as absent, and of fields of one name the last counts. Integers are
// written without a point or an exponent. allowed_worker_ids may stand in
// router_config_override, too, and count there if they are in both.
//
// The error is ErrMalformed, a [*UnknownError] or a [*FieldError] that names
// one of the fields that are wrong. A wrong value of a field that needs trust
// is no error here, but one of Restrict, where it is trusted.
func Parse(raw []byte, o Options) (Ext, error) {
	p := parser{raw: raw, opt: o}
	if !p.top() {
		return Ext{}, ErrMalformed
	}
	switch {
	case p.err != nil:
		return Ext{}, p.err
	case len(p.unknown.Fields) > 0:
		unknown := p.unknown // or the parser would be on the heap
		return Ext{}, &unknown
	}
	return p.ext, nil
}

// top reads the whole nvext. It returns false if that is no JSON.
func (p *parser) top() bool {
	c, ok := rawjson.Open(p.raw)
	if !ok {
		return p.noObject(c.At)
	}
	var at [topCount]rawjson.Span
	o := object{p: p, path: "nvext", names: topNames[:], at: at[:]}
	for c.Next() {
		n := o.find(&c)
		read := false
		if n == fTokenData {
			old := at[n]
			if at[n], read = p.tokens(&c); old.End > 0 && !p.valid(old) {
				return false
			}
		}
		if !read {
			v := c.Value()
			if c.Err != nil || !p.valid(v) {
				return false
			}
			if n >= 0 {
				at[n] = v
			}
		}
		if !p.valid(rawjson.Span{Start: c.KeyAt, End: c.KeyEnd}) {
			return false
		}
	}
	if !c.Alone() {
		return false
	}
	p.fields(&o)
	p.sections(&o)
	return true
}

// noObject reads an nvext that is something else.
func (p *parser) noObject(i int) bool {
	at, ok := rawjson.ValueAt(p.raw, i)
	if !ok || rawjson.SkipSpace(p.raw, at.End) < len(p.raw) || !p.valid(at) {
		return false
	}
	if v := gjson.Parse(rawjson.View(at.Of(p.raw))); v.Type != gjson.Null {
		p.fail(&FieldError{Field: "nvext", Want: wantObject, Got: describe(v)})
	}
	return true
}

// valid tells whether a value is valid JSON. Its nesting has been bounded by
// passing it, for this recurses.
func (p *parser) valid(s rawjson.Span) bool { return gjson.Valid(rawjson.View(s.Of(p.raw))) }

// fields reads the fields that are not objects.
func (p *parser) fields(o *object) {
	e := &p.ext
	e.GreedSampling = o.bool(fGreedSampling)
	e.UseRawPrompt = o.bool(fUseRawPrompt)
	e.BackendInstanceID = o.u64(fBackendInstanceID, Pins)
	e.DecodeWorkerID = o.u64(fDecodeWorkerID, Pins)
	e.PrefillWorkerID = o.u64(fPrefillWorkerID, Pins)
	e.DPRank = o.rank(fDPRank)
	e.PrefillDPRank = o.rank(fPrefillDPRank)
	e.MaxThinkingTokens = o.u32(fMaxThinkingTokens, 0)
	e.RequestTimestampMS = o.number(fRequestTimestampMS, 0, unbounded, wantNumber)
	e.CacheSalt = o.text(fCacheSalt, 0)
	o.list(fAnnotations, Explain, MaxList, wantStrings, func(n int, v gjson.Result) bool {
		name, ok := o.word(fAnnotations, n, v)
		if ok {
			e.Annotations |= annotationNamed(name)
		}
		return ok
	})
	o.list(fExtraFields, Explain, MaxList, wantStrings, func(n int, v gjson.Result) bool {
		name, ok := o.word(fExtraFields, n, v)
		if ok {
			e.ExtraFields |= fieldNamed(name)
		}
		return ok
	})
	e.AllowedWorkerIDs = o.ids(fAllowedWorkerIDs, Overrides)
	p.tokensLeft(o)
}

// fail keeps the first error. It returns false.
func (p *parser) fail(err *FieldError) bool {
	if p.err == nil {
		p.err = err
	}
	return false
}

// object is one object of an nvext whose members have been found.
type object struct {
	p     *parser
	path  string
	names []string
	at    []rawjson.Span // by the index in names; the last of each
}

// find returns the index of the cursor's member, -1 if it is not known, which is
// noted where that is an error.
func (o *object) find(c *rawjson.Cursor) int {
	name := c.Name()
	n := slices.Index(o.names, name)
	if n < 0 && o.p.opt.Strict {
		u := &o.p.unknown
		if len(u.Fields) < maxUnknown {
			u.Fields = append(u.Fields, o.path+"."+shownName(name))
		} else {
			u.More++
		}
	}
	return n
}

// enter returns the object that is field i of this one, with its members in
// at. It is not ok if there is none.
func (o *object) enter(i int, path string, names []string, at []rawjson.Span) (in object, ok bool) {
	v, ok := o.value(i)
	if !ok {
		return in, false
	}
	in = object{p: o.p, path: path, names: names, at: at}
	if !v.IsObject() {
		return in, o.wrong(i, wantObject, v)
	}
	c := rawjson.Enter(o.p.raw, o.at[i].Start)
	for c.Next() {
		n := in.find(&c)
		if s := c.Value(); n >= 0 {
			at[n] = s
		}
	}
	return in, c.Err == nil
}

// value returns the value of field i. It is not ok if the field is absent.
func (o *object) value(i int) (v gjson.Result, ok bool) {
	s := o.at[i]
	if s.End == 0 {
		return v, false
	}
	v = gjson.Parse(rawjson.View(s.Of(o.p.raw)))
	return v, v.Type != gjson.Null
}

func (o *object) field(i int) string { return o.path + "." + o.names[i] }

// wrong notes that field i is of a wrong type. It returns false.
func (o *object) wrong(i int, want string, v gjson.Result) bool {
	return o.p.fail(&FieldError{Field: o.field(i), Want: want, Got: describe(v)})
}

// invalid notes that the value of field i, which is honoured with grant g
// only, is wrong. It returns false.
func (o *object) invalid(i int, g Grants, want, got string) bool {
	return o.p.invalid(g, &FieldError{Field: o.field(i), Want: want, Got: got})
}

func (p *parser) invalid(g Grants, err *FieldError) bool {
	err.Value = true
	if g == 0 {
		return p.fail(err)
	}
	if bad := &p.ext.bad[g.number()]; *bad == nil {
		*bad = err
	}
	return false
}
