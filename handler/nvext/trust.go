package nvext

import (
	"reflect"
	"slices"
	"strings"
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
	for _, v := range [...]struct {
		needs Grants
		value any
	}{
		{Pins, &e.BackendInstanceID},
		{Pins, &e.DecodeWorkerID},
		{Pins, &e.PrefillWorkerID},
		{Pins, &e.DPRank},
		{Pins, &e.PrefillDPRank},
		{Priorities, &e.AgentHints.Priority},
		{Priorities, &e.AgentHints.StrictPriority},
		{Priorities, &e.AgentHints.LatencySensitivity},
		{Priorities, &e.CacheTTL},
		{Overrides, &e.Override},
		{Overrides, &e.AllowedWorkerIDs},
		{Overrides, &e.RoutingConstraints},
		{Tenants, &e.Tenant},
		{Uploads, &e.MetadataUpload},
		{Explain, &e.ExtraFields},
	} {
		f(v.needs, reflect.ValueOf(v.value).Elem())
	}
}
