package nvext

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// Grants are kinds of what a client may say to the router, as in the trust
// directive. The zero value grants nothing.
type Grants uint8

// The kinds.
const (
	// Pins are workers, ranks and phases: backend_instance_id,
	// decode_worker_id, prefill_worker_id, dp_rank, prefill_dp_rank.
	Pins Grants = 1 << iota
	// Priorities are agent_hints.priority, strict_priority, latency_sensitivity
	// and cache_control, which keeps the cache from others.
	Priorities
	// Overrides are router_config_override, allowed_worker_ids and
	// routing_constraints.
	Overrides
	// Tenants is the header that sets the cache's salt.
	Tenants
	// Uploads is metadata_upload: the engine sends data to the client's URL.
	Uploads
	// Explain is query_instance_id, extra_fields, and all annotations except those
	// that show only the client's own request.
	Explain

	// Everything is all kinds.
	Everything = Pins | Priorities | Overrides | Tenants | Uploads | Explain

	grantCount = 6
)

var grantNames = [grantCount]string{"pins", "priorities", "overrides", "tenants", "uploads", "explain"}

// GrantNames returns the names of all kinds, in the order of Grants.Names.
func GrantNames() []string { return slices.Clone(grantNames[:]) }

// ParseGrant returns the kind of that name. It is not ok if there is none.
func ParseGrant(name string) (g Grants, ok bool) {
	if n := slices.Index(grantNames[:], name); n >= 0 {
		return 1 << n, true
	}
	return 0, false
}

// Names is an iterator over the names of the kinds in g. They are fit for label
// values.
func (g Grants) Names(yield func(string) bool) {
	for n, name := range grantNames {
		if g>>n&1 == 1 && !yield(name) {
			return
		}
	}
}

// String returns the names, with spaces between them.
func (g Grants) String() string { return strings.Join(slices.Collect(g.Names), " ") }

// Restrict removes from e what g does not grant, and returns the kinds that it
// removed. It always removes annotations that only a router may write, as Explain.
func (e *Ext) Restrict(g Grants) (dropped Grants) {
	dropped = e.Needs() &^ g
	if e.Annotations&annotationOwned != 0 {
		e.Annotations &^= annotationOwned
		dropped |= Explain
	}
	e.trusted(func(needs Grants, value reflect.Value) {
		if needs&^g != 0 {
			value.SetZero()
		}
	})
	if g&Explain == 0 {
		e.Annotations &= annotationsHarmless
	}
	return dropped
}

// Needs returns the kinds of trust that e asks for. If it returns none, the
// client's identity does not matter.
func (e *Ext) Needs() (g Grants) {
	e.trusted(func(needs Grants, value reflect.Value) {
		if !value.IsZero() {
			g |= needs
		}
	})
	if e.Annotations&^annotationsHarmless != 0 {
		g |= Explain
	}
	return g
}

// trusted calls f for the values of e that need trust, except for the annotations.
func (e *Ext) trusted(f func(needs Grants, value reflect.Value)) {
	for _, at := range granted {
		f(at.needs, reflect.ValueOf(e).Elem().FieldByIndex(at.index))
	}
}

// grantedField is a field of Ext with the tag grant.
type grantedField struct {
	needs Grants
	index []int
}

var granted = grantedIn(reflect.TypeFor[Ext](), nil)

func grantedIn(t reflect.Type, index []int) (list []grantedField) {
	for f := range t.Fields() {
		at := slices.Concat(index, f.Index)
		if needs, ok := ParseGrant(f.Tag.Get("grant")); ok {
			list = append(list, grantedField{needs, at})
		} else if f.Type.Kind() == reflect.Struct {
			list = append(list, grantedIn(f.Type, at)...)
		}
	}
	return list
}

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
