// Package worker is one worker: its health, capacity, models, ranks and roles, what is known of its
// engine, and the attempts that wait for it. It knows no pool, no configuration and no request.
package worker

import (
	"context"
	"iter"
	"slices"
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
	seen  atomic.Int64              // last time that it was an upstream, Unix seconds
	list  atomic.Pointer[ModelList] // its own models; nil if it has no list
	known atomic.Pointer[known]
	*slots
	waking
	drains
	Health Health
	Past   *observe.Worker

	Dial string
	ID   uint64
	dp   atomic.Int32 // data-parallel ranks

	restarted  atomic.Int64           // when that was last noticed, in ticks; 0: it was not
	requested  atomic.Pointer[string] // the model of the last request, if it loads models on demand
	progress   progress
	probed     context.Context // ends with the first probe
	MarkProbed context.CancelFunc
	derenders  chan struct{} // full while the engine derenders
	speculates atomic.Int32  // number of speculative prefills

	// what discovery finds out
	probing
	loadReports
	subscription
	reports sync.Map          // the ReportKinds of which an answer has said what was cached
	Warned  observe.Incidents // what its engine is warned of
}

// known is what is known of a worker: what the operator has set, and what its engine reports.
type known struct {
	serves serves
	tokens int64 // the most of a request, 0 if that is unknown: see [engine.Engine.Room]
	alone  bool  // they are the prompt's alone
	one    bool  // its engine has one base model for its life
	engine engine.Engine
	set    Settings
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

// Settings returns the operator's settings. The caller must not change them.
func (w *Worker) Settings() *Settings { return &w.known.Load().set }

// Tainted returns the taints that the operator configured for the worker.
func (w *Worker) Tainted() []string { return w.Settings().Taints }

// ModelName returns the name of the model in requests to the worker; empty if it is the same as elsewhere.
func (w *Worker) ModelName() string { return w.Settings().Model }

// Wakes returns whether a request may wake the engine.
func (w *Worker) Wakes() bool {
	wake := w.Settings().Wake
	return wake != nil && *wake
}

// AwaitProbes waits for the first probes of workers, for so long at most.
func AwaitProbes(ctx context.Context, within time.Duration, workers []*Worker) {
	timeout := time.After(within)
	for _, w := range workers {
		select {
		case <-w.probed.Done():
		case <-timeout:
			return
		case <-ctx.Done():
			return
		}
	}
}

// WasProbed returns whether a probe of the worker has ended.
func (w *Worker) WasProbed() bool { return w.probed.Err() != nil }

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
func (w *Worker) Engine() *engine.Engine { return &w.known.Load().engine }

// IsShort returns whether the worker probably has no room for a prompt and its answer, in tokens. 0 is
// unknown.
func (w *Worker) IsShort(prompt, answer int64) bool {
	k := w.known.Load()
	if k.tokens == 0 || prompt == 0 {
		return false
	}
	return prompt > k.tokens || prompt+answer > k.tokens && !k.alone
}

// IsLonger returns whether the worker may have room for more tokens.
func (w *Worker) IsLonger(than int64) bool { return w.Room() == 0 || w.Room() > than }

// Room returns the most tokens that a request may have on the worker, 0 if that is unknown.
func (w *Worker) Room() int64 { return w.known.Load().tokens }

// TakesRequests returns whether the worker is neither marked down, hung nor draining.
func (w *Worker) TakesRequests(t time.Time) bool { return !w.Draining() && w.Health.Available(t) }

// IsFull returns whether no slot is free. An engine that sleeps has none.
func (w *Worker) IsFull() bool { return w.Asleep() || w.FreeSlots() <= 0 }

// TakeSlot takes a slot. It returns false if none is free.
func (w *Worker) TakeSlot() bool { return !w.Asleep() && w.slots.TakeSlot() }

// Connected records that the router could connect to the worker.
func (w *Worker) Connected(t time.Time) {
	if previous := w.Health.Connected(t); previous == Refusing || previous == Unreachable {
		w.AskSoon()
	}
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
	suspected  int          // checks in a row that found the worker hung; CheckSilence alone uses it

	mu       sync.Mutex
	attempts map[*Attempt]struct{} // but none of KindOther
}

// New returns a worker of a pool, which need not know it.
func New(pool string, set Settings) *Worker {
	w := &Worker{
		Dial: set.Dial, ID: set.ID, Past: observe.NewWorker(pool, set.Dial), slots: new(slots), derenders: make(chan struct{}, 1),
	}
	w.probed, w.MarkProbed = context.WithCancel(context.Background()) //nolint:gosec // the first probe ends it
	w.know(set, engine.Info{})
	w.dp.Store(int32(set.DPSize))
	w.LimitSlots(set.MaxRunning)
	w.See(time.Now().Unix())
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

// Configure stores the worker's settings. changed: the worker serves other parts of requests than
// before, or pairs with other workers. One goroutine at a time may call it, or Learn.
func (w *Worker) Configure(set Settings) (changed bool) { return w.know(set, w.Engine().Info) }

// Learn stores what the worker's engine reports. See Configure.
func (w *Worker) Learn(info engine.Info) (changed bool) { return w.know(*w.Settings(), info) }

// know stores what is known of the worker. The engine's type is the configured one, or else the one that
// it shows.
func (w *Worker) know(set Settings, info engine.Info) (changed bool) {
	k := &known{set: set, engine: engine.Engine{Type: info.Type, Info: info, Settings: engine.Settings{
		Priority: engine.Switch(set.Priority), ThinkingBudget: engine.Switch(set.ThinkingBudget),
		CacheSalt: engine.Switch(set.CacheSalt), Sessions: engine.Switch(set.Sessions), DynamoInstance: set.DynamoInstanceID,
		Role: engine.Role(set.Role), MooncakePort: set.MooncakePort,
	}}}
	e := &k.engine
	switch {
	case set.IsBackup(): // nobody has asked it
		e.Type = engine.Other
	case set.Engine != EngineAuto:
		e.Type = set.Engine
	}
	k.serves = servedBy(e)
	k.tokens, k.alone = e.Room()
	k.one = slices.Contains([]string{engine.VLLM, engine.SGLang, engine.TRTLLM, engine.Dynamo}, e.Type)
	w.drains.set(drainConfigured, set.Drain != nil && *set.Drain)
	w.drains.set(drainAsleep, info.Asleep)
	old := w.known.Swap(k)
	return old != nil && (old.serves != k.serves || k.serves&(forPrefill|forDecode) != 0 && !e.Alike(&old.engine))
}

// LimitSlots applies the worker's limit, as configured or as its engine reports it. The
// engine reports the limit of one rank.
func (w *Worker) LimitSlots(most RequestLimit) {
	limit := int64(most)
	if most == LimitAuto {
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
func (w *Worker) IsPrefill() bool { return w.known.Load().serves&forPrefill != 0 }
func (w *Worker) IsDecode() bool  { return w.known.Load().serves&forDecode != 0 }

// IsBackup returns whether the worker serves only what no other one can.
func (w *Worker) IsBackup() bool { return w.known.Load().serves&forBackup != 0 }

// ServesWhole returns whether the worker can serve a whole request.
func (w *Worker) ServesWhole() bool { return w.known.Load().serves&onlyPhases == 0 }

// ServesPart returns whether the worker serves a part of requests. fallback: it is for prefills, but can
// serve a whole request.
func (w *Worker) ServesPart(part Part) (yes, fallback bool) {
	s := w.known.Load().serves
	switch {
	case s&forBackup != 0:
		return part != Prefill, false
	case part == Any:
	case part == Prefill:
		return s&forPrefill != 0 && s&noTransfer == 0, false
	case part == Answer && s&forDecode != 0:
	case s&onlyPhases != 0:
		return false, false
	case s&forPrefill != 0:
		return true, true
	}
	return true, false
}

// serves are the parts that a worker serves, as bits: what role it has, and whether its engine can
// serve whole requests.
type serves uint8

const (
	forPrefill serves = 1 << iota
	forDecode
	onlyPhases // no whole requests
	noTransfer // it is for prefills, and cannot transfer them now
	forBackup
)

func servedBy(e *engine.Engine) (s serves) {
	switch e.Role() {
	case engine.RolePrefill:
		if s = forPrefill; !e.CanTransfer() {
			s |= noTransfer
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
