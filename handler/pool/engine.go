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
	// ProbeEvery is how often a worker is probed: asked for its models, or at least
	// connected to.
	ProbeEvery = 4 * time.Second
	// askedAgain is the time between two questions to a worker about its engine.
	askedAgain = 15 * time.Second
	// askedLess is that time at most, for a worker that does not answer.
	askedLess = 5 * time.Minute
	// idleAfter is how long a pool must have no request to be idle. Its workers may sleep
	// or cost money, so they are asked as rarely as silent ones, but still connected to.
	idleAfter = 10 * time.Minute
	// Two changes of an engine's start within this time mean a shared address.
	sharedWithin = time.Minute

	incidentShared = "several engines answer at one address"
)

// engineState is what the engine behind a worker's address tells of itself.
type engineState struct {
	info atomic.Pointer[engine.Info] // nil: nothing so far

	mu      sync.Mutex
	next    time.Time         // when the engine is asked again
	silent  int               // questions in a row that it did not answer
	start   string            // what it told last of its start
	changed time.Time         // when that changed last
	warned  map[string]string // contradictions that the log has

	warnings  []EngineWarning // that the log has
	uncounted atomic.Int32    // see CountedCache
}

// Info returns what the engine reported last, the zero Info if it told nothing.
func (e *engineState) Info() engine.Info {
	if t := e.info.Load(); t != nil {
		return *t
	}
	return engine.Info{}
}

// AskAgain has the next probe of the worker ask the engine.
func (e *engineState) AskAgain() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.next = time.Time{}
}

// Claim returns whether the engine is to be asked now. The caller then asks it, and
// nobody else does meanwhile.
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

// answered records whether the engine answered a question. One that does not is asked
// less and less often.
func (e *engineState) answered(t time.Time, told bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if told {
		e.silent, e.next = 0, t.Add(askedAgain)
		return
	}
	e.next = t.Add(min(ProbeEvery<<min(e.silent, 8), askedLess))
	e.silent++
}

// restarted records what the engine says of its start. It returns whether that changed,
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

// EngineOf returns what is known of a worker's engine.
func (p *Pool) EngineOf(w *Worker) engine.Engine {
	set := p.Settings.Load().Worker(w.Dial)
	return set.describe(w.Engine.Info())
}

// describe returns what is known of an engine: its type is the configured one, or
// else the one that it shows.
func (w *WorkerSettings) describe(info engine.Info) engine.Engine {
	e := engine.Engine{Type: info.Type, Info: info, Settings: w.engineSettings()}
	if w.Engine != EngineAuto {
		e.Type = w.Engine
	}
	return e
}

// Learn records what a worker's engine tells of itself. An answer without a type, or
// with an unsure one, changes nothing once the type is known.
func (p *Pool) Learn(w *Worker, told engine.Info) {
	t, before := time.Now(), w.Engine.Info()
	w.Engine.answered(t, told.Type != "" && told.Type != engine.Other)
	if (told.Type == "" || told.Unsure) && before.Type != "" {
		return
	}
	told.Unsure = false
	told = told.Or(before)
	if !p.setInfo(w, &told) {
		return
	}
	p.Queue.reviewAll() // the worker's limit may have changed
	if logged(told) != logged(before) {
		p.Logger().Info("worker tells what it is", zap.String("upstream", w.Dial), zap.Object("engine", infoFields(told)))
	}
	switch changed, shared := w.Engine.restarted(t, told.Life); {
	case shared:
		p.Incidents.Raise(t, incidentShared, p.Logger)
	case changed, before.Type != "" && told.Type != before.Type:
		p.clear(w, clearedRestarted)
	}
	p.contradict(w)
	p.warnOfEngine(w)
}

// setInfo stores an engine's info. It returns false if the pool has replaced the worker
// meanwhile.
func (p *Pool) setInfo(w *Worker, told *engine.Info) bool {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	if p.Workers[w.Dial] != w {
		return false
	}
	w.Engine.info.Store(told)
	set := p.Settings.Load().Worker(w.Dial)
	p.declareRanks(w, set)
	if set.MaxRunning == LimitAuto {
		w.limitSlots(set)
	}
	return true
}

