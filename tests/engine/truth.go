package engine

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine/cache"
	"github.com/caddy-kvrouter/kvrouter/tests/engine/publisher"
)

// EventState is what a rank's tiers hold, and how far its events are.
type EventState struct {
	publisher.Status
	// Unpublished is how many events have no batch yet: those of the step under way, or
	// a clear that waits for the next step.
	Unpublished int `json:"unpublished"`
	// DeviceBlocks and HostBlocks are how many different blocks can be found.
	DeviceBlocks int `json:"device_blocks"`
	HostBlocks   int `json:"host_blocks"`
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
	return EventState{
		Status: k.changes.pub.Status(), Unpublished: len(k.changes.events),
		DeviceBlocks: k.cache.Findable(), HostBlocks: k.cache.FindableInHost(),
	}
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
	// LoseBatches keeps them from replays, too.
	LoseBatches EventFaultKind = "lose"
	// DelayBatches has each batch wait for DelayMS, one after another.
	DelayBatches EventFaultKind = "delay"
	// Disconnect closes the connections of the PUB socket, once.
	Disconnect EventFaultKind = "disconnect"
	// Wrap leaves Count batches in the buffer for replays, once.
	Wrap EventFaultKind = "wrap"
	// MuteReplay answers no request for a replay.
	MuteReplay EventFaultKind = "mute_replay"
)

// EventFault says how the events of an engine fail. It adds to those before it.
type EventFault struct {
	Kind EventFaultKind `json:"kind"`
	// Rank is the rank whose events fail. Default: all.
	Rank *int `json:"rank,omitempty"`
	// Count is a number of batches. Default: 1; 0 for Wrap.
	Count int `json:"count,omitempty"`
	// DelayMS is in milliseconds of real time.
	DelayMS float64 `json:"delay_ms,omitempty"`
}

// SetEventFault makes the events of the present life fail. An error says that f makes
// no sense or that there are no events; then nothing has changed.
func (e *Engine) SetEventFault(f EventFault) error {
	l := e.enter()
	if l == nil {
		return errors.New("engine is killed")
	}
	defer l.handlers.Done()
	switch {
	case e.cfg.Events == nil:
		return errors.New("engine publishes no KV events")
	case f.Rank != nil && (*f.Rank < 0 || *f.Rank >= len(l.ranks)):
		return fmt.Errorf("event fault for rank %d of %d", *f.Rank, len(l.ranks))
	case f.Count < 0 || f.DelayMS < 0:
		return fmt.Errorf("event fault with a negative number: %+v", f)
	}
	apply := f.applied()
	if apply == nil {
		return fmt.Errorf("unknown event fault %q", f.Kind)
	}
	for i, k := range l.ranks {
		if f.Rank == nil || *f.Rank == i {
			apply(k.changes.pub)
		}
	}
	return nil
}

// applied returns what a fault does to a publisher; nil for an unknown one.
func (f EventFault) applied() func(*publisher.Publisher) {
	count := max(1, f.Count)
	switch f.Kind {
	case NoEventFault:
		return func(p *publisher.Publisher) { p.Drop(0); p.Lose(0); p.Delay(0); p.Mute(false) }
	case DropBatches:
		return func(p *publisher.Publisher) { p.Drop(count) }
	case LoseBatches:
		return func(p *publisher.Publisher) { p.Lose(count) }
	case DelayBatches:
		return func(p *publisher.Publisher) { p.Delay(time.Duration(f.DelayMS * float64(time.Millisecond))) }
	case Disconnect:
		return (*publisher.Publisher).Disconnect
	case Wrap:
		return func(p *publisher.Publisher) { p.Forget(f.Count) }
	case MuteReplay:
		return func(p *publisher.Publisher) { p.Mute(true) }
	}
	return nil
}

// controlEvents answers with the state of each rank.
func (e *Engine) controlEvents(w http.ResponseWriter, _ *http.Request) {
	control(w, http.StatusOK, map[string]any{"ranks": e.Events()})
}

func (e *Engine) controlEventFault(w http.ResponseWriter, r *http.Request) {
	var f EventFault
	if err := decodeControl(w, r, &f, 1<<16); err != nil {
		controlError(w, http.StatusBadRequest, err)
		return
	}
	if err := e.SetEventFault(f); err != nil {
		controlError(w, http.StatusBadRequest, err)
		return
	}
	e.controlEvents(w, r)
}

func (e *Engine) controlHolds(w http.ResponseWriter, r *http.Request) {
	var of struct {
		Rank   int      `json:"rank"`
		Tokens []uint32 `json:"tokens"`
		LoRA   string   `json:"lora"`
		Salt   string   `json:"salt"`
	}
	if err := decodeControl(w, r, &of, maxBody); err != nil {
		controlError(w, http.StatusBadRequest, err)
		return
	}
	device, host := e.Holds(of.Rank, of.Tokens, of.LoRA, of.Salt)
	control(w, http.StatusOK, map[string]int{"device": device, "host": host})
}
