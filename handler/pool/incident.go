package pool

import (
	"sync"
	"time"

	"go.uber.org/zap"
)

// Incidents logs conditions that last: one line when a condition begins, and one when
// it is over, however often it was raised in between.
type Incidents struct {
	mu   sync.Mutex
	open map[string]*incident
}

type incident struct {
	Begun, Last time.Time
	Times       int
}

// incidentOver is the time after which a condition that was not raised is over.
const incidentOver = time.Minute

// Raise raises a condition, and logs it if it begins. There are few names.
func (i *Incidents) Raise(now time.Time, name string, logger func() *zap.Logger) {
	i.mu.Lock()
	known := i.open[name]
	if known == nil {
		if i.open == nil {
			i.open = make(map[string]*incident)
		}
		i.open[name] = &incident{Begun: now, Last: now, Times: 1}
	} else {
		known.Last = now
		known.Times++
	}
	i.mu.Unlock()
	if known == nil {
		logger().Warn(name + " begins; further ones are counted only")
	}
}

// Lasting returns the conditions that last, by name.
func (i *Incidents) Lasting() map[string]incident {
	i.mu.Lock()
	defer i.mu.Unlock()
	list := make(map[string]incident, len(i.open))
	for name, in := range i.open {
		list[name] = *in
	}
	return list
}

// settle logs the conditions that are over, and forgets them.
func (i *Incidents) settle(now time.Time, logger *zap.Logger) {
	over := make(map[string]*incident)
	i.mu.Lock()
	for name, in := range i.open {
		if now.Sub(in.Last) >= incidentOver {
			over[name] = in
			delete(i.open, name)
		}
	}
	i.mu.Unlock()
	for name, in := range over {
		logger.Info(name+" is over", zap.Int("times", in.Times), zap.Duration("lasted", in.Last.Sub(in.Begun)))
	}
}
