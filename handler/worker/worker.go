// Package worker is one worker: its health, capacity, models, ranks and roles, what is known of its
// engine, and the attempts that wait for it. It knows no pool, no configuration and no request.
package worker

import (
	"context"
	"iter"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/zeebo/xxh3"

	"github.com/caddyserver/caddy/v2"
)

// Worker is one engine process behind one dial address.
type Worker struct {
	// each choice reads these of all workers
	seen       atomic.Int64                    // last time that it was an upstream, Unix seconds
	list       atomic.Pointer[ModelList]       // its own models; nil if it has no list
	configured atomic.Pointer[map[string]bool] // the operator's list; nil if there is none
	*slots
	waking
	room room
	onDemand
	drains
	serves atomic.Uint32 // see serves
	Health Health
	Past   *observe.Worker

	Dial   string
	ID     uint64
	dp     atomic.Int32             // data-parallel ranks
	taints atomic.Pointer[[]string] // configured
	model  atomic.Pointer[string]   // configured: see ModelName

	engine     atomic.Pointer[engine.Engine]
	restarted  atomic.Int64 // when that was last noticed, in ticks; 0: it was not
	progress   progress
	probed     chan struct{} // closed after the first probe
	probedOnce sync.Once     // closes probed
	derenders  chan struct{} // full while the engine derenders
	speculates atomic.Int32  // number of speculative prefills

	// what discovery finds out
	probing
	loadReports
	subscription
	reports sync.Map // the ReportKinds of which an answer has said what was cached
	check   eventsCheck
	Warned  observe.Incidents // what its engine is warned of
}

// See records that the worker is an upstream, at a time in Unix seconds.
func (w *Worker) See(second int64) {
	if w.seen.Load() != second { // all processors share what is only read
		w.seen.Store(second)
	}
}

// Seen returns when the worker was last an upstream, in Unix seconds.
func (w *Worker) Seen() int64 { return w.seen.Load() }

