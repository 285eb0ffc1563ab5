package discovery

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/events"
	"go.uber.org/zap"
)

const (
	// maxAdopted is the largest block size that the pool takes from engines, in tokens. The
	// index cannot compare prompts that are shorter than a block.
	maxAdopted = 256

	incidentShared = "several engines answer at one address"
	incidentBlocks = "engines report different KV block sizes"
)

// learn records the info that the worker's engine reports. An info without a type, or with
// an unsure one, changes nothing once the type is known.
func learn(p *pool.Pool, w *worker.Worker, info engine.Info) {
	t, before := time.Now(), w.Engine().Info
	if w.Detected(t, engine.Shows(info.Type)); info.Asleep {
		w.AskAgain() // it may be woken soon
	}
	if (info.Type == "" || info.Unsure) && before.Type != "" {
		return
	}
	info.Unsure = false
	info.BootID = cmp.Or(info.BootID, before.BootID)
	if !p.SetInfo(w, info) {
		return
	}
	if logged(info) != logged(before) {
		p.Logger().Info("worker reports its engine", zap.String("upstream", w.Dial), zap.Reflect("engine", info))
	}
	switch changed, shared := w.StartChanged(before.BootID, info.BootID); {
	case shared:
		p.Raise(t, incidentShared)
	case changed, before.Type != "" && info.Type != before.Type:
		p.ClearCache(w, observe.ClearedRestarted)
	case info.Asleep && !before.Asleep:
		p.ClearCache(w, observe.ClearedAsleep)
	}
}

// logged returns the parts of an engine's info that are logged when they change. A
// restart has a log line of its own.
func logged(info engine.Info) engine.Info {
	info.Started, info.BootID = time.Time{}, ""
	return info
}

// Contradictions returns the options of a worker that its engine's info or KV events
// contradict, and how.
func Contradictions(p *pool.Pool, w *worker.Worker) map[string]string {
	s, e, size := p.Settings.Load(), w.Engine(), w.BlockSize()
	set, info, list := w.Settings(), &e.Info, make(map[string]string)
	differ := func(what string, configured, actual int64) {
		if configured > 0 && actual > 0 && configured != actual {
			list[what] = fmt.Sprintf("%s: configured %d, the engine reports %d", what, configured, actual)
		}
	}
	if off := set.KVTokens - info.KVTokens; off*20 > info.KVTokens || -off*20 > info.KVTokens { // engines round it
		differ("kv_tokens", set.KVTokens, info.KVTokens)
	}
	differ("dp_size", int64(set.DPSize), int64(info.DPSize))
	switch {
	case !s.BlockSizeUnset && size > 0 && s.BlockSize%size != 0:
		list["block_size"] = fmt.Sprintf("index block_size: configured %d, the engine reports %d", s.BlockSize, size)
	case s.BlockSizeUnset && size > maxAdopted:
		list["block_size"] = fmt.Sprintf("index block_size: %d, because the engine's blocks of %d tokens are too large for the index",
			s.BlockSize, size)
	}
	if engine.Shows(set.Engine) && engine.Shows(info.Type) && info.Type != set.Engine {
		list["engine"] = fmt.Sprintf("engine: configured %s, the engine is %s", set.Engine, info.Type)
	}
	if set.Role != "" && info.Role != "" && engine.Role(set.Role) != info.Role {
		list["role"] = fmt.Sprintf("role: configured %s, the engine is started for %s", set.Role, info.Role)
	}
	following := w.Following()
	switch {
	case set.DPSize > 1 && !e.TakesRank():
		list["dp_size"] = fmt.Sprintf("dp_size: configured %d, but %s chooses its ranks itself",
			set.DPSize, strings.TrimSpace(e.Type+" "+info.Version))
	case slices.ContainsFunc(following, func(f worker.Following) bool { return f.Skipped[events.OtherRank] > 0 }):
		list["dp_size"] = fmt.Sprintf("dp_size: %d, but KV events come from ranks above", len(following))
	}
	return list
}

// blockSizeFor returns the index's block size for an engine's block size, in tokens: the
// smallest multiple that is not below the default.
func blockSizeFor(size int) int {
	return (kvscore.DefaultBlockSize + size - 1) / size * size
}

// agreeOnBlocks has the pool take its block size from the engines, if all of them agree.
func agreeOnBlocks(p *pool.Pool) {
	s, size := p.Settings.Load(), 0
	for _, w := range p.All() {
		n := w.BlockSize()
		if n == 0 || n > maxAdopted || !p.IsUpstream(s, w) {
			continue
		}
		switch n = blockSizeFor(n); {
		case n == size:
		case size == 0:
			size = n
		case s.BlockSizeUnset:
			p.Raise(time.Now(), incidentBlocks)
			return
		}
	}
	if size > 0 {
		p.AdoptBlockSize(size)
	}
}
