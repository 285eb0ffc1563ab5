package nvext

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strconv"
	"strings"
)

// HeaderSession is the header in which Dynamo takes a request's session.
const HeaderSession = "X-Dynamo-Session-Id"

// HeaderTenant is the header that says which tenant a request is of.
const HeaderTenant = "X-Tenant-Id"

// The beginnings of headers that are held back by their prefix alone.
const (
	// prefixMeta is that of headers for a Dynamo's policies, such as
	// X-Dynamo-Meta-Policy-Class, the class of its queue.
	prefixMeta = "X-Dynamo-Meta-"
	// prefixOverride is that of headers that an SGLang with
	// SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES takes for members of the body, its
	// rank and its priority among them (srt/entrypoints/request_headers.py).
	prefixOverride = "X-Override-"
)

// HeaderNeeds returns the grant that a routing header needs, by its canonical
// name; 0 if the header is none. An engine must not get a header that is not
// granted, nor any that needs Pins: worker and rank are the router's choice.
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
	for set, names := range headerNames {
		if slices.Contains(names, name) {
			return headerGrants[set]
		}
	}
	return 0
}

// What a header sets.
const (
	setWorker = iota
	setPrefillWorker
	setRank
	setPrefillRank
	setPriority
	setStrictPriority
	setTenant
	setCount
)

// headerNames are the headers by what they set. The first that is there
// counts; those behind it are older names.
var headerNames = [setCount][]string{
	setWorker:         {"X-Dynamo-Worker-Instance-Id", "X-Worker-Instance-Id"},
	setPrefillWorker:  {"X-Dynamo-Prefill-Instance-Id", "X-Prefill-Instance-Id"},
	setRank:           {"X-Dynamo-Dp-Rank", "X-Dp-Rank", "X-Data-Parallel-Rank"},
	setPrefillRank:    {"X-Dynamo-Prefill-Dp-Rank", "X-Prefill-Dp-Rank"},
	setPriority:       {"X-Dynamo-Request-Priority"},
	setStrictPriority: {"X-Dynamo-Request-Strict-Priority"},
	setTenant:         {HeaderTenant},
}

var headerGrants = [setCount]Grants{Pins, Pins, Pins, Pins, Priorities, Priorities, Tenants}

// ApplyHeaders puts what the headers say over what the body says, field by
// field. get returns the first value of a header by its canonical name. A
// value that is malformed leaves the body's, as a rank of UnsetRank does; the
// names of the headers that have such values are returned, to be counted. A
// tenant cannot be malformed: one that is too long is known by its digest.
func (e *Ext) ApplyHeaders(get func(name string) (value string, ok bool)) (malformed []string) {
	for set, names := range headerNames {
		for _, name := range names {
			value, ok := get(name)
			if !ok {
				continue
			}
			if !e.setHeader(set, strings.TrimSpace(value)) {
				malformed = append(malformed, name)
			}
			break
		}
	}
	return malformed
}

// setHeader takes on a header's value. It returns false if it is malformed.
func (e *Ext) setHeader(set int, value string) bool {
	switch set {
	case setWorker, setPrefillWorker:
		n, err := strconv.ParseUint(value, 10, 64)
		if err != nil {
			return false
		}
		if set == setPrefillWorker {
			e.PrefillWorkerID = Some(n)
			return true
		}
		e.BackendInstanceID, e.DecodeWorkerID = Some(n), Some(n)
	case setRank, setPrefillRank, setStrictPriority:
		n, err := strconv.ParseUint(value, 10, 32)
		if err != nil {
			return false
		}
		at := [setCount]*Opt[uint32]{
			setRank: &e.DPRank, setPrefillRank: &e.PrefillDPRank, setStrictPriority: &e.AgentHints.StrictPriority,
		}[set]
		if set == setStrictPriority || n != UnsetRank {
			*at = Some(uint32(n))
		}
	case setPriority:
		n, err := strconv.ParseInt(value, 10, 32)
		if err != nil {
			return false
		}
		e.AgentHints.Priority = Some(int32(n))
	case setTenant:
		if len(value) > MaxText { // which is a tenant of its own all the same
			value = "sha256:" + Digest([]byte(value))
		}
		e.Tenant = value // an empty one is none
	}
	return true
}

// Digest returns what stands for a text that is too long to be kept, or that must
// not be shown: its SHA-256 in hexadecimal.
func Digest(s []byte) string {
	sum := sha256.Sum256(s)
	return hex.EncodeToString(sum[:])
}
