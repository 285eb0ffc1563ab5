package pool

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

const (
	// ProbeEvery is the time between two probes of a worker. A probe asks for its models,
	// or at least connects to it.
	ProbeEvery = 4 * time.Second
	// askedAgain is the time between two questions to a worker about its engine.
	askedAgain = 15 * time.Second
	// askedLess is the longest such time, for a worker that does not answer.
	askedLess = 5 * time.Minute
	// idleAfter is the time without requests after which a pool is idle. Its workers may
	// sleep or cost money, so discovery asks them as rarely as silent ones.
	idleAfter = 10 * time.Minute
	// sharedWithin is the time in which two changes of start mean a shared address.
	sharedWithin = time.Minute

	incidentShared = "several engines answer at one address"
)

// engineState is what the engine behind a worker's address reports of itself.
type engineState struct {
	info atomic.Pointer[engine.Info] // nil: nothing so far

	mu      sync.Mutex
	next    time.Time // when discovery asks the engine again
	silent  int       // questions in a row without an answer
	start   string    // what the engine last reported of its start
	changed time.Time // when that last changed

	reviewing sync.Mutex // for ReviewEngine
	warned    Incidents
	uncounted atomic.Int32 // see CountedCache
}

// Info returns what the engine reported last; the zero Info if nothing.
func (e *engineState) Info() engine.Info {
	if info := e.info.Load(); info != nil {
		return *info
	}
	return engine.Info{}
}

// AskAgain makes the next probe of the worker ask the engine.
func (e *engineState) AskAgain() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.next = time.Time{}
}

// Claim returns whether the engine must be asked now. The caller then asks it. Other
// callers get false meanwhile.
func (e *engineState) Claim(t time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if t.Before(e.next) {
		return false
	}
	e.next = t.Add(ProbeEvery)
	return true
}

// IsSilent returns whether the engine left the last two questions unanswered.
func (e *engineState) IsSilent() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.silent > 1
}

// answered records whether the engine answered a question. Discovery asks a silent engine
// less and less often.
func (e *engineState) answered(t time.Time, did bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if did {
		e.silent, e.next = 0, t.Add(askedAgain)
		return
	}
	e.next = t.Add(min(ProbeEvery<<min(e.silent, 8), askedLess))
	e.silent++
}

// restarted records what the engine reports of its start. It returns whether that changed,
// and whether it changed twice within sharedWithin.
func (e *engineState) restarted(t time.Time, start string) (changed, shared bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if start == "" || start == e.start {
		return false, false
	}
	changed = e.start != ""
	e.start = start
	if changed {
		shared = t.Sub(e.changed) < sharedWithin
		e.changed = t
	}
	return changed, shared
}

// life returns what the engine last reported of its start.
func (e *engineState) life() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.start
}

// recall records the start that the engine reported to an earlier run. It returns false if
// the engine has reported another one since.
func (e *engineState) recall(start string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.start == "" {
		e.start = start
	}
	return start == "" || e.start == start
}

// EngineOf returns a worker's engine: type, info and settings.
func (p *Pool) EngineOf(w *Worker) engine.Engine {
	set := p.Settings.Load().Worker(w.Dial)
	return set.describe(w.Engine.Info())
}

// describe returns the worker's engine. Its type is the configured one, or else the one
// that it shows.
func (w *WorkerSettings) describe(info engine.Info) engine.Engine {
	e := engine.Engine{Type: info.Type, Info: info, Settings: engine.Settings{
		Priority: engine.Switch(w.Priority), ThinkingBudget: engine.Switch(w.ThinkingBudget),
		CacheSalt: engine.Switch(w.CacheSalt), Sessions: engine.Switch(w.Sessions), DynamoInstance: w.DynamoInstanceID,
	}}
	if w.Engine != EngineAuto {
		e.Type = w.Engine
	}
	return e
}

// Learn records the info that a worker's engine reports. An info without a type, or with
// an unsure one, changes nothing once the type is known.
func (p *Pool) Learn(w *Worker, info engine.Info) {
	t, before := time.Now(), w.Engine.Info()
	w.Engine.answered(t, engine.Shows(info.Type))
	if (info.Type == "" || info.Unsure) && before.Type != "" {
		return
	}
	info.Unsure = false
	info = info.Or(before)
	if !p.setInfo(w, &info) {
		return
	}
	p.queue.reviewAll() // the worker's limit may have changed
	if logged(info) != logged(before) {
		p.Logger().Info("worker reports its engine", zap.String("upstream", w.Dial), zap.Object("engine", infoFields(info)))
	}
	switch changed, shared := w.Engine.restarted(t, info.Life); {
	case shared:
		p.Incidents.Raise(t, incidentShared, p.Logger)
	case changed, before.Type != "" && info.Type != before.Type:
		p.clear(w, clearedRestarted)
	}
}

// setInfo stores an engine's info. It returns false if the pool has replaced the worker.
func (p *Pool) setInfo(w *Worker, info *engine.Info) bool {
	p.members.mu.Lock()
	defer p.members.mu.Unlock()
	if p.workers[w.Dial] != w {
		return false
	}
	w.Engine.info.Store(info)
	set := p.Settings.Load().Worker(w.Dial)
	p.declareRanks(w, set)
	if set.MaxRunning == LimitAuto {
		w.limitSlots(set)
	}
	return true
}

// isIdle returns whether the pool is idle.
func (p *Pool) isIdle(t time.Time) bool {
	return t.Unix()-max(p.lastRequest.Load(), p.ServingSince.Load()) > int64(idleAfter/time.Second)
}

