package pool

import (
	"cmp"
	"context"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/handler/quota"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"go.uber.org/zap"
)

const (
	// firstProbes is how long the cache models wait for the first probes of workers: engines
	// report the size of their caches.
	firstProbes = 3 * time.Second
	// turnsWithin is how long a turn of a session waits for the bindings of an earlier run.
	turnsWithin = 5 * time.Second
	// oldestCaches is the greatest age of a journal whose cache models are right.
	oldestCaches = time.Hour
)

// restore takes over what an earlier run has written to the log. What the pool has learned since its
// start counts, and not what the log says.
func (p *Pool) restore(ctx context.Context, log *journal.Log, head *journal.Head) {
	begun := time.Now()
	r := &restorer{
		pool: p, settings: p.Settings.Load(), begun: begun, byDial: make(map[string]*restoredWorker),
		limits: p.Quota.Empty(), bindings: make(map[affinity.Key]*restoredBinding), byID: make(map[uint64]*restoredWorker),
	}
	skipped, err := log.Read(ctx, r.read)
	if ctx.Err() != nil {
		return // the log has more than what was read
	}
	if r.lastRecord.IsZero() {
		r.lastRecord = begun
	}
	r.Age = max(0, begun.Sub(r.lastRecord))
	r.finish(ctx, head)
	p.kept.mu.Lock()
	p.kept.restored = r.Restored
	p.kept.mu.Unlock()
	fields := []zap.Field{
		zap.Int("sessions", r.Sessions), zap.Int("expired_sessions", r.Expired), zap.Int("responses", r.Responses),
		zap.Int64("cached_tokens", r.CachedTokens), zap.Duration("age", r.Age), zap.Duration("took", time.Since(begun)),
	}
	if err != nil || skipped != (journal.Damage{}) {
		p.Logger().Warn("the journal is restored in part", append(fields, zap.Int("lost_entries", skipped.Entries),
			zap.Int("lost_records", skipped.Records), zap.Error(err))...)
		return
	}
	p.Logger().Info("the journal is restored", fields...)
}

// restorer restores one log.
type restorer struct {
	Restored
	pool       *Pool
	settings   *Settings
	begun      time.Time
	lastRecord time.Time

	byID      map[uint64]*restoredWorker // as the records name them now
	byDial    map[string]*restoredWorker
	bindings  map[affinity.Key]*restoredBinding
	prompts   []restoredPrompt // in the order of their ends
	limits    *quota.Book      // what tenants had used
	learned   *journal.State
	learnedAt time.Time
	blocks    []uint64 // scratch
}

// restoredWorker is a worker of the log.
type restoredWorker struct {
	upstream    *worker.Worker // nil if it is none
	isNew       bool
	saved       journal.Worker
	lostPrompts int // so many of the prompts are not in its cache any more
	// models are those that it listed last, nil if it had no list.
	models []journal.Model
}

// target returns a target by its present name.
func (w *restoredWorker) target(rank uint32) kvscore.Target {
	return kvscore.Target{Worker: w.upstream.ID, Rank: rank}
}

// restoredBinding is a binding of the log.
type restoredBinding struct {
	affinity.Saved
	worker   *restoredWorker
	lastUsed time.Time
}

// restoredPrompt is a prompt that a worker's engine has computed.
type restoredPrompt struct {
	*journal.Prompt
	worker  *restoredWorker
	rank    uint32
	tokens  int64
	matched int
}

