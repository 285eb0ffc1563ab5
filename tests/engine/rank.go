package engine

import (
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine/batch"
	"github.com/caddy-kvrouter/kvrouter/tests/engine/cache"
)

// burst is how many steps a rank that is late makes before it lets others in.
const burst = 64

// rank is one data-parallel rank: a cache, a batch, and the goroutine that makes
// its steps when their time has come. A rank that is late catches up: step times
// are counted from the end of the step before, not from when a timer fired.
type rank struct {
	clock clock
	wake  chan struct{} // something came while the rank was idle

	mu    sync.Mutex
	cache *cache.Cache
	batch *batch.Batcher
	// changes are what the cache told of and no batch of events has; nil without events.
	changes *changes
	held    map[string]*session
	busy    bool          // a step is under way
	ends    time.Duration // when it ends, or the last one did
	due     time.Duration // when an idle rank looks at its queue; -1: it need not
}

func newRank(c clock, kv *cache.Cache, b *batch.Batcher, ch *changes) *rank {
	return &rank{clock: c, cache: kv, batch: b, changes: ch, wake: make(chan struct{}, 1), held: make(map[string]*session), due: -1}
}

// job is one request on its way through a rank.
type job struct {
	batch.Request
	each    bool // the handler wants to know of each token, not only of the end
	session *session
	ready   chan struct{}
	told    *int // what it says of its cached tokens; nil: what they are

	mu sync.Mutex
	progress
}

// progress is how far a job has come. The time is virtual.
type progress struct {
	first  time.Duration
	cached int // tokens; -1 until admitted
	tokens int // of the answer
	done   bool
}

// look returns how far the job has come.
func (j *job) look() progress {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.progress
}

// submit hands a job to the rank.
func (k *rank) submit(j *job) {
	k.mu.Lock()
	defer k.mu.Unlock()
	j.Arrived = k.clock.now()
	j.Owner = j
	k.batch.Submit(&j.Request)
	k.free()
}

// free has an idle rank look at its queue. There is something new in it, or the blocks that it waits
// for have been given back.
func (k *rank) free() {
	if k.busy {
		return // it looks with each step
	}
	if k.due < 0 {
		k.due = k.clock.now()
	}
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// abort takes a job back, and says whether it had not ended.
func (k *rank) abort(j *job) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.batch.Abort(&j.Request) {
		return false
	}
	k.changes.settle()
	k.free()
	if j.session != nil {
		j.session.busy = false // what the turns before have computed is gone, if this one ran
	}
	return true
}

// load returns the running and the waiting requests, and the tokens of the waiting ones.
func (k *rank) load() (running, waiting, tokens int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	waiting, tokens = k.batch.Waiting()
	return k.batch.Running(), waiting, tokens
}

// run makes steps until the engine dies.
func (k *rank) run(dead <-chan struct{}) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		next, busy := k.advance(k.clock.now())
		var due <-chan time.Time
		if busy {
			timer.Reset(max(0, k.clock.until(next)))
			due = timer.C
		}
		select {
		case <-due:
		case <-k.wake:
		case <-dead:
			return
		}
	}
}

// advance makes the steps that are due. It returns when the next one is, and
// false if there is none.
func (k *rank) advance(now time.Duration) (time.Duration, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for range burst {
		switch {
		case k.busy && k.ends > now:
			return k.ends, true
		case k.busy:
			k.step(k.ends)
		case k.due >= 0:
			k.step(max(k.ends, k.due))
		default:
			return 0, false
		}
	}
	return k.ends, true
}

// step ends the step under way and begins the next, with all that had arrived at
// that time.
func (k *rank) step(at time.Duration) {
	k.changes.stepEnds(k.busy) // before the clients know of their tokens
	events := k.batch.Step(at)
	k.changes.settle()
	for _, ev := range events {
		ev.Request.Owner.(*job).tell(ev, at)
	}
	d := k.batch.NextStepDuration()
	k.busy, k.ends, k.due = d > 0, at+d, -1
	if next, ok := k.batch.Next(); ok && next > at {
		k.due = next
	}
}

// tell tells a job what happened to it, and wakes its handler.
func (j *job) tell(ev batch.Event, at time.Duration) {
	if ev.Last() && j.session != nil {
		j.session.ended(&j.Request)
	}
	j.mu.Lock()
	switch j.tokens, j.done = ev.Tokens, ev.Last(); ev.Tokens {
	case 0:
		if j.cached = ev.Cached; j.told != nil {
			j.cached = *j.told
		}
	case 1:
		j.first = at
	}
	news := j.done || j.each && j.tokens > 0
	j.mu.Unlock()
	if news {
		select {
		case j.ready <- struct{}{}:
		default:
		}
	}
}
