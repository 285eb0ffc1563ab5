package handler

import (
	"fmt"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// shown returns of what an engine tells what the operator is told when it
// changes: that it has restarted has a line of its own.
func shown(t engine.Info) engine.Info {
	t.Started, t.Life = time.Time{}, ""
	return t
}

// toldFields are what the log says of an engine: what it does not tell is left
// out.
type toldFields engine.Info

// MarshalLogObject implements zapcore.ObjectMarshaler.
func (f toldFields) MarshalLogObject(e zapcore.ObjectEncoder) error {
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

// contradictions returns what an engine tells otherwise than the operator says,
// by what it is about, in words.
func (s *poolSettings) contradictions(set Worker, told engine.Info) map[string]string {
	list := make(map[string]string)
	differ := func(what string, configured, tells int64) {
		if configured > 0 && tells > 0 && configured != tells {
			list[what] = fmt.Sprintf("%s: configured %d, the engine tells %d", what, configured, tells)
		}
	}
	if off := set.KVTokens - told.KVTokens; off*20 > told.KVTokens || -off*20 > told.KVTokens { // blocks and ranks round it
		differ("kv_tokens", set.KVTokens, told.KVTokens)
	}
	differ("dp_size", int64(set.DPSize), int64(told.DPSize))
	if !s.openBlocks && told.BlockSize > 0 && s.blockSize%told.BlockSize != 0 {
		list["block_size"] = fmt.Sprintf("index block_size: configured %d, the engine tells %d", s.blockSize, told.BlockSize)
	}
	if s.openBlocks && told.BlockSize > maxAdopted {
		list["block_size"] = fmt.Sprintf("index block_size: %d, for the engine's blocks of %d tokens are too large to be compared", s.blockSize, told.BlockSize)
	}
	if set.Engine != engineAuto && set.Engine != engine.Other && told.Type != "" && told.Type != engine.Other && told.Type != set.Engine {
		list["engine"] = fmt.Sprintf("engine: configured %s, the engine shows to be %s", set.Engine, told.Type)
	}
	if e := set.describe(told); set.DPSize > 1 && !e.TakesRank() {
		list["dp_size"] = fmt.Sprintf("dp_size: configured %d, but %s chooses its ranks itself", set.DPSize, strings.TrimSpace(e.Type+" "+told.Version))
	}
	if told.NoPrefixCache {
		list["prefix_cache"] = "prefix caching: the engine has it switched off, and gains nothing by being chosen for what it computed before"
	}
	return list
}

// contradict warns of what a worker's engine tells otherwise than the operator
// says, once of each. What the operator says counts.
func (p *pool) contradict(w *worker) {
	s := p.settings.Load()
	list := s.contradictions(s.worker(w.dial), w.engine.last())
	w.engine.mu.Lock()
	before := w.engine.warned
	w.engine.warned = list
	w.engine.mu.Unlock()
	for what, text := range list {
		if before[what] != text {
			p.logger().Warn("worker contradicts its configuration, which counts: "+text, zap.String("upstream", w.dial))
		}
	}
	for what, text := range before {
		if list[what] == "" {
			p.logger().Info("worker does not contradict its configuration any more: "+text, zap.String("upstream", w.dial))
		}
	}
}

// blockSizeFor returns the size of the blocks that are compared, in tokens,
// where an engine's have so many: a multiple of theirs, and not smaller than the
// default. An engine that can reuse any number of tokens needs no block for each.
func blockSizeFor(told int) int {
	n := told
	for n < kvscore.DefaultBlockSize {
		n += told
	}
	return n
}

// adoptBlockSize fills in the block size that the engines told, if the operator
// did not say one. The lock is held.
func (p *pool) adoptBlockSize(s *poolSettings) {
	if s.openBlocks && p.blockSize > 0 {
		s.blockSize = p.blockSize
	}
}

// maxAdopted is the largest block size that is taken from the engines, in tokens:
// shorter prompts than a block have nothing in common.
const maxAdopted = 256

// agreeOnBlocks takes the block size from the engines, where the operator did
// not say it and all upstreams that tell one come to the same. This normally
// happens after the first probes. The block size changes later only if no engine
// answered then, or if all engines changed. Engines that disagree, as while they
// are replaced one by one, change nothing. Prompts of token ids that were computed
// before are then not found any more.
func (p *pool) agreeOnBlocks() {
	p.mu.Lock()
	defer p.mu.Unlock()
	old := p.settings.Load()
	told := 0
	for _, w := range p.workers {
		n := w.engine.last().BlockSize
		if n == 0 || n > maxAdopted || !p.isCurrent(old, w) {
			continue
		}
		switch n = blockSizeFor(n); {
		case n == told:
		case told == 0:
			told = n
		case old.openBlocks:
			p.incidents.met(now(), "disagreement among the engines about the size of their KV blocks", p.logger)
			return
		}
	}
	if told == 0 || !old.openBlocks || old.blockSize == told {
		return
	}
	p.blockSize = told
	s := *old
	p.adoptBlockSize(&s)
	p.settings.Store(&s)
	p.scheduler.Apply(s.scheduler())
	p.logger().Info("block size taken from the engines", zap.Int("tokens", s.blockSize), zap.Int("before", old.blockSize))
}
