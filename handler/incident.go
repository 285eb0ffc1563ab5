package handler

import (
	"sync"
	"time"

	"go.uber.org/zap"
)

// incidents logs conditions that last: one line when a condition begins, and one when
// it is over, however often it was raised in between.
type incidents struct {
	mu   sync.Mutex
	open map[string]*incident
}

type incident struct {
	begun, last time.Time
	times       int
}

// incidentOver is the time after which a condition that was not raised is over.
const incidentOver = time.Minute

// met raises a condition, and logs it if it begins. There are few names.
func (i *incidents) met(now time.Time, name string, logger func() *zap.Logger) {
	i.mu.Lock()
	known := i.open[name]
	if known == nil {
		if i.open == nil {
			i.open = make(map[string]*incident)
		}
		i.open[name] = &incident{begun: now, last: now, times: 1}
	} else {
		known.last = now
		known.times++
	}
	i.mu.Unlock()
	if known == nil {
		logger().Warn(name + " begins; further ones are counted only")
	}
}

// lasting returns the conditions that last, by name.
func (i *incidents) lasting() map[string]incident {
	i.mu.Lock()
	defer i.mu.Unlock()
	list := make(map[string]incident, len(i.open))
	for name, in := range i.open {
		list[name] = *in
	}
	return list
}

// settle logs the conditions that are over, and forgets them.
func (i *incidents) settle(now time.Time, logger *zap.Logger) {
	over := make(map[string]*incident)
	i.mu.Lock()
	for name, in := range i.open {
		if now.Sub(in.last) >= incidentOver {
			over[name] = in
			delete(i.open, name)
		}
	}
	i.mu.Unlock()
	for name, in := range over {
		logger.Info(name+" is over", zap.Int("times", in.times), zap.Duration("lasted", in.last.Sub(in.begun)))
	}
}
