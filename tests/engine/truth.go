package engine

import (
	"errors"
	"fmt"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine/cache"
	"github.com/caddy-kvrouter/kvrouter/tests/engine/publisher"
)

// EventState is how far a rank's events are.
type EventState struct {
	publisher.Status
	// Unpublished is how many events have no batch yet: those of the step under way, or
	// a clear that waits for the next step.
	Unpublished int `json:"unpublished"`
	// Endpoint and Replay are as with EventEndpoints.
	Endpoint string `json:"endpoint"`
	Replay   string `json:"replay,omitempty"`
}

// Quiet returns whether all that changed was sent.
func (s EventState) Quiet() bool { return s.Unpublished == 0 && s.Pending == 0 && s.Unsent == 0 }

// Events returns the state of each rank; none while the engine is killed, or if it
// publishes no events.
func (e *Engine) Events() []EventState {
	l := e.enter()
	if l == nil {
		return nil
	}
	defer l.handlers.Done()
	var out []EventState
	for i, k := range l.ranks {
		if k.changes == nil {
			return nil
		}
		s := k.eventState()
		s.Endpoint, s.Replay = e.EventEndpoints(i)
		out = append(out, s)
	}
	return out
}

func (k *rank) eventState() EventState {
	k.mu.Lock()
	defer k.mu.Unlock()
	return EventState{Status: k.changes.pub.Status(), Unpublished: len(k.changes.events)}
}

// Holds returns how many leading full blocks of a prompt a rank's cache holds now, and
// how many behind them its host memory holds. Unlike in a hit, the last token counts.
// Holds returns 0 while the engine is killed.
func (e *Engine) Holds(rank int, tokens []uint32, adapter, salt string) (device, host int) {
	l := e.enter()
	if l == nil {
		return 0, 0
	}
	defer l.handlers.Done()
	if rank < 0 || rank >= len(l.ranks) {
		return 0, 0
	}
	p := cache.NewPrompt(cache.Root{Model: e.cfg.Model, LoRA: adapter, Salt: salt}, tokens, e.cfg.BlockSize)
	k := l.ranks[rank]
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.cache.Holds(p)
}

// EventFaultKind is a way in which events fail.
type EventFaultKind string

const (
	// NoEventFault ends all that goes on.
	NoEventFault EventFaultKind = ""
	// DropBatches keeps the next Count batches from subscribers. Replays have them.
	DropBatches EventFaultKind = "drop"
	// DelayBatches has each batch wait for DelayMS, one after another.
	DelayBatches EventFaultKind = "delay"
	// Disconnect closes the connections of the PUB socket, once.
	Disconnect EventFaultKind = "disconnect"
)

// EventFault says how the events of all ranks fail. It adds to those before it.
type EventFault struct {
	Kind EventFaultKind
	// Count is a number of batches. Default: 1.
	Count int
	// DelayMS is in milliseconds of real time.
	DelayMS float64
}

// SetEventFault makes the events of the present life fail.
func (e *Engine) SetEventFault(f EventFault) error {
	l := e.enter()
	if l == nil || e.cfg.Events == nil {
		return errors.New("the engine is killed, or publishes no KV events")
	}
	defer l.handlers.Done()
	for _, k := range l.ranks {
		p := k.changes.pub
		switch f.Kind {
		case NoEventFault:
			p.Drop(0)
			p.Delay(0)
		case DropBatches:
			p.Drop(max(1, f.Count))
		case DelayBatches:
			p.Delay(time.Duration(f.DelayMS * float64(time.Millisecond)))
		case Disconnect:
			p.Disconnect()
		default:
			return fmt.Errorf("unknown event fault %q", f.Kind)
		}
	}
	return nil
}