func (r *restorer) read(rec *journal.Record) {
	if rec.At.After(r.lastRecord) {
		r.lastRecord = rec.At
	}
	w := r.byID[rec.Target.Worker]
	switch b := rec.Body.(type) { // a drain ends with its process, and of a request, the end counts
	case *journal.Head:
		r.byID = make(map[uint64]*restoredWorker)
	case *journal.Address:
		r.byID[rec.Target.Worker] = r.worker(string(*b))
	case *journal.End:
		r.ended(w, rec.Booking, b)
	case *affinity.Saved:
		r.bound(w, rec, b)
	case *journal.Response:
		if w.upstream != nil {
			r.pool.Responses.follow(keptResponse{b.Hash, w.target(rec.Target.Rank), b.Session})
		}
	case *[]journal.Model:
		w.models = *b
	case *quota.Change:
		r.limits.Apply(0, r.past(rec.At), *b)
	case *quota.State:
		r.limits.Merge(r.past(rec.At), b)
	case *journal.State:
		r.state(b, rec.At)
	case *journal.Lost:
		w.lostPrompts = len(r.prompts)
	}
}

// bound notes that a session is bound, used or unbound.
func (r *restorer) bound(w *restoredWorker, rec *journal.Record, s *affinity.Saved) {
	switch b := r.bindings[s.Key]; {
	case rec.Kind == journal.KindBound:
		s.Target.Rank = rec.Target.Rank
		r.bindings[s.Key] = &restoredBinding{*s, w, rec.At.Add(-s.Idle)}
	case rec.Kind == journal.KindUnbound:
		delete(r.bindings, s.Key)
	case b != nil:
		b.lastUsed = rec.At
	}
}

// past returns a time that is not after the start: the clock may have been set back since.
func (r *restorer) past(t time.Time) time.Time {
	if t.After(r.begun) {
		return r.begun
	}
	return t
}

// state takes what was learned. With another boot id, an engine has lost its cache.
func (r *restorer) state(s *journal.State, at time.Time) {
	r.learned, r.learnedAt = s, at
	for i := range s.Workers {
		was := &s.Workers[i]
		w := r.worker(was.Dial)
		if was.BootID != "" && w.saved.BootID != "" && was.BootID != w.saved.BootID {
			w.lostPrompts = len(r.prompts)
		}
		was.BootID = cmp.Or(was.BootID, w.saved.BootID)
		w.saved = *was
	}
}

func (r *restorer) worker(dial string) *restoredWorker {
	w := r.byDial[dial]
	if w == nil {
		w = &restoredWorker{saved: journal.Worker{Dial: dial, Seen: r.begun}}
		w.upstream, w.isNew = r.pool.upstream(dial)
		r.byDial[dial] = w
	}
	return w
}

// ended notes the prompt and the answer of a request.
func (r *restorer) ended(w *restoredWorker, b *journal.Booking, end *journal.End) {
	if !end.Computed || b.Prompt == nil || w == nil || w.upstream == nil { // w: a new epoch began meanwhile
		return
	}
	if !b.Text { // the blocks have a known length
		end.Tokens, end.AnswerTokens = 0, 0
	}
	r.prompts = append(r.prompts, restoredPrompt{b.Prompt, w, b.Target.Rank, end.Tokens, b.Matched})
	if end.Answer != nil {
		end.Answer.Weight = cmp.Or(end.Answer.Weight, b.Prompt.Weight)
		r.prompts = append(r.prompts, restoredPrompt{end.Answer, w, b.Target.Rank, end.AnswerTokens, -1})
	}
}

