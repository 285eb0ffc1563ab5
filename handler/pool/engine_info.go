package pool

import (
	"fmt"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

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
	if !s.OpenBlocks && info.BlockSize > 0 && s.BlockSize%info.BlockSize != 0 {
		list["block_size"] = fmt.Sprintf("index block_size: configured %d, the engine tells %d", s.BlockSize, info.BlockSize)
	}
	if s.OpenBlocks && info.BlockSize > maxAdopted {
		list["block_size"] = fmt.Sprintf("index block_size: %d, for the engine's blocks of %d tokens are too large to be compared", s.BlockSize, info.BlockSize)
	}
	if set.Engine != EngineAuto && set.Engine != engine.Other && info.Type != "" && info.Type != engine.Other && info.Type != set.Engine {
		list["engine"] = fmt.Sprintf("engine: configured %s, the engine shows to be %s", set.Engine, info.Type)
	}
	if e := set.describe(info); set.DPSize > 1 && !e.TakesRank() {
		list["dp_size"] = fmt.Sprintf("dp_size: configured %d, but %s chooses its ranks itself", set.DPSize, strings.TrimSpace(e.Type+" "+info.Version))
	}
	if info.NoPrefixCache {
		list["prefix_cache"] = "prefix caching: the engine has it switched off, and gains nothing by being chosen for what it computed before"
	}
	return list
}

// contradict logs each contradiction between a worker's engine and the configuration
// once, and its end. The configuration counts.
func (p *Pool) contradict(w *Worker) {
	s := p.Settings.Load()
	list := s.Contradictions(s.Worker(w.Dial), w.Engine.Last())
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
	n := size
	for n < kvscore.DefaultBlockSize {
		n += size
	}
	return n
}

// adoptBlockSize fills in the engines' block size, if none is configured. The lock is
// held.
func (p *Pool) adoptBlockSize(s *Settings) {
	if s.OpenBlocks && p.blockSize > 0 {
		s.BlockSize = p.blockSize
	}
}

// TellsBlockSize returns whether the engines have told their block size, and agreed.
func (p *Pool) TellsBlockSize() bool {
	p.Mu.RLock()
	defer p.Mu.RUnlock()
	return p.blockSize > 0
}

const incidentBlocks = "disagreement among the engines about the size of their KV blocks"

// maxAdopted is the largest block size taken from the engines, in tokens: shorter
// prompts than a block cannot be compared.
const maxAdopted = 256

// AgreeOnBlocks takes the block size from the engines, if none is configured and all
// engines agree. This normally happens after the first probes. A later change makes
// the prompts of token ids unknown that were computed before.
func (p *Pool) AgreeOnBlocks() {
	p.Mu.Lock()
	defer p.Mu.Unlock()
	old := p.Settings.Load()
	size := 0
	for _, w := range p.Workers {
		n := w.Engine.Last().BlockSize
		if n == 0 || n > maxAdopted || !p.IsCurrent(old, w) {
			continue
		}
		switch n = blockSizeFor(n); {
		case n == size:
		case size == 0:
			size = n
		case old.OpenBlocks:
			p.Incidents.Raise(time.Now(), incidentBlocks, p.Logger)
			return
		}
	}
	if size == 0 || !old.OpenBlocks || old.BlockSize == size {
		return
	}
	p.blockSize = size
	s := *old
	p.adoptBlockSize(&s)
	p.Settings.Store(&s)
	p.Scheduler.Apply(s.scheduler())
	p.Logger().Info("block size taken from the engines", zap.Int("tokens", s.BlockSize), zap.Int("before", old.BlockSize))
}
