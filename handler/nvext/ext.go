package nvext

import (
	"errors"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// Bounds of what a request may say. What is above them is a wrong value.
const (
	// MaxText is the longest text, in bytes: ids, salts and URLs. It is as
	// long as a header line may be in most servers, since each of these texts
	// may become one on its way to an engine.
	MaxText = 8 << 10
	// MaxName is the longest name of a taint, in bytes: names are the
	// operator's, who has to write them, too.
	MaxName = 256
	// MaxList is how many annotations, extra fields or taints a list may
	// have. There are fewer than twenty names in either generation.
	MaxList = 64
	// MaxWorkers is how many ids allowed_worker_ids may have: more workers
	// than one pool is made for.
	MaxWorkers = 4096
	// MaxTokens is how many ids token_data may have: more than the longest
	// context of any model, and 64 MiB when they are kept.
	MaxTokens = 1 << 24
	// MaxTTL is the longest time that a session or a cached prefix can be
	// asked to live: one year, which is the most that Dynamo takes for a
	// session.
	MaxTTL = 365 * 24 * time.Hour
)

// Defaults of the protocol.
const (
	// DefaultTimeout is how long a session lives that does not say.
	DefaultTimeout = 300 * time.Second
	// DefaultTTL is how long a prefix is kept whose cache_control does not
	// say, which is Anthropic's default.
	DefaultTTL = 300 * time.Second
	// UnsetRank is a rank that means none, in the body and in headers.
	UnsetRank = 1<<32 - 1
)

// Options say how an nvext is read.
type Options struct {
	// Strict makes fields that are not known an error. Default: they are
	// passed over.
	Strict bool
	// Tokens keeps the ids of token_data. Default: they are checked, counted
	// and found, and cost no memory.
	Tokens bool
	// MinTimeout and MaxTimeout are what session_control.timeout is moved
	// into. Default: a second and MaxTTL.
	MinTimeout, MaxTimeout time.Duration
	// MaxRetention is what cache_control.ttl is moved below. Default: MaxTTL.
	MaxRetention time.Duration
}

// retention moves the time that a prefix is to be kept below its bound.
func (o Options) retention(ttl time.Duration) time.Duration {
	if o.MaxRetention > 0 {
		return min(ttl, o.MaxRetention)
	}
	return ttl
}

// clamp moves a timeout of that many seconds into its bounds.
func (o Options) clamp(seconds uint64) time.Duration {
	lo, hi := o.MinTimeout, o.MaxTimeout
	if lo <= 0 {
		lo = time.Second
	}
	if hi <= 0 {
		hi = MaxTTL
	}
	if seconds > uint64(hi/time.Second) {
		return hi
	}
	return max(lo, time.Duration(seconds)*time.Second)
}

// Opt is a value that may be absent.
type Opt[T any] struct {
	Value T
	Set   bool
}

// Some returns a value that is there.
func Some[T any](v T) Opt[T] { return Opt[T]{v, true} }

// Or returns the value, or d if it is absent.
func (o Opt[T]) Or(d T) T {
	if o.Set {
		return o.Value
	}
	return d
}

// Ext is what a request says to the router. The zero value says nothing. No
// part of it points into the body. Nil lists and empty texts are absent.
type Ext struct {
	GreedSampling      Opt[bool]    // force greedy sampling
	UseRawPrompt       Opt[bool]    // do not apply the chat template
	BackendInstanceID  Opt[uint64]  // the worker, in each phase
	DecodeWorkerID     Opt[uint64]  // the worker of the decode phase
	PrefillWorkerID    Opt[uint64]  // the worker of the prefill phase
	DPRank             Opt[uint32]  // the rank of the decode worker, or the only one
	PrefillDPRank      Opt[uint32]  // the rank of the prefill worker
	MaxThinkingTokens  Opt[uint32]  // the most tokens of reasoning
	RequestTimestampMS Opt[float64] // when the client sent it, milliseconds

	// TokenData has the prompt's token ids, if Options.Tokens asked for them.
	// It is not nil if there is a list, be it empty.
	TokenData []uint32
	// TokenCount is how many ids token_data has.
	TokenCount int
	// TokenSpan is where the list is: valid JSON that may be spliced into a
	// body as it stands.
	TokenSpan rawjson.Span

	Annotations Annotations // the events that the client asks for
	ExtraFields Fields      // the members of the answer's nvext that it asks for

	// CacheSalt is the body's salt, which keeps the cache of this client
	// apart; Tenant is the one of the header, which an operator may set for
	// it. See Salt.
	CacheSalt, Tenant string
	// MetadataUpload is the URL, not empty and without spaces around it, to
	// which the engine is to send its data.
	MetadataUpload string

	AgentHints     AgentHints
	SessionControl SessionControl
	SessionParams  SessionParams
	// CacheTTL is how long the prompt's cache is to be kept: the ttl of
	// cache_control, DefaultTTL if that has none. It is at least a second and
	// at most MaxTTL and Options.MaxRetention.
	CacheTTL Opt[time.Duration]

	RoutingConstraints RoutingConstraints
	// AllowedWorkerIDs are the only workers that may be chosen. An empty list
	// that is not nil allows none.
	AllowedWorkerIDs []uint64
	Router           Router
	Override         RouterConfigOverride

	bad [grantCount]*FieldError // the first wrong value of each kind, by its bit's number
}

// AgentHints are what the client knows of its request.
type AgentHints struct {
	Priority           Opt[int32]   // higher is more important
	StrictPriority     Opt[uint32]  // the tier in the queue, higher is sooner
	OSL                Opt[uint32]  // expected output, tokens
	SpeculativePrefill Opt[bool]    // compute the next turn's prefix beforehand
	LatencySensitivity Opt[float64] // the older name of priority, seconds
}

// PriorityJump returns the head start in the queue, in seconds: the priority,
// or the older latency_sensitivity if there is none, and never below zero.
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
	ActionOpen                // the engine makes the session before this turn
	ActionBind                // the router keeps the session, the engine knows nothing
	ActionClose               // this turn is the session's last
)

