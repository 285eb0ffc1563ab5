package nvext

import (
	"cmp"
	"encoding/json"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// Bounds of what a request may say. A larger value is wrong.
const (
	// MaxText is the longest text, in bytes: ids, salts and URLs. Each may become
	// a header on its way to an engine, and most servers allow headers of this
	// length.
	MaxText = 8 << 10
	// MaxName is the longest name of a taint, in bytes.
	MaxName = 256
	// MaxList is the largest number of annotations, extra fields or taints in a
	// list. Each generation has fewer than twenty names.
	MaxList = 64
	// MaxWorkers is the largest number of ids in allowed_worker_ids.
	MaxWorkers = 4096
	// MaxMembers is the largest number of members of an nvext, and of each object in it: as
	// many as an [rawjson.Editor] takes. The protocol has about thirty.
	MaxMembers = 256
	// MaxTokens is the largest number of ids in token_data: more than any model's
	// context, and 64 MiB in memory.
	MaxTokens = 1 << 24
	// maxOverride bounds the numbers of an override, so that costs stay finite.
	maxOverride = 1e6
	// MaxTTL is the longest life of a session or a cached prefix. It is Dynamo's
	// limit for sessions.
	MaxTTL = 365 * 24 * time.Hour
)

// Defaults of the protocol.
const (
	// DefaultTimeout is the life of a session without a timeout.
	DefaultTimeout = 300 * time.Second
	// DefaultTTL is the life of a cached prefix if cache_control has no ttl. It is
	// Anthropic's default.
	DefaultTTL = 300 * time.Second
	// UnsetRank is the rank that means no rank, in the body and in headers.
	UnsetRank = 1<<32 - 1
	unsetRank = "4294967295"
)

// Opt is a value that may be absent.
type Opt[T any] struct {
	Value T
	Set   bool
}

// Some returns a value that is present.
func Some[T any](v T) Opt[T] { return Opt[T]{v, true} }

// UnmarshalJSON implements json.Unmarshaler. Null is absent.
func (o *Opt[T]) UnmarshalJSON(b []byte) error {
	*o = Opt[T]{Set: string(b) != "null"}
	return json.Unmarshal(b, &o.Value)
}

// Ext is what a request says to the router. The zero value says nothing. No part
// of it points into the body. Nil lists and empty texts are absent. Its tags are as in wire.
type Ext struct { // one member for each field of the protocol
	GreedSampling     Opt[bool]   `json:"greed_sampling"`                   // force greedy sampling
	UseRawPrompt      Opt[bool]   `json:"use_raw_prompt"`                   // do not apply the chat template
	BackendInstanceID Opt[uint64] `json:"backend_instance_id" grant:"pins"` // the worker, in both phases
	DecodeWorkerID    Opt[uint64] `json:"decode_worker_id" grant:"pins"`    // the worker of the decode phase
	PrefillWorkerID   Opt[uint64] `json:"prefill_worker_id" grant:"pins"`   // the worker of the prefill phase
	DPRank            Opt[uint32] `json:"dp_rank" grant:"pins"`             // the rank of the decode worker, or the only one
	PrefillDPRank     Opt[uint32] `json:"prefill_dp_rank" grant:"pins"`     // the rank of the prefill worker
	MaxThinkingTokens Opt[uint32] `json:"max_thinking_tokens"`              // the limit of reasoning tokens

	// TokenData has the prompt's token ids if the caller has read them, see IDs.
	TokenData []byte `json:"-"`
	// TokenCount is the number of ids in token_data.
	TokenCount int `json:"-"`
	// TokenSpan is the list's place: valid JSON that can be spliced into a body.
	TokenSpan rawjson.Span `json:"-"`

	Annotations Annotations `json:"-"`                 // the events that the client asks for
	ExtraFields Fields      `json:"-" grant:"explain"` // the members of the answer's nvext that the client asks for

	// CacheSalt is the salt of the body, which isolates this client's cache.
	// Tenant is the tenant of the header, which an operator may set. See Salt.
	CacheSalt string `json:"cache_salt"`
	Tenant    string `json:"-" grant:"tenants"`
	// MetadataUpload is the URL to which the engine sends its data. It is not
	// empty and has no spaces around it.
	MetadataUpload string `json:"-" grant:"uploads"`

	AgentHints     AgentHints     `json:"agent_hints"`
	SessionControl SessionControl `json:"-"`
	SessionParams  SessionParams  `json:"-"`
	// CacheTTL is how long the engine should keep the prompt's cache: the ttl of
	// cache_control, or DefaultTTL. It is between a second and Parse's longest.
	CacheTTL Opt[time.Duration] `json:"-" grant:"priorities"`

	RoutingConstraints RoutingConstraints `json:"-" grant:"overrides"`
	// AllowedWorkerIDs are the only workers that the router may choose. An empty
	// list that is not nil allows none.
	AllowedWorkerIDs []uint64 `json:"allowed_worker_ids" grant:"overrides" own:"true"`
	// Override changes the cost function for one request (router_config_override). Dynamo uses
	// it internally and accepts it from no client.
	Override kvscore.Override `json:"-" grant:"overrides"`
}

// AgentHints are the client's hints about its request.
type AgentHints struct {
	Priority           Opt[int32]   `json:"priority" grant:"priorities"`            // higher is more important
	StrictPriority     Opt[uint32]  `json:"strict_priority" grant:"priorities"`     // the tier in the queue; a higher one is served first
	OSL                Opt[uint32]  `json:"osl"`                                    // the expected output, in tokens
	SpeculativePrefill Opt[bool]    `json:"speculative_prefill"`                    // prefill the beginning of the next turn
	LatencySensitivity Opt[float64] `json:"latency_sensitivity" grant:"priorities"` // the older name of priority, seconds
}

// PriorityJump returns the head start in the queue, in seconds: the priority, or
// else latency_sensitivity. It is never negative.
func (h *AgentHints) PriorityJump() float64 {
	if h.Priority.Set {
		return max(0, float64(h.Priority.Value))
	}
	return max(0, h.LatencySensitivity.Value)
}

// Action is what a request does to its session.
type Action uint8

// The actions of session_control.
const (
	ActionNone  Action = iota // a turn of a session
	ActionOpen                // the engine opens the session before this turn
	ActionBind                // only the router knows the session
	ActionClose               // this is the session's last turn
)

var actions = [...]string{"", "open", "bind", "close"}

// SessionControl names the session of a request and what to do with it.
type SessionControl struct {
	// SessionID is the client's id, not scoped to a tenant. It is empty if the
	// request has no session. With an action it is never empty.
	SessionID string
	Action    Action
	// Timeout is how long the session may be idle, from a second to Parse's
	// longest. It is DefaultTimeout if the client sets none, and 0 without a
	// session. Timed says that the client set it.
	Timeout time.Duration
	Timed   bool
}

// SessionParams are SGLang's parameters for a turn in a session that SGLang holds.
type SessionParams struct {
	ID string
	// Span is the object's place: valid JSON that can be spliced into a body. It
	// is the zero Span if there is no object.
	Span rawjson.Span
}

// RoutingConstraints select workers by their taints.
type RoutingConstraints struct {
	RequiredTaints  []string // a worker must have all of them
	PreferredTaints []Taint  // each one that a worker has changes its cost
}

// Taint is a preferred taint and its weight. A positive weight attracts.
type Taint struct {
	Name   string
	Weight float32
}

// Session returns the id of the request's session: that of session_control, or
// else that of session_params, the older field. It is empty without a session.
func (e *Ext) Session() string { return cmp.Or(e.SessionControl.SessionID, e.SessionParams.ID) }

// Salt returns what isolates this request's cache: the header's tenant, else the
// salt of nvext, else top, the body's salt outside nvext.
func (e *Ext) Salt(top string) string { return cmp.Or(e.Tenant, e.CacheSalt, top) }

// QueryOnly returns whether the client asks where the router would send its
// request, instead of sending it.
func (e *Ext) QueryOnly() bool { return e.Annotations&AnnotationQueryOnly != 0 }

// QueryExplains returns whether such a client also asks for the reasons.
func (e *Ext) QueryExplains() bool { return e.Annotations&AnnotationQueryExplain != 0 }

// Fields are members of an answer's nvext.
type Fields uint16

// The members of an answer's nvext.
const (
	FieldWorkerID Fields = 1 << iota
	FieldTiming
	FieldTokenIDs
	fieldOther // made by engines, or unknown; no effect here
)

func fieldNamed(name string) Fields {
	switch name {
	case NameWorkerID:
		return FieldWorkerID
	case NameTiming:
		return FieldTiming
	case NameTokenIDs:
		return FieldTokenIDs
	}
	return fieldOther
}

// Annotations are information that a client asks for as separate events.
type Annotations uint8

// The annotations.
const (
	AnnotationRequestID       Annotations = 1 << iota // request_id
	AnnotationTokenIDs                                // token_ids
	AnnotationFormattedPrompt                         // formatted_prompt
	AnnotationQueryOnly                               // query_instance_id, alone or followed by a colon and any text
	AnnotationQueryExplain                            // query_instance_id:explain, which includes AnnotationQueryOnly
	annotationOther                                   // unknown: no effect here, but a Dynamo may reveal its topology
	annotationOwned                                   // only a router may write these

	annotationsHarmless = AnnotationRequestID | AnnotationTokenIDs | AnnotationFormattedPrompt
)

func annotationNamed(name string) Annotations {
	const query = "query_instance_id"
	switch name {
	case NameRequestID:
		return AnnotationRequestID
	case NameTokenIDs:
		return AnnotationTokenIDs
	case NameFormattedPrompt:
		return AnnotationFormattedPrompt
	case query:
		return AnnotationQueryOnly
	case "x-bypass-remote-prefill", "llm_metrics", "payload_usage":
		return annotationOwned
	}
	if rest, ok := strings.CutPrefix(name, query+":"); ok {
		if rest == "explain" {
			return AnnotationQueryOnly | AnnotationQueryExplain
		}
		return AnnotationQueryOnly
	}
	return annotationOther
}
