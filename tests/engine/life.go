package engine

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine/batch"
	"github.com/caddy-kvrouter/kvrouter/tests/engine/publisher"
)

// clock turns real time into the engine's virtual time, which passes Speed times
// as fast and is zero when the engine was first started.
type clock struct {
	zero  time.Time
	speed float64
}

func (c clock) now() time.Duration {
	return time.Duration(float64(time.Since(c.zero)) * c.speed)
}

// until returns how long in real time it is until a virtual time.
func (c clock) until(at time.Duration) time.Duration {
	return time.Until(c.zero.Add(time.Duration(float64(at) / c.speed)))
}

// life is one process's life: from a start to the next kill.
type life struct {
	number  int
	started time.Time
	ranks   []*rank
	// One for each rank, or none.
	publishers []*publisher.Publisher
	turn       atomic.Uint64
	asleep     atomic.Int64 // level of a vLLM's sleep, 0 while it is awake
	drains     atomic.Int64 // times that statistics were given away
	side       *side        // nil without transfers
	abortable  sync.Map     // id -> context.CancelFunc, of an SGLang's requests

	over     atomic.Bool   // set before the connections are closed
	dead     chan struct{} // closed after it
	loops    sync.WaitGroup
	handlers sync.WaitGroup
}

// newLife begins a life with a publisher for each rank, or with none.
func newLife(cfg Config, c clock, pubs []*publisher.Publisher) *life {
	l := &life{started: time.Now(), publishers: pubs, dead: make(chan struct{})}
	for i := range cfg.Ranks {
		var ch *changes
		if pubs != nil {
			ch = newChanges(&cfg, i, pubs[i])
		}
		kv := ch.newCache(&cfg)
		b := batch.New(batch.Config{TokenBudget: cfg.TokenBudget, MaxRunning: cfg.MaxRunning, Step: cfg.Step, Late: ch != nil && cfg.Flavour == SGLang}, kv)
		l.ranks = append(l.ranks, newRank(c, kv, b, ch))
	}
	for _, k := range l.ranks {
		l.loops.Go(func() { k.run(l.dead) })
	}
	if cfg.StreamingSessions {
		l.loops.Go(l.reap)
	}
	return l
}

// end waits until nothing of this life goes on.
func (l *life) end() {
	l.over.Store(true)
	close(l.dead)
	l.loops.Wait()
	l.handlers.Wait()
}

// choose returns the rank with the least to do, as vLLM's own balancing does. A
// waiting request weighs as much as four running ones, and equal ranks take
// turns.
func (l *life) choose() int {
	n := len(l.ranks)
	if n == 1 {
		return 0
	}
	first := int(l.turn.Add(1)-1) % n
	best, least := first, -1
	for i := range n {
		k := (first + i) % n
		running, waiting, _ := l.ranks[k].load()
		if score := running + 4*waiting; least < 0 || score < least {
			best, least = k, score
		}
	}
	return best
}
