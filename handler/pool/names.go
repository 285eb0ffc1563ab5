package pool

import (
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/prometheus/client_golang/prometheus"
)

// The names of packages worker and observe that are used as those of this package.
type (
	Worker           = worker.Worker
	WorkerSettings   = worker.Settings
	KVEventsSettings = worker.KVEventsSettings
	RequestLimit     = worker.RequestLimit
	ModelList        = worker.ModelList
	ModelEntry       = worker.ModelEntry
	HealthState      = worker.HealthState
	AttemptKind      = worker.AttemptKind
	Part             = worker.Part

	Figures       = observe.Figures
	Sums          = observe.Sums
	Incidents     = observe.Incidents
	Incident      = observe.Incident
	Warning       = observe.Warning
	PastChoice    = observe.PastChoice
	PastCandidate = observe.PastCandidate
)

// Constants of packages worker and observe.
const (
	KindOther    = worker.KindOther
	KindStream   = worker.KindStream
	KindPlain    = worker.KindPlain
	Any          = worker.Any
	Whole        = worker.Whole
	Answer       = worker.Answer
	Prefill      = worker.Prefill
	LimitAuto    = worker.LimitAuto
	EngineAuto   = worker.EngineAuto
	AllWorkers   = worker.AllWorkers
	EventsAuto   = worker.EventsAuto
	EventsOff    = worker.EventsOff
	MaxModels    = worker.MaxModels
	MaxModelList = worker.MaxModelList
	ReachUnknown = worker.ReachUnknown
	Unresponsive = worker.Unresponsive

	AttemptRetried     = observe.AttemptRetried
	AttemptResumed     = observe.AttemptResumed
	AttemptDrained     = observe.AttemptDrained
	AttemptPrefilled   = observe.AttemptPrefilled
	AttemptClientError = observe.AttemptClientError
	RecentSlots        = observe.RecentSlots
	SlotTime           = observe.SlotTime
)

// Functions of packages worker and observe.
var (
	AwaitProbes       = worker.AwaitProbes
	DerivedID         = worker.DerivedID
	ParseRequestLimit = worker.ParseRequestLimit
	PortOf            = worker.PortOf
	SlotOf            = observe.SlotOf
	ValidRequestID    = observe.ValidRequestID
)

// Collectors returns the collectors of the pools, to be registered.
func Collectors() []prometheus.Collector { return observe.Collectors() }
