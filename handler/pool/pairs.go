package pool

import (
	"maps"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

// Pairs are the pairs of a prefill and a decode worker between which a transfer has failed
// lately. Neither worker is marked down for that.
type Pairs struct {
	mu    sync.Mutex
	known map[[2]uint64]pair // by the workers' ids
}

type pair struct {
	until   time.Time // it is remembered
	silent  int       // decode phases in a row
	avoided bool
}

const (
	// pairAvoided is for how long requests avoid a pair of workers after a failed transfer.
	pairAvoided = time.Minute
	// maxSilent is how many decode phases in a row must be silent for that. One may be late because
	// its worker is busy.
	maxSilent = 3
	// maxPairs bounds the pairs that are remembered.
	maxPairs = 4096
)

// Failed records that a transfer between two workers failed, or that its decode phase was silent. It
// returns whether requests now avoid the pair. A transfer that began before a worker's restart says nothing
// of its new engine.
func (f *Pairs) Failed(prefill, decode *worker.Worker, silent bool, begun, t time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if prefill.RestartedSince(begun) || decode.RestartedSince(begun) {
		return false
	}
	maps.DeleteFunc(f.known, func(_ [2]uint64, one pair) bool {
		return !t.Before(one.until) || len(f.known) >= maxPairs
	})
	if f.known == nil {
		f.known = make(map[[2]uint64]pair)
	}
	key := [2]uint64{prefill.ID, decode.ID}
	one := f.known[key]
	one.until, one.silent = t.Add(pairAvoided), one.silent+1
	one.avoided = !silent || one.silent >= maxSilent
	f.known[key] = one
	return one.avoided
}

// Work records that a decode worker has got a prompt from a prefill worker.
func (f *Pairs) Work(prefill, decode *worker.Worker) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.known, [2]uint64{prefill.ID, decode.ID})
}

// Avoid returns whether requests avoid a pair of workers.
func (f *Pairs) Avoid(prefill, decode *worker.Worker, t time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	one := f.known[[2]uint64{prefill.ID, decode.ID}]
	return one.avoided && t.Before(one.until)
}

// forget ends what was found of a worker's engine, which has restarted.
func (f *Pairs) forget(id uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	maps.DeleteFunc(f.known, func(key [2]uint64, _ pair) bool { return key[0] == id || key[1] == id })
}
