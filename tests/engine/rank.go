package engine

import (
	"slices"
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
	jobs    map[uint64]*job
	held    map[string]*session
	freed   bool          // blocks were given back while no step was under way
	inbox   []*job        // not yet in the batch, in order of arrival
	busy    bool          // a step is under way
	ends    time.Duration // when it ends, or the last one did
}

func newRank(c clock, kv *cache.Cache, b *batch.Batcher, ch *changes) *rank {
	return &rank{clock: c, cache: kv, batch: b, changes: ch, wake: make(chan struct{}, 1), jobs: make(map[uint64]*job), held: make(map[string]*session)}
}

// job is one request on its way through a rank.
type job struct {
	req     *batch.Request
	arrived time.Duration
	reason  string // why the answer ends
	each    bool   // the handler wants to know of each token, not only of the end
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

func newJob(r *batch.Request, each bool) *job {
	return &job{req: r, each: each, ready: make(chan struct{}, 1), progress: progress{cached: -1}}
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
	j.arrived = k.clock.now()
	k.inbox = append(k.inbox, j)
	k.nudge()
}

// nudge has an idle rank look for something to do.
func (k *rank) nudge() {
	if k.busy {
		return
	}
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// free has an idle rank look at its queue again: sessions may have held the blocks that
// the queue waits for.
func (k *rank) free() {
	k.freed = true
	k.nudge()
}

// abort takes a job back, and says whether it had not ended.
func (k *rank) abort(j *job) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if i := slices.Index(k.inbox, j); i >= 0 {
		k.inbox = slices.Delete(k.inbox, i, i+1)
	} else if !k.batch.Abort(j.req.ID) {
		return false
	}
	k.changes.settle()
	delete(k.jobs, j.req.ID)
	k.free()
	if j.session != nil {
		j.session.busy = false // what the turns before have computed is gone, if this one ran
	}
	return true
}

func (k *rank) load() (running, waiting int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.batch.Running(), k.batch.Waiting() + len(k.inbox)
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
		if !k.busy {
			freed := k.freed
			k.freed = false
			switch {
			case len(k.inbox) > 0:
				k.step(max(k.ends, k.inbox[0].arrived))
			case freed && k.batch.Waiting() > 0:
				k.step(max(k.ends, now))
			default:
				return 0, false
			}
			continue
		}
		if k.ends > now {
			break
		}
		k.step(k.ends)
	}
	return k.ends, true
}

// step ends the step under way and begins the next, with all that had arrived at
// that time.
func (k *rank) step(at time.Duration) {
	n := 0
	for n < len(k.inbox) && k.inbox[n].arrived <= at {
		j := k.inbox[n]
		n++
		if k.batch.Submit(j.req) != nil {
			// It was checked before, so this does not happen. The waiting caller
			// gets the end.
			j.advance(func(p *progress) { p.done = true })
			continue
		}
		k.jobs[j.req.ID] = j
	}
	k.inbox = slices.Delete(k.inbox, 0, n)
	k.changes.stepEnds(k.busy) // before the clients know of their tokens
	events := k.batch.Step(at)
	k.changes.settle()
	for _, ev := range events {
		k.tell(ev)
	}
	d := k.batch.NextStepDuration()
	k.busy, k.ends = d > 0, at+d
}

// tell tells a job what happened to it.
func (k *rank) tell(ev batch.Event) {
	j := k.jobs[ev.Request.ID]
	if ev.Kind == batch.Admitted {
		j.mu.Lock()
		if j.cached = ev.Cached; j.told != nil {
			j.cached = *j.told
		}
		j.mu.Unlock()
		return
	}
	if ev.Last {
		delete(k.jobs, ev.Request.ID)
		if j.session != nil {
			j.session.ended(j.req)
		}
	}
	j.advance(func(p *progress) {
		p.tokens, p.done = ev.Index+1, ev.Last
		if ev.Index == 0 {
			p.first = ev.At
		}
	})
}

// advance changes the progress and wakes the handler.
func (j *job) advance(change func(*progress)) {
	j.mu.Lock()
	change(&j.progress)
	news := j.each || j.done
	j.mu.Unlock()
	if news {
		select {
		case j.ready <- struct{}{}:
		default:
		}
	}
}
