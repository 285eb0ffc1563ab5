package nvext

import (
	"encoding/json"
	"reflect"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// Cuts appends edits that remove the parts of an nvext that a Dynamo frontend
// must not get. The edits are in order and do not overlap. They remove:
//   - fields that need a grant which g lacks, as Restrict does
//   - the router's own fields: router_config_override, allowed_worker_ids
//   - fields that Dynamo 1.3 and later refuse: session_control, session_params,
//     cache_control, null, and all unknown fields
//   - all but the last of several fields of one name: another reader might
//     use the first
//   - cache_salt, if noSalt says that a tenant's salt replaces it
//
// All other bytes stay, and the result is valid JSON. A pin's ids are those of
// this router's workers, not Dynamo's: the caller grants no Pins here, and sends
// translated pins as headers. Parse must have accepted the nvext.
func Cuts(cuts []rawjson.Edit, raw []byte, g Grants, noSalt bool) []rawjson.Edit {
	i := rawjson.SkipSpace(raw, 0)
	if i == len(raw) || raw[i] != '{' {
		return cuts
	}
	u := upstream{raw: raw, grants: g, noSalt: noSalt, cuts: cuts}
	u.object(i, fields)
	return u.cuts
}

type upstream struct {
	raw    []byte
	grants Grants
	noSalt bool
	cuts   []rawjson.Edit
}

func (u *upstream) object(i int, fields []field) {
	var last [maxFields]int // where the last key of each name is
	c := rawjson.Enter(u.raw, i)
	for c.Next() {
		if n := indexOf(fields, c.Name()); n >= 0 {
			last[n] = c.KeyAt
		}
		c.Value()
	}
	cut := rawjson.Cutter{Edits: &u.cuts}
	c = rawjson.Enter(u.raw, i)
	for c.Next() {
		n := indexOf(fields, c.Name())
		v := c.Value()
		if n < 0 || c.KeyAt != last[n] || v.IsNull(u.raw) || u.refuses(&fields[n], v) {
			cut.Drop(&c, v)
			continue
		}
		cut.Keep(&c)
		switch f := &fields[n]; {
		case f.in != nil:
			u.object(v.Start, f.in)
		case f.name == "annotations":
			u.annotations(v.Start)
		}
	}
}

// refuses returns whether a Dynamo must not get a field with this value.
func (u *upstream) refuses(f *field, v rawjson.Span) bool {
	switch f.name {
	case "annotations":
		return false // the list stays, without some of its elements
	case "cache_salt":
		return u.noSalt
	case "dp_rank", "prefill_dp_rank":
		if string(v.Of(u.raw)) == unsetRank {
			return true
		}
	}
	return f.own || f.needs&^u.grants != 0
}

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

// field is a field of nvext, or of an object within it, by its tags in wire.
type field struct {
	name  string
	needs Grants
	own   bool
	in    []field // of a value that is an object
}

// maxFields is the largest number of fields in one object.
const maxFields = 22

var fields = fieldsOf(reflect.TypeFor[wire]())

func fieldsOf(t reflect.Type) (list []field) {
	for in := range t.Fields() {
		f := field{name: in.Tag.Get("json"), own: in.Tag.Get("own") != ""}
		if in.Anonymous {
			list = append(list, fieldsOf(in.Type)...)
			continue
		} else if f.name == "-" {
			continue
		}
		f.needs, _ = ParseGrant(in.Tag.Get("grant"))
		if of := in.Type; of.Kind() == reflect.Struct && !reflect.PointerTo(of).Implements(reflect.TypeFor[json.Unmarshaler]()) {
			f.in = fieldsOf(of)
		} else if of.Kind() == reflect.Pointer && of.Elem().Kind() == reflect.Struct {
			f.in = fieldsOf(of.Elem())
		}
		list = append(list, f)
	}
	return list
}

func indexOf(fields []field, name string) int {
	return slices.IndexFunc(fields, func(f field) bool { return f.name == name })
}
