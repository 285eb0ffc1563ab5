package nvext

import (
	"slices"
	"strings"
	"time"
)

// Grants are kinds of what a client may say to the router, as the trust
// directive has them. The zero value grants nothing.
type Grants uint8

// The kinds.
const (
	// Pins are workers, ranks and phases: backend_instance_id,
	// decode_worker_id, prefill_worker_id, dp_rank, prefill_dp_rank.
	Pins Grants = 1 << iota
	// Priorities are agent_hints.priority, strict_priority and
	// latency_sensitivity, and cache_control, which holds the cache against
	// others.
	Priorities
	// Overrides are router_config_override, allowed_worker_ids and
	// routing_constraints.
	Overrides
	// Tenants is the header that sets the cache's salt.
	Tenants
	// Uploads is metadata_upload, for the engine would send to a client's URL.
	Uploads
	// Explain is query_instance_id, extra_fields, and all annotations that
	// are not known to show the client's own request only.
	Explain

	// Everything is all of them.
	Everything = Pins | Priorities | Overrides | Tenants | Uploads | Explain

	grantCount = 6
)

var grantNames = [grantCount]string{"pins", "priorities", "overrides", "tenants", "uploads", "explain"}

// GrantNames returns the names of all kinds, in the order of Grants.Names.
func GrantNames() []string { return slices.Clone(grantNames[:]) }

// ParseGrant returns the kind of a name. It is not ok if there is none.
func ParseGrant(name string) (g Grants, ok bool) {
	if n := slices.Index(grantNames[:], name); n >= 0 {
		return 1 << n, true
	}
	return 0, false
}

// Names calls yield with the name of each kind in g. It is a sequence: range
// over it. The names are good as label values.
func (g Grants) Names(yield func(string) bool) {
	for n, name := range grantNames {
		if g>>n&1 == 1 && !yield(name) {
			return
		}
	}
}

// String returns the names, with spaces between them.
func (g Grants) String() string {
	var names []string
	for name := range g.Names {
		names = append(names, name)
	}
	return strings.Join(names, " ")
}

// number returns which bit g is, of which it has one.
func (g Grants) number() int {
	n := 0
	for g > 1 {
		g >>= 1
		n++
	}
	return n
}

// Restrict drops what is not granted, and returns the kinds of which there was
// something, wrong values included. The error is a [*FieldError] for a value
// that is granted and wrong; then nothing of e is to be honoured. Annotations
// that only a router may write are dropped in any case, as Explain.
func (e *Ext) Restrict(g Grants) (dropped Grants, err error) {
	for n, bad := range e.bad {
		switch kind := Grants(1) << n; {
		case bad == nil:
		case g&kind == 0:
			dropped |= kind
		case err == nil:
			err = bad
		}
	}
	e.bad = [grantCount]*FieldError{}
	dropped |= e.said() &^ g
	if e.Annotations&annotationOwned != 0 {
		e.Annotations &^= annotationOwned
		dropped |= Explain
	}
	if g&Pins == 0 {
		e.BackendInstanceID, e.DecodeWorkerID, e.PrefillWorkerID = Opt[uint64]{}, Opt[uint64]{}, Opt[uint64]{}
		e.DPRank, e.PrefillDPRank = Opt[uint32]{}, Opt[uint32]{}
	}
	if g&Priorities == 0 {
		h := &e.AgentHints
		h.Priority, h.StrictPriority, h.LatencySensitivity = Opt[int32]{}, Opt[uint32]{}, Opt[float64]{}
		e.CacheTTL = Opt[time.Duration]{}
	}
	if g&Overrides == 0 {
		e.Override, e.AllowedWorkerIDs, e.RoutingConstraints = RouterConfigOverride{}, nil, RoutingConstraints{}
	}
	if g&Tenants == 0 {
		e.Tenant = ""
	}
	if g&Uploads == 0 {
		e.MetadataUpload = ""
	}
	if g&Explain == 0 {
		e.Annotations &= annotationsHarmless
		e.ExtraFields = 0
	}
	return dropped, err
}

// Needs returns the kinds of trust that e asks for, wrong values included. Where
// there are none, nobody need find out who the client is.
func (e *Ext) Needs() Grants {
	needs := e.said()
	for n, bad := range e.bad {
		if bad != nil {
			needs |= 1 << n
		}
	}
	return needs
}

// said returns the kinds of which e says something.
func (e *Ext) said() (g Grants) {
	h, c := &e.AgentHints, &e.RoutingConstraints
	for n, said := range [grantCount]bool{
		e.BackendInstanceID.Set || e.DecodeWorkerID.Set || e.PrefillWorkerID.Set || e.DPRank.Set || e.PrefillDPRank.Set,
		h.Priority.Set || h.StrictPriority.Set || h.LatencySensitivity.Set || e.CacheTTL.Set,
		e.Override != RouterConfigOverride{} || e.AllowedWorkerIDs != nil || c.RequiredTaints != nil || c.PreferredTaints != nil,
		e.Tenant != "",
		e.MetadataUpload != "",
		e.Annotations&^annotationsHarmless != 0 || e.ExtraFields != 0,
	} {
		if said {
			g |= 1 << n
		}
	}
	return g
}