// Derender waits until the engine may derender: one call at a time, and half of the time. It takes
// the CPU that the engine's other streams need. Call done after the call.
func (w *Worker) Derender(ctx context.Context) (done func(), err error) {
	select {
	case w.derenders <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	begun := time.Now()
	return func() { time.AfterFunc(min(time.Since(begun), time.Second), func() { <-w.derenders }) }, nil
}

// maxSpeculative is how many speculative prefills a worker has at a time.
const maxSpeculative = 2

// Speculate registers a speculative prefill, until the caller calls end. ok is false if there are
// too many.
func (w *Worker) Speculate() (end func(), ok bool) {
	end = func() { w.speculates.Add(-1) }
	if w.speculates.Add(1) > maxSpeculative {
		end()
		return nil, false
	}
	return end, true
}

// Speculating returns how many speculative prefills the worker has.
func (w *Worker) Speculating() int { return int(w.speculates.Load()) }

// DerivedID returns the default id of the worker at an address. Its 53 bits survive
// clients that read JSON numbers as floats.
func DerivedID(dial string) uint64 {
	return xxh3.HashString(dial) >> 11
}

// Tainted returns the taints that the operator configured for the worker.
func (w *Worker) Tainted() []string { return *w.taints.Load() }

// ModelName returns the name of the model in requests to the worker; empty if it is the same as elsewhere.
func (w *Worker) ModelName() string { return *w.model.Load() }

// MarkProbed records the end of a probe.
func (w *Worker) MarkProbed() { w.probedOnce.Do(func() { close(w.probed) }) }

// AwaitProbes waits for the first probes of workers, for so long at most.
func AwaitProbes(ctx context.Context, within time.Duration, workers []*Worker) {
	timeout := time.After(within)
	for _, w := range workers {
		select {
		case <-w.probed:
		case <-timeout:
			return
		case <-ctx.Done():
			return
		}
	}
}

// WasProbed returns whether a probe of the worker has ended.
func (w *Worker) WasProbed() bool {
	select {
	case <-w.probed:
		return true
	default:
		return false
	}
}

// Ranks returns how many data-parallel ranks the worker has. Each is a target with a KV
// cache of its own.
func (w *Worker) Ranks() int { return max(1, int(w.dp.Load())) }

// Target returns one of the worker's targets.
func (w *Worker) Target(rank int) kvscore.Target {
	return kvscore.Target{Worker: w.ID, Rank: uint32(rank)}
}

// SetRanks records how many ranks the worker has, and returns how many it had.
func (w *Worker) SetRanks(n int) (before int) {
	before = w.Ranks()
	w.dp.Store(int32(n))
	return before
}

// Host returns the host of the worker's address, or all of the address of a Unix socket.
func (w *Worker) Host() string {
	if network, host, _, err := caddy.SplitNetworkAddress(w.Dial); err == nil && !caddy.IsUnixNetwork(network) {
		return host
	}
	return w.Dial
}

// Engine returns what is known of the worker's engine: type, info and settings. The caller
// must not change it.
func (w *Worker) Engine() *engine.Engine { return w.engine.Load() }

// IsShort returns whether the worker probably has no room for a prompt and its answer, in tokens. 0 is
// unknown.
func (w *Worker) IsShort(prompt, answer int64) bool {
	most := w.room.tokens.Load()
	if most == 0 || prompt == 0 {
		return false
	}
	return prompt > most || prompt+answer > most && !w.room.alone.Load()
}

// IsLonger returns whether the worker may have room for more tokens.
func (w *Worker) IsLonger(than int64) bool {
	most := w.room.tokens.Load()
	return most == 0 || most > than
}

// Room returns the most tokens that a request may have on the worker, 0 if that is unknown.
func (w *Worker) Room() int64 { return w.room.tokens.Load() }

// TakesRequests returns whether the worker is neither marked down, hung nor draining.
func (w *Worker) TakesRequests(t time.Time) bool { return !w.Draining() && w.Health.Available(t) }

// room is how long a request may be on a worker: see [engine.Engine.Room].
type room struct {
	tokens atomic.Int64
	alone  atomic.Bool
}

// AttemptKind is a kind of attempt, by what its worker sends.
type AttemptKind uint8

const (
	KindOther  AttemptKind = iota // no inference: an engine's server may answer while its core hangs
	KindStream                    // tokens as the engine computes them
	KindPlain                     // nothing before the end, or it is not known
)

// Attempt is a try on a worker, as the worker sees it.
type Attempt struct {
	Worker *Worker
	Rank   uint32
	Begun  time.Time
	Kind   AttemptKind
	Ahead  int64 // prefill tokens before the first token, with the attempt's own

	entered bool        // it counts in the worker's progress
	trial   bool        // it counts in the worker's health
	ticket  uint64      // of Health.Admit
	waiting atomic.Bool // for the worker, and not for the client

	move atomic.Pointer[Move]   // nil if no other worker may serve the request, or its rest
	end  atomic.Pointer[func()] // nil if the attempt must not be ended
}

// Move is how an attempt moves to another worker. The ordinary retry, or the stream that goes on,
// selects the other worker.
type Move struct {
	Cancel func(drained bool)                  // the worker drains, and does not hang
	To     func(t time.Time) iter.Seq[*Worker] // the workers that could serve it
}

// progress is the output of a worker, and the attempts that wait for it.
type progress struct {
	lastOutput atomic.Int64 // when the last byte of an inference came, in ticks
	lastAnswer atomic.Int64 // when it last answered a question of the router's own, in ticks
	hungSince  atomic.Int64 // when the worker was found hung, in ticks; 0 if it is not

	mu       sync.Mutex
	attempts map[*Attempt]struct{} // but none of KindOther
}

// New returns a worker of a pool, which need not know it.
func New(pool string, set Settings) *Worker {
	w := &Worker{
		Dial: set.Dial, ID: set.ID, Past: observe.NewWorker(pool, set.Dial), slots: new(slots), probed: make(chan struct{}),
		derenders: make(chan struct{}, 1),
	}
	w.Describe(set, engine.Info{})
	w.dp.Store(int32(set.DPSize))
	w.LimitSlots(set)
	w.See(time.Now().Unix())
	w.Configure(set)
	return w
}

// Succeed takes over the requests and the drain of the worker that was at the same address with another
// id.
func (w *Worker) Succeed(old *Worker) {
	w.slots = old.slots // the address still runs its requests
	if asked, _ := old.DrainAsked(); asked {
		w.drains.set(drainAsked, true) // the operator drained the address
	}
}

// Describe stores what is known of the worker's engine. Its type is the configured one, or
// else the one that it shows. changed: the worker serves other parts of requests than before,
// or pairs with other workers.
func (w *Worker) Describe(set Settings, info engine.Info) (changed bool) {
	e := engine.Engine{Type: info.Type, Info: info, Settings: engine.Settings{
		Priority: engine.Switch(set.Priority), ThinkingBudget: engine.Switch(set.ThinkingBudget),
		CacheSalt: engine.Switch(set.CacheSalt), Sessions: engine.Switch(set.Sessions), DynamoInstance: set.DynamoInstanceID,
		Role: engine.Role(set.Role), MooncakePort: set.MooncakePort,
	}}
	switch {
	case set.IsBackup(): // nobody has asked it
		e.Type = engine.Other
	case set.Engine != EngineAuto:
		e.Type = set.Engine
	}
	old := w.engine.Swap(&e)
	w.drains.set(drainAsleep, info.Asleep)
	w.findOnDemand()
	tokens, alone := e.Room()
	w.room.tokens.Store(tokens)
	w.room.alone.Store(alone)
	now := uint32(servedBy(&e))
	changed = w.serves.Swap(now) != now
	return changed || (w.IsPrefill() || w.IsDecode()) && !e.Alike(old)
}

// Configure stores the worker's settings.
func (w *Worker) Configure(set Settings) {
	w.drains.set(drainConfigured, set.Drain != nil && *set.Drain)
	w.waking.may.Store(set.Wake != nil && *set.Wake)
	w.taints.Store(&set.Taints)
	w.model.Store(&set.Model)
	if len(set.Models) == 0 {
		w.configured.Store(nil)
		return
	}
	models := make(map[string]bool, len(set.Models))
	for _, m := range set.Models {
		models[m] = true
	}
	w.configured.Store(&models)
}

// LimitSlots applies the worker's limit, as configured or as its engine reports it. The
// engine reports the limit of one rank.
func (w *Worker) LimitSlots(set Settings) {
	limit := int64(set.MaxRunning)
	if set.MaxRunning == LimitAuto {
		info, ranks := &w.Engine().Info, w.Ranks()
		if ranks == 1 { // the engine may have ranks that the router does not choose
			ranks = max(1, info.DPSize)
		}
		limit = int64(info.MaxRunning) * int64(ranks)
	}
	w.slots.limit.Store(limit)
}

// Part is a part of a request that a worker serves.
type Part uint8

// The parts.
const (
	Any     Part = iota // of a request that computes no prompt: any worker can serve it
	Whole               // all of it
	Answer              // all of it, or only the answer to a prompt that another worker computes
	Prefill             // only its prompt
)

// IsPrefill and IsDecode return whether the worker is for one part of requests.
func (w *Worker) IsPrefill() bool { return serves(w.serves.Load())&forPrefill != 0 }
func (w *Worker) IsDecode() bool  { return serves(w.serves.Load())&forDecode != 0 }

// IsBackup returns whether the worker serves only what no other one can.
func (w *Worker) IsBackup() bool { return serves(w.serves.Load())&forBackup != 0 }

// ServesWhole returns whether the worker can serve a whole request.
func (w *Worker) ServesWhole() bool { return serves(w.serves.Load())&onlyPhases == 0 }

// ServesPart returns whether the worker serves a part of requests. fallback: it is for prefills, but can
// serve a whole request.
func (w *Worker) ServesPart(part Part) (yes, fallback bool) {
	s := serves(w.serves.Load())
	switch {
	case s&forBackup != 0:
		return part != Prefill, false
	case part == Any:
	case part == Prefill:
		return s&forPrefill != 0 && s&holdsOn == 0, false
	case part == Answer && s&forDecode != 0:
	case s&onlyPhases != 0:
		return false, false
	case s&forPrefill != 0:
		return true, true
	}
	return true, false
}

// serves are the parts that a worker serves, as bits of Worker.serves: what role it has, and
// whether its engine can serve whole requests.
type serves uint32

const (
	forPrefill serves = 1 << iota
	forDecode
	onlyPhases // no whole requests
	holdsOn    // it is for prefills, and cannot hand them over now
	forBackup
)

func servedBy(e *engine.Engine) (s serves) {
	switch e.Role() {
	case engine.RolePrefill:
		if s = forPrefill; !e.HandsOver() {
			s |= holdsOn
		}
	case engine.RoleDecode:
		s = forDecode
	case engine.RoleBackup:
		s = forBackup
	case engine.RoleBoth:
	}
	if !e.ServesWhole() {
		s |= onlyPhases
	}
	return s
}
