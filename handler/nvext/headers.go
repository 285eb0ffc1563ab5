package nvext

import (
	"crypto/sha256"
	"encoding/hex"
	"strconv"
	"strings"
)

// HeaderSession is the header in which Dynamo 1.3 and later takes what
// session_control.session_id said before.
const HeaderSession = "X-Dynamo-Session-Id"

// HeaderTenant is the header that says which tenant a request is of.
const HeaderTenant = "X-Tenant-Id"

// headerMeta is what headers begin with that say something of a request to a
// Dynamo's policies: X-Dynamo-Meta-Policy-Class, the class of its queue.
const headerMeta = "X-Dynamo-Meta-"

// Routes tells whether a header, by its canonical name, is for a router: one that
// ApplyHeaders reads, or another one that a Dynamo does, or by which an SGLang may
// be told its rank or a priority in place of the body.
func Routes(name string) bool {
	if len(name) < len("X-Dp-Rank") || name[0] != 'X' || name[1] != '-' {
		return false
	}
	switch name[2] { // most headers are told apart here
	case 'D':
		return strings.HasPrefix(name, "X-Dynamo-") || name == "X-Dp-Rank" || name == "X-Data-Parallel-Rank"
	case 'W':
		return name == "X-Worker-Instance-Id"
	case 'O':
		return HeaderNeeds(name) != 0
	case 'P':
		return name == "X-Prefill-Instance-Id" || name == "X-Prefill-Dp-Rank"
	case 'T':
		return name == HeaderTenant
	}
	return false
}

// HeaderNeeds returns the kind of trust that a header needs which ApplyHeaders
// does not read, by its canonical name; 0 if it needs none. An SGLang with
// SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES takes X-Override-* for members of the
// body (srt/entrypoints/request_headers.py), of which these steer it.
func HeaderNeeds(name string) Grants {
	switch {
	case strings.HasPrefix(name, headerMeta), name == "X-Override-Priority":
		return Priorities
	case name == "X-Override-Routed-Dp-Rank", name == "X-Override-Disagg-Prefill-Dp-Rank":
		return Pins
	}
	return 0
}

// Header is a request header that says something to the router.
type Header struct {
	// Name is in the canonical form of net/http.
	Name string
	// Grant is the kind of trust that it needs. A client that lacks it must
	// not get the header through to an engine, some of which read it.
	Grant Grants
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

// Headers returns all headers that ApplyHeaders reads.
func Headers() (all []Header) {
	for set, names := range headerNames {
		for _, name := range names {
			all = append(all, Header{name, headerGrants[set]})
		}
	}
	return all
}

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
