package nvext

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"slices"
	"strings"
)

// HeaderSession is Dynamo's header for the session of a request.
const HeaderSession = "X-Dynamo-Session-Id"

// HeaderSessionFinal is Dynamo's header for the last request of a session.
const HeaderSessionFinal = "X-Dynamo-Session-Final"

// HeaderTenant is the header that names the tenant of a request.
const HeaderTenant = "X-Tenant-Id"

// Prefixes of headers that need a grant whatever follows.
const (
	// prefixMeta has the headers for a Dynamo's policies, such as
	// X-Dynamo-Meta-Policy-Class, the class of its queue.
	prefixMeta = "X-Dynamo-Meta-"
	// prefixOverride has the headers that set members of the body, such as rank
	// and priority, in an SGLang with SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES
	// (srt/entrypoints/request_headers.py).
	prefixOverride = "X-Override-"
)

// HeaderNeeds returns the grant that a routing header needs, by its canonical
// name; 0 for other headers. An engine must not get a header without its grant,
// nor any header that needs Pins: the router chooses worker and rank.
func HeaderNeeds(name string) Grants {
	if len(name) < len("X-Dp-Rank") || name[:2] != "X-" || strings.IndexByte("DOPTW", name[2]) < 0 {
		return 0
	}
	switch {
	case strings.HasPrefix(name, prefixOverride):
		return Pins
	case strings.HasPrefix(name, prefixMeta):
		return Priorities
	}
	for n := range headers {
		if slices.Contains(headers[n].names, name) {
			return headers[n].needs
		}
	}
	return 0
}

// header is a routing header: the names under which it comes, and what it sets.
type header struct {
	needs Grants
	// names are in order of precedence: the first one that is there counts.
	names []string
	// set stores the value in an Ext. It returns false if the value is malformed.
	set func(e *Ext, value string) bool
}

var headers = []header{
	{Pins, []string{"X-Dynamo-Worker-Instance-Id", "X-Worker-Instance-Id"}, func(e *Ext, value string) bool {
		ok := setNumber(value, &e.BackendInstanceID)
		if ok {
			e.DecodeWorkerID = e.BackendInstanceID
		}
		return ok
	}},
	{Pins, []string{"X-Dynamo-Prefill-Instance-Id", "X-Prefill-Instance-Id"}, func(e *Ext, value string) bool {
		return setNumber(value, &e.PrefillWorkerID)
	}},
	{Pins, []string{"X-Dynamo-Dp-Rank", "X-Dp-Rank", "X-Data-Parallel-Rank"}, func(e *Ext, value string) bool {
		return value == unsetRank || setNumber(value, &e.DPRank)
	}},
	{Pins, []string{"X-Dynamo-Prefill-Dp-Rank", "X-Prefill-Dp-Rank"}, func(e *Ext, value string) bool {
		return value == unsetRank || setNumber(value, &e.PrefillDPRank)
	}},
	{Priorities, []string{"X-Dynamo-Request-Priority"}, func(e *Ext, value string) bool {
		return setNumber(value, &e.AgentHints.Priority)
	}},
	{Priorities, []string{"X-Dynamo-Request-Strict-Priority"}, func(e *Ext, value string) bool {
		return setNumber(value, &e.AgentHints.StrictPriority)
	}},
	{Tenants, []string{HeaderTenant}, func(e *Ext, value string) bool {
		if len(value) > MaxText {
			value = "sha256:" + Digest([]byte(value))
		}
		e.Tenant = value
		return true
	}},
}

// setNumber sets a number as the body's field of the same place has it.
func setNumber[T any](value string, to *Opt[T]) bool {
	var n *T
	if json.Unmarshal([]byte(value), &n) != nil || n == nil {
		return false
	}
	*to = Some(*n)
	return true
}

// ApplyHeaders replaces fields of the body by what the headers say. get returns
// the first value of a header by its canonical name. A malformed value and a
// rank of UnsetRank leave the body's field. The result names the headers with
// malformed values. A tenant is never malformed: a digest replaces a long one.
func (e *Ext) ApplyHeaders(get func(name string) (value string, ok bool)) (malformed []string) {
	for n := range headers {
		for _, name := range headers[n].names {
			value, ok := get(name)
			if !ok {
				continue
			}
			if !headers[n].set(e, strings.TrimSpace(value)) {
				malformed = append(malformed, name)
			}
			break
		}
	}
	return malformed
}

// Digest returns the SHA-256 of a text in hexadecimal. It replaces a text that
// is too long to keep or must not be shown.
func Digest(s []byte) string {
	sum := sha256.Sum256(s)
	return hex.EncodeToString(sum[:])
}
