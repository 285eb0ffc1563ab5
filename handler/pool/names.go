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

// Figures returns the figures of a worker for a model.
func (p *Pool) Figures(w *Worker, model string) *Figures { return w.Figures(model) }

// ForgetModels deletes the figures for models that the worker no longer lists.
func (p *Pool) ForgetModels(w *Worker) { w.Past.ForgetModels(w.KnownToServe) }

// Remember remembers a choice.
func (p *Pool) Remember(c *PastChoice) { p.Choices.Remember(c) }

// Past returns past choices.
func (p *Pool) Past(most int, request string, number uint64) []PastChoice {
	return p.Choices.Past(most, request, number)
}

// CountRetries counts n retries of attempts on a worker.
func (p *Pool) CountRetries(w *Worker, reason string, n int) { w.Past.Retried(reason, n) }

// CountUnfetched counts a prompt that a prefill worker computed and no decode worker got.
func (p *Pool) CountUnfetched(w *Worker) { w.Past.Unfetched() }

// CountSession counts a session that an engine was asked to open or close.
func (p *Pool) CountSession(action, outcome string) { observe.EngineSession(p.Name, action, outcome) }
