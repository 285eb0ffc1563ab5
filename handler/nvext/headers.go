package nvext

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strconv"
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
		ok := setUint64(&e.BackendInstanceID, value)
		if ok {
			e.DecodeWorkerID = e.BackendInstanceID
		}
		return ok
	}},
	{Pins, []string{"X-Dynamo-Prefill-Instance-Id", "X-Prefill-Instance-Id"}, func(e *Ext, value string) bool {
		return setUint64(&e.PrefillWorkerID, value)
	}},
	{Pins, []string{"X-Dynamo-Dp-Rank", "X-Dp-Rank", "X-Data-Parallel-Rank"}, func(e *Ext, value string) bool {
		return setRank(&e.DPRank, value)
	}},
	{Pins, []string{"X-Dynamo-Prefill-Dp-Rank", "X-Prefill-Dp-Rank"}, func(e *Ext, value string) bool {
		return setRank(&e.PrefillDPRank, value)
	}},
	{Priorities, []string{"X-Dynamo-Request-Priority"}, func(e *Ext, value string) bool {
		n, err := strconv.ParseInt(value, 10, 32)
		if err == nil {
			e.AgentHints.Priority = Some(int32(n))
		}
		return err == nil
	}},
	{Priorities, []string{"X-Dynamo-Request-Strict-Priority"}, func(e *Ext, value string) bool {
		n, err := strconv.ParseUint(value, 10, 32)
		if err == nil {
			e.AgentHints.StrictPriority = Some(uint32(n))
		}
		return err == nil
	}},
	{Tenants, []string{HeaderTenant}, func(e *Ext, value string) bool {
		if len(value) > MaxText {
			value = "sha256:" + Digest([]byte(value))
		}
		e.Tenant = value
		return true
	}},
}

func setUint64(to *Opt[uint64], value string) bool {
	n, err := strconv.ParseUint(value, 10, 64)
	if err == nil {
		*to = Some(n)
	}
	return err == nil
}

// setRank leaves the body's rank if the value is UnsetRank.
func setRank(to *Opt[uint32], value string) bool {
	n, err := strconv.ParseUint(value, 10, 32)
	if err == nil && n != UnsetRank {
		*to = Some(uint32(n))
	}
	return err == nil
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
