package nvext

import (
	"encoding/json"
	"reflect"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// Cut removes the parts of an nvext that a Dynamo frontend must not get:
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
func Cut(e *rawjson.Editor, g Grants, noSalt bool) {
	upstream{g, noSalt}.cut(e, fields)
}

type upstream struct {
	grants Grants
	noSalt bool
}

func (u upstream) cut(e *rawjson.Editor, fields []field) {
	for _, f := range fields {
		e.OnlyLast(f.name)
	}
	e.Drop(func(name string, v rawjson.Span) bool {
		n := indexOf(fields, name)
		return n < 0 || v.IsNull(e.Body) || u.refuses(&fields[n], v.Of(e.Body))
	})
	for _, f := range fields {
		if f.in == nil && f.name != nameAnnotations || e.At(f.name).End == 0 || e.Changed(f.name) {
			continue
		}
		in := e.Within(e.At(f.name).Start)
		switch {
		case in == nil:
			e.Cut(f.name)
		case f.in != nil:
			u.cut(in, f.in)
		default:
			in.Drop(func(_ string, v rawjson.Span) bool { return annotationNamed(v.Text(e.Body))&u.annotations() == 0 })
		}
	}
}

const nameAnnotations = "annotations"

// refuses returns whether a Dynamo must not get a field with this value.
func (u upstream) refuses(f *field, value []byte) bool {
	switch f.name {
	case nameAnnotations:
		return false // the list stays, without some of its elements
	case "cache_salt":
		return u.noSalt
	case "dp_rank", "prefill_dp_rank":
		if string(value) == unsetRank {
			return true
		}
	}
	return f.own || f.needs&^u.grants != 0
}

func (u upstream) annotations() Annotations {
	if u.grants&Explain == 0 {
		return annotationsHarmless
	}
	return ^annotationOwned
}

// field is a field of nvext, or of an object within it, by its tags in wire.
type field struct {
	name  string
	needs Grants
	own   bool
	in    []field // of a value that is an object
}

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