// String returns the protocol's word, empty for ActionNone.
func (a Action) String() string {
	switch a {
	case ActionOpen:
		return "open"
	case ActionBind:
		return "bind"
	case ActionClose:
		return "close"
	case ActionNone:
	}
	return ""
}

// SessionControl names the session of a request and what becomes of it.
type SessionControl struct {
	// SessionID is the client's: not scoped to a tenant. It is empty if the
	// request is of no session; with an action it is not.
	SessionID string
	Action    Action
	// Timeout is how long the session may be idle, within the bounds of the
	// Options, DefaultTimeout if the client does not say; 0 if there is no
	// session. Timed is whether it does.
	Timeout time.Duration
	Timed   bool
}

// SessionParams are SGLang's parameters of a turn in a session that it holds.
type SessionParams struct {
	ID, RID            string
	Offset             Opt[int64] // tokens
	Replace            Opt[bool]
	DropPreviousOutput Opt[bool]
	// Span is where the object is: valid JSON that may be spliced into a body
	// as it stands. It is the zero Span if there is none.
	Span rawjson.Span
}

// RoutingConstraints choose workers by their taints.
type RoutingConstraints struct {
	RequiredTaints  []string // a worker must have all of them
	PreferredTaints []Taint  // those that a worker has change its cost
}

// Taint is a preferred taint and its weight: above zero it attracts.
type Taint struct {
	Name   string
	Weight float32
}

// Router has the client's targets, in milliseconds.
type Router struct {
	TTFTTarget, ITLTarget Opt[float64]
}

// RouterConfigOverride changes the cost function for one request. Dynamo has
// it within, but takes it from no client.
type RouterConfigOverride struct {
	OverlapScoreCredit    Opt[float64] // not below 0
	PrefillLoadScale      Opt[float64] // not below 0
	RouterTemperature     Opt[float64] // not below 0
	SharedCacheMultiplier Opt[float64] // 0 to 1
	AssumeKVReuse         Opt[bool]
	TrackPrefillTokens    Opt[bool]
}

// Session returns the id of the request's session: that of session_control, or
// the one of session_params, which alone was there first. It is empty if there
// is none.
func (e *Ext) Session() string {
	if e.SessionControl.SessionID != "" {
		return e.SessionControl.SessionID
	}
	return e.SessionParams.ID
}

// Salt returns what keeps this request's cache apart: the header's tenant, or
// the body's salt, or top, which is the salt that the body has outside nvext.
func (e *Ext) Salt(top string) string {
	if e.Tenant != "" {
		return e.Tenant
	}
	if e.CacheSalt != "" {
		return e.CacheSalt
	}
	return top
}

// QueryOnly tells whether the client wants to know where its request would go,
// and no answer.
func (e *Ext) QueryOnly() bool { return e.Annotations&AnnotationQueryOnly != 0 }

// QueryExplains tells whether such a client wants to know why, too.
func (e *Ext) QueryExplains() bool { return e.Annotations&AnnotationQueryExplain != 0 }

// ErrChoices says that completion_token_ids were asked for of more than one
// choice, which the answer could not tell apart.
var ErrChoices = errors.New("nvext.extra_fields: completion_token_ids requires exactly one generated choice")

// CheckChoices returns ErrChoices if the request, which makes so many choices,
// asks for fields that are of one choice only.
func (e *Ext) CheckChoices(choices int) error {
	if choices > 1 && e.ExtraFields&FieldCompletionTokenIDs != 0 {
		return ErrChoices
	}
	return nil
}

// Fields are members of an answer's nvext.
type Fields uint16

// The members of an answer's nvext.
const (
	FieldWorkerID Fields = 1 << iota
	FieldTiming
	FieldTokenIDs
	FieldRoutedExperts
	FieldEngineData
	FieldStopReason
	FieldCompletionTokenIDs
	FieldPromptLogprobs
	// fieldOther stands for names that are not known, which are without
	// effect here.
	fieldOther
)

// fieldNamed returns the field of a name.
func fieldNamed(name string) Fields {
	switch name {
	case NameWorkerID:
		return FieldWorkerID
	case NameTiming:
		return FieldTiming
	case NameTokenIDs:
		return FieldTokenIDs
	case "routed_experts":
		return FieldRoutedExperts
	case "engine_data":
		return FieldEngineData
	case "stop_reason":
		return FieldStopReason
	case "completion_token_ids":
		return FieldCompletionTokenIDs
	case "prompt_logprobs":
		return FieldPromptLogprobs
	}
	return fieldOther
}

// Annotations are what a client wants to be told in events of their own.
type Annotations uint8

// The annotations.
const (
	AnnotationRequestID       Annotations = 1 << iota // request_id
	AnnotationTokenIDs                                // token_ids
	AnnotationFormattedPrompt                         // formatted_prompt
	AnnotationQueryOnly                               // query_instance_id, alone or with a colon and anything
	AnnotationQueryExplain                            // query_instance_id:explain, which is AnnotationQueryOnly, too
	// annotationOther stands for names that are not known, which are without
	// effect here and may show a Dynamo's topology.
	annotationOther
	// annotationOwned stands for those that only a router may write.
	annotationOwned

	annotationsHarmless = AnnotationRequestID | AnnotationTokenIDs | AnnotationFormattedPrompt
)

// annotationNamed returns the annotation of a name.
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
