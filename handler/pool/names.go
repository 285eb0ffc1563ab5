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
	AttemptKind      = worker.AttemptKind
	Part             = worker.Part

	ModelMetrics = observe.ModelMetrics
	Incidents    = observe.Incidents
	PastChoice   = observe.PastChoice
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
	MaxModelList = worker.MaxModelList
	Unresponsive = worker.Unresponsive

	AttemptRetried     = observe.AttemptRetried
	AttemptResumed     = observe.AttemptResumed
	AttemptDrained     = observe.AttemptDrained
	AttemptPrefilled   = observe.AttemptPrefilled
	AttemptClientError = observe.AttemptClientError
)

// Functions of packages worker and observe.
var (
	DerivedID      = worker.DerivedID
	ValidRequestID = observe.ValidRequestID
)

// Collectors returns the collectors of the pools, to be registered.
func Collectors() []prometheus.Collector { return observe.Collectors() }