func (r *restorer) finish(ctx context.Context, head *journal.Head) {
	p := r.pool
	p.Quota.Restore(time.Now(), r.limits, len(r.settings.Share.Servers) > 0)
	if r.learned != nil {
		p.restoreLearned(r.learned, r.begun.Sub(r.learnedAt), func(dial string) *worker.Worker { return r.byDial[dial].upstream })
	}
	for _, w := range r.byDial {
		if w.upstream != nil {
			recallModels(w.upstream, w.models)
		}
	}
	var ended []*restoredBinding
	for _, b := range r.bindings {
		if !r.binding(b) {
			ended = append(ended, b)
		}
	}
	r.Responses = p.Responses.Count()
	finish(&p.kept.restoring)
	var static []*worker.Worker
	for _, w := range r.byDial {
		if w.upstream != nil && r.settings.Upstreams[w.upstream.Dial] {
			static = append(static, w.upstream)
		}
	}
	worker.AwaitProbes(ctx, firstProbes, static) // they show which engine it is, and its capacity
	for _, b := range ended {
		p.Closer.Ended(b.Key, &b.Want, affinity.Expired)
	}
	hasCache := make(map[*restoredWorker]bool)
	for _, w := range r.byDial {
		if w.upstream == nil {
			continue
		}
		if w.isNew {
			w.upstream.See(w.saved.Seen.Unix())
		}
		hasCache[w] = p.recallBootID(w.upstream, w.saved.BootID)
	}
	if r.Age > oldestCaches || head.TextBlock != r.settings.TextBlock {
		return
	}
	for i := 0; i < len(r.prompts) && ctx.Err() == nil; i++ {
		if w := r.prompts[i].worker; hasCache[w] && i >= w.lostPrompts {
			r.prompt(&r.prompts[i])
		}
		runtime.Gosched()
	}
}

// restoreLearned takes over what was learned some time ago.
func (p *Pool) restoreLearned(s *journal.State, age time.Duration, at func(dial string) *worker.Worker) {
	now := make(map[uint64]*worker.Worker) // by the id then
	for i := range s.Workers {
		now[s.Workers[i].ID] = at(s.Workers[i].Dial)
	}
	l := s.Learned
	l.Targets = nil
	for _, one := range s.Learned.Targets {
		if w := now[one.Target.Worker]; w != nil {
			one.Target.Worker = w.ID
			one.Age += max(0, age)
			l.Targets = append(l.Targets, one)
		}
	}
	p.Scheduler.RestoreLearned(time.Now(), &l)
	p.Ratios.Restore(s.Ratios)
}

func (r *restorer) prompt(one *restoredPrompt) {
	r.blocks = one.Append(r.blocks[:0])
	r.CachedTokens += r.pool.Scheduler.Caches().Recall(one.worker.target(one.rank), &cache.Past{
		Root: one.Root, Blocks: r.blocks, Past: one.Past, Weight: one.Weight, Tokens: one.tokens, Matched: one.matched,
	})
}

// binding restores a binding. It returns false if that is over, and was engine-backed.
func (r *restorer) binding(b *restoredBinding) (ok bool) {
	if b.worker.upstream == nil {
		return true
	}
	b.Target = b.worker.target(b.Target.Rank)
	b.Idle = max(0, r.begun.Sub(b.lastUsed))
	engineBacked := b.Kind == affinity.EngineBacked
	if b.Idle >= b.TTL {
		r.Expired++
		return !engineBacked
	}
	if r.pool.Sessions.Restore(&b.Saved) {
		r.Sessions++
	} else if engineBacked {
		r.pool.Closer.Ended(b.Key, &b.Want, affinity.Replaced)
	}
	return true
}

// finish ends the waiting for what is being restored.
func finish(done *atomic.Pointer[chan struct{}]) {
	if over := done.Swap(nil); over != nil {
		close(*over)
	}
}

// Restores returns whether the journal of an earlier run is being read.
func (p *Pool) Restores() bool { return p.kept.reading.Load() != nil }

// AwaitJournal waits until all that the journal has of an earlier run is restored.
func (p *Pool) AwaitJournal(ctx context.Context) {
	if over := p.kept.reading.Load(); over != nil {
		select {
		case <-*over:
		case <-ctx.Done():
		}
	}
}

// AwaitRestored waits until the bindings of an earlier run are restored, for a while. Without them,
// the turn of an engine-backed session would go to another engine.
func (p *Pool) AwaitRestored(ctx context.Context) {
	over := p.kept.restoring.Load()
	if over == nil {
		return
	}
	select {
	case <-*over:
	case <-time.After(turnsWithin):
	case <-ctx.Done():
	}
}