// ModelsInterval returns the least time between two questions to a worker about its models.
func (p *Pool) ModelsInterval(w *Worker) time.Duration {
	if time.Now().Unix()-max(p.LastRequest.Load(), p.ServingSince.Load()) > int64(idleAfter/time.Second) {
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

// infoFields are an engine's info in the log, without what is unknown.
type infoFields engine.Info

// MarshalLogObject implements zapcore.ObjectMarshaler.
func (f infoFields) MarshalLogObject(e zapcore.ObjectEncoder) error {
	e.AddString("type", f.Type)
	if f.Version != "" {
		e.AddString("version", f.Version)
	}
	for _, figure := range []struct {
		name string
		n    int64
	}{
		{"kv_tokens", f.KVTokens},
		{"block_size", int64(f.BlockSize)},
		{"dp_size", int64(f.DPSize)},
		{"context_tokens", f.ContextTokens},
		{"max_running", int64(f.MaxRunning)},
	} {
		if figure.n != 0 {
			e.AddInt64(figure.name, figure.n)
		}
	}
	if f.Priority {
		e.AddBool("priority_scheduling", true)
	}
	return nil
}

// Contradictions returns, by option and in words, where an engine's info contradicts
// the configuration.
func (s *Settings) Contradictions(set WorkerSettings, info engine.Info) map[string]string {
	list := make(map[string]string)
	differ := func(what string, configured, actual int64) {
		if configured > 0 && actual > 0 && configured != actual {
			list[what] = fmt.Sprintf("%s: configured %d, the engine tells %d", what, configured, actual)
		}
	}
	if off := set.KVTokens - info.KVTokens; off*20 > info.KVTokens || -off*20 > info.KVTokens { // blocks and ranks round it
		differ("kv_tokens", set.KVTokens, info.KVTokens)
	}
	differ("dp_size", int64(set.DPSize), int64(info.DPSize))
	if !s.BlockSizeUnset && info.BlockSize > 0 && s.BlockSize%info.BlockSize != 0 {
		list["block_size"] = fmt.Sprintf("index block_size: configured %d, the engine tells %d", s.BlockSize, info.BlockSize)
	}
	if s.BlockSizeUnset && info.BlockSize > maxAdopted {
		list["block_size"] = fmt.Sprintf("index block_size: %d, for the engine's blocks of %d tokens are too large to be compared", s.BlockSize, info.BlockSize)
	}
	if set.Engine != EngineAuto && set.Engine != engine.Other && info.Type != "" && info.Type != engine.Other && info.Type != set.Engine {
		list["engine"] = fmt.Sprintf("engine: configured %s, the engine shows to be %s", set.Engine, info.Type)
	}
	if e := set.describe(info); set.DPSize > 1 && !e.TakesRank() {
		list["dp_size"] = fmt.Sprintf("dp_size: configured %d, but %s chooses its ranks itself", set.DPSize, strings.TrimSpace(e.Type+" "+info.Version))
	}
	return list
}

// contradict logs each contradiction between a worker's engine and the configuration
// once, and its end. The configuration counts.
func (p *Pool) contradict(w *Worker) {
	s := p.Settings.Load()
	list := s.Contradictions(s.Worker(w.Dial), w.Engine.Info())
	w.Engine.mu.Lock()
	before := w.Engine.warned
	w.Engine.warned = list
	w.Engine.mu.Unlock()
	for what, text := range list {
		if before[what] != text {
			p.Logger().Warn("worker contradicts its configuration, which counts: "+text, zap.String("upstream", w.Dial))
		}
	}
	for what, text := range before {
		if list[what] == "" {
			p.Logger().Info("worker does not contradict its configuration any more: "+text, zap.String("upstream", w.Dial))
		}
	}
}

// blockSizeFor returns the size of the compared blocks for the size of an engine's
// blocks, in tokens: the smallest multiple that is not below the default.
func blockSizeFor(size int) int {
	return (kvscore.DefaultBlockSize + size - 1) / size * size
}

// adoptBlockSize fills in the engines' block size, if none is configured. The lock is
// held.
func (p *Pool) adoptBlockSize(s *Settings) {
	if s.BlockSizeUnset && p.blockSize > 0 {
		s.BlockSize = p.blockSize
	}
}

// KnowsBlockSize returns whether the engines have reported their block size, and agreed.
func (p *Pool) KnowsBlockSize() bool {
	p.Mu.RLock()
	defer p.Mu.RUnlock()
	return p.blockSize > 0
}

const incidentBlocks = "disagreement among the engines about the size of their KV blocks"

// maxAdopted is the largest block size taken from the engines, in tokens: shorter
// prompts than a block cannot be compared.
const maxAdopted = 256

// AgreeOnBlocks takes the block size from the engines, if none is configured and all
// agree. A change makes earlier prompts of token ids unknown.
func (p *Pool) AgreeOnBlocks() {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	old := p.Settings.Load()
	size := 0
	for _, w := range p.Workers {
		n := w.Engine.Info().BlockSize
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
	if size == 0 || !old.BlockSizeUnset || old.BlockSize == size {
		return
	}
	p.blockSize = size
	s := *old
	p.adoptBlockSize(&s)
	p.Settings.Store(&s)
	p.Scheduler.Apply(s.schedulerSettings())
	p.Logger().Info("block size taken from the engines", zap.Int("tokens", s.BlockSize), zap.Int("before", old.BlockSize))
}
