package observe

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
)

// Incidents logs conditions that last: one line when a condition begins, and one when it
// ends, however often it is met in between.
type Incidents struct {
	mu     sync.Mutex
	byName map[string]*incident
}

type incident struct {
	Begun, Last time.Time
	Times       int
	cause       error // the last one; nil if none was named
}

// incidentEnd is how long a condition must not be met to have ended.
const incidentEnd = time.Minute

// Raise records that a condition is met, and logs it if it begins. It ends when nothing
// has met it for incidentEnd. The callers use few names. The cause may be nil.
func (i *Incidents) Raise(now time.Time, name string, cause error, logger func() *zap.Logger) {
	if i.meet(now, name, cause) {
		logger().Warn("condition begins", zap.String("condition", name), zap.Error(cause))
	}
}

// meet records that a condition is met, and returns whether it begins.
func (i *Incidents) meet(now time.Time, name string, cause error) (begins bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	known := i.byName[name]
	if known == nil {
		if i.byName == nil {
			i.byName = make(map[string]*incident)
		}
		known = &incident{Begun: now}
		i.byName[name] = known
	}
	known.Last = now
	known.cause = cmp.Or(cause, known.cause)
	known.Times++
	return known.Times == 1
}

// Incident is a condition that lasts.
type Incident struct {
	What  string  `json:"what"`
	Begun float64 `json:"begun_seconds_ago"`
	Last  float64 `json:"last_met_seconds_ago"`
	Times int     `json:"times"`
	Error string  `json:"last_error,omitzero"`
	// Advice is what to do, as the manual says; the reader adds it.
	Advice string `json:"advice,omitzero"`
}

// Open returns the conditions that have not ended, the oldest first.
func (i *Incidents) Open(now time.Time) []Incident {
	i.mu.Lock()
	defer i.mu.Unlock()
	list := make([]Incident, 0, len(i.byName))
	for name, in := range i.byName {
		one := Incident{What: name, Begun: now.Sub(in.Begun).Seconds(), Last: now.Sub(in.Last).Seconds(), Times: in.Times}
		if in.cause != nil {
			one.Error = in.cause.Error()
		}
		list = append(list, one)
	}
	slices.SortFunc(list, func(a, b Incident) int { return cmp.Compare(b.Begun, a.Begun) })
	return list
}

// Warning is a condition, and what the operator can do about it.
type Warning struct {
	What   string `json:"what"`
	Effect string `json:"effect"`
	Advice string `json:"advice"`
}

// Replace records which conditions hold now. It logs those that begin, and those that have
// ended because they are not among them.
func (i *Incidents) Replace(now time.Time, list []Warning, logger *zap.Logger) {
	for _, w := range list {
		if i.meet(now, w.What, nil) {
			logger.Warn("condition begins", zap.String("condition", w.What), zap.String("effect", w.Effect), zap.String("advice", w.Advice))
		}
	}
	i.endIf(logger, func(name string, _ *incident) bool {
		return !slices.ContainsFunc(list, func(w Warning) bool { return w.What == name })
	})
}

// End logs and forgets the conditions that nothing has met for incidentEnd.
func (i *Incidents) End(now time.Time, logger *zap.Logger) {
	i.endIf(logger, func(_ string, in *incident) bool { return now.Sub(in.Last) >= incidentEnd })
}

func (i *Incidents) endIf(logger *zap.Logger, over func(string, *incident) bool) {
	ended := make(map[string]*incident)
	i.mu.Lock()
	for name, in := range i.byName {
		if over(name, in) {
			ended[name] = in
			delete(i.byName, name)
		}
	}
	i.mu.Unlock()
	for name, in := range ended {
		logger.Info("condition is over", zap.String("condition", name), zap.Int("times", in.Times), zap.Duration("lasted", in.Last.Sub(in.Begun)))
	}
}