// ModelsInterval returns the least time between two questions to a worker about its models.
func (p *Pool) ModelsInterval(w *Worker) time.Duration {
	if p.isIdle(time.Now()) {
		return askedLess
	}
	if n := w.Refusals.Load(); n > 0 {
		return min(ProbeEvery<<min(n, 8), askedLess)
	}
	return 0
}

// logged returns the parts of an engine's info that are logged when they change. A
// restart has a log line of its own.
func logged(info engine.Info) engine.Info {
	info.Started, info.Life = time.Time{}, ""
	return info
}

// infoFields logs an engine's info without what is unknown.
type infoFields engine.Info

// MarshalLogObject implements zapcore.ObjectMarshaler.
func (f infoFields) MarshalLogObject(e zapcore.ObjectEncoder) error {
	add := func(name string, n int64) {
		if n != 0 {
			e.AddInt64(name, n)
		}
	}
	e.AddString("type", f.Type)
	if f.Version != "" {
		e.AddString("version", f.Version)
	}
	add("kv_tokens", f.KVTokens)
	add("block_size", int64(f.BlockSize))
	add("dp_size", int64(f.DPSize))
	add("context_tokens", f.ContextTokens)
	add("max_running", int64(f.MaxRunning))
	if f.Priority {
		e.AddBool("priority_scheduling", true)
	}
	return nil
}

// Contradictions returns the options that an engine's info contradicts, and how.
func (s *Settings) Contradictions(set WorkerSettings, info engine.Info) map[string]string {
	list := make(map[string]string)
	differ := func(what string, configured, actual int64) {
		if configured > 0 && actual > 0 && configured != actual {
			list[what] = fmt.Sprintf("%s: configured %d, the engine reports %d", what, configured, actual)
		}
	}
	if off := set.KVTokens - info.KVTokens; off*20 > info.KVTokens || -off*20 > info.KVTokens { // engines round it
		differ("kv_tokens", set.KVTokens, info.KVTokens)
	}
	differ("dp_size", int64(set.DPSize), int64(info.DPSize))
	if !s.BlockSizeUnset && info.BlockSize > 0 && s.BlockSize%info.BlockSize != 0 {
		list["block_size"] = fmt.Sprintf("index block_size: configured %d, the engine reports %d", s.BlockSize, info.BlockSize)
	}
	if s.BlockSizeUnset && info.BlockSize > maxAdopted {
		list["block_size"] = fmt.Sprintf("index block_size: %d, because the engine's blocks of %d tokens are too large for the index", s.BlockSize, info.BlockSize)
	}
	if engine.Shows(set.Engine) && engine.Shows(info.Type) && info.Type != set.Engine {
		list["engine"] = fmt.Sprintf("engine: configured %s, the engine is %s", set.Engine, info.Type)
	}
	if e := set.describe(info); set.DPSize > 1 && !e.TakesRank() {
		list["dp_size"] = fmt.Sprintf("dp_size: configured %d, but %s chooses its ranks itself", set.DPSize, strings.TrimSpace(e.Type+" "+info.Version))
	}
	return list
}

// ContradictionsOf returns the options of a worker that its engine's info or KV events
// contradict, and how.
func (p *Pool) ContradictionsOf(w *Worker) map[string]string {
	s := p.Settings.Load()
	list := s.Contradictions(s.Worker(w.Dial), w.Engine.Info())
	w.eventContradictions(s, list)
	return list
}

// blockSizeFor returns the index's block size for an engine's block size, in tokens: the
// smallest multiple that is not below the default.
func blockSizeFor(size int) int {
	return (kvscore.DefaultBlockSize + size - 1) / size * size
}

// adoptBlockSize fills in the engines' block size, if none is configured. The caller holds
// the lock.
func (p *Pool) adoptBlockSize(s *Settings) {
	if s.BlockSizeUnset && p.blockSize > 0 {
		s.BlockSize = p.blockSize
	}
}

// KnowsBlockSize returns whether the engines have reported one block size.
func (p *Pool) KnowsBlockSize() bool {
	p.members.mu.RLock()
	defer p.members.mu.RUnlock()
	return p.blockSize > 0
}

const incidentBlocks = "engines report different KV block sizes"

// maxAdopted is the largest block size that the pool takes from engines, in tokens. The
// index cannot compare prompts that are shorter than a block.
const maxAdopted = 256

// AgreeOnBlocks takes the block size from the engines, if none is configured and all of
// them agree. After a change the index does not find earlier prompts of token ids.
func (p *Pool) AgreeOnBlocks() {
	p.members.mu.Lock()
	defer p.members.mu.Unlock()
	old := p.Settings.Load()
	size := 0
	for _, w := range p.workers {
		n := w.blockSize()
		if n == 0 || n > maxAdopted || !p.IsUpstream(old, w) {
			continue
		}
		switch n = blockSizeFor(n); {
		case n == size:
		case size == 0:
			size = n
		case old.BlockSizeUnset:
			p.Incidents.Raise(time.Now(), incidentBlocks, p.Logger)
			return
		}
	}
	if size == 0 || !old.BlockSizeUnset {
		return
	}
	p.blockSize = size // also if it is the default: the source of the size changes
	if old.BlockSize == size {
		return
	}
	s := *old
	p.adoptBlockSize(&s)
	p.Settings.Store(&s)
	p.Scheduler.Apply(s.schedulerSettings())
	p.Logger().Info("block size taken from the engines", zap.Int("tokens", s.BlockSize), zap.Int("before", old.BlockSize))
}
