package journal

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/quota"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// Bounds of what waits for a log. Beyond them, records are lost, and counted.
const (
	maxRecords = 1 << 16
	maxWaiting = 2 << 20 // blocks
)

// Journal gathers the records of one pool for its outlets. Without any, it gathers none. The zero
// value is ready for use. Its methods never wait, but for each other.
//
// It implements [kvscore.Journal] and [affinity.Journal].
type Journal struct {
	// Clock returns the time; nil stands for time.Now.
	Clock func() time.Time

	on   atomic.Bool // there are outlets
	live atomic.Bool // one was live

	requests atomic.Uint64 // numbers given

	mu      sync.Mutex
	outlets []*Outlet
}

// Outlet is where one log takes the records.
type Outlet struct {
	journal *Journal
	live    bool          // it takes KindAnswered and KindPaid, too
	wake    chan struct{} // gets a value when records wait
	lost    atomic.Uint64
	batch   batch // the journal's lock guards it
	spare   batch // of the one that writes
}

// Open returns a new outlet. A live one takes records of KindAnswered and KindPaid, too.
func (j *Journal) Open(live bool) *Outlet {
	o := &Outlet{journal: j, live: live, wake: make(chan struct{}, 1)}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.outlets = append(slices.Clip(j.outlets), o)
	j.on.Store(true)
	if live {
		j.live.Store(true)
	}
	return o
}

// Close ends an outlet, which may be nil. What waits is dropped.
func (o *Outlet) Close() {
	if o == nil {
		return
	}
	j := o.journal
	j.mu.Lock()
	defer j.mu.Unlock()
	j.outlets = slices.DeleteFunc(slices.Clone(j.outlets), func(one *Outlet) bool { return one == o })
	j.on.Store(len(j.outlets) > 0)
}

// Lost returns how many records had no room. The outlet may be nil.
func (o *Outlet) Lost() uint64 {
	if o == nil {
		return 0
	}
	return o.lost.Load()
}

type batch struct {
	records []waiting
	blocks  []uint64
}

// waiting is a record for outlets, which must not change its body.
type waiting struct {
	Record
	blocks int  // in the batch
	live   bool // only live outlets take it
	disk   bool // only the others do
}

// add adds a record for all outlets.
func (j *Journal) add(w waiting, blocks []uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	w.blocks = len(blocks)
	for _, o := range j.outlets {
		b := &o.batch
		switch {
		case w.live && !o.live || w.disk && o.live:
			continue
		case len(b.records) == maxRecords || len(b.blocks)+len(blocks) > maxWaiting:
			o.lost.Add(1)
			continue
		}
		b.records, b.blocks = append(b.records, w), append(b.blocks, blocks...)
		select {
		case o.wake <- struct{}{}:
		default:
		}
	}
}

// note adds a record of the present time, if there are outlets.
func (j *Journal) note(k Kind, at kvscore.Target, body any) {
	if j.on.Load() {
		j.add(waiting{Record: Record{Kind: k, At: j.now(), Target: at, Body: body}}, nil)
	}
}

// Booked implements [kvscore.Journal].
func (j *Journal) Booked(now time.Time, t kvscore.Target, p *cache.Prompt, v *cache.View, streamed bool, expected int64, phase kvscore.Phase) (request uint64) {
	if !j.on.Load() {
		return 0
	}
	request = j.requests.Add(1)
	j.add(waiting{Record: Record{Kind: KindBooked, At: now, Target: t, Request: request, Body: &Booking{
		Prompt: &Prompt{Root: p.Root, Weight: v.NewWeight(p), Past: p.Past},
		Tokens: v.Tokens, Expected: expected, Matched: v.Known.Blocks, Streamed: streamed, Text: p.Weights.Kinds != nil, Phase: phase,
	}}}, p.Blocks)
	return request
}

// Answered implements [kvscore.Journal].
func (j *Journal) Answered(request uint64, now time.Time, how kvscore.Sign, tokens int64) {
	if j.live.Load() {
		j.add(waiting{live: true, Record: Record{Kind: KindAnswered, At: now, Request: request, Body: &Answered{how, tokens}}}, nil)
	}
}

// Paid records who pays for a request.
func (j *Journal) Paid(request uint64, by *Payer) {
	if request == 0 || !j.live.Load() {
		return
	}
	payer := Payer{by.Class[:min(len(by.Class), maxText)], by.Tenant, min(max(by.Weight, 0), maxWeight)}
	j.add(waiting{live: true, Record: Record{Kind: KindPaid, At: j.now(), Request: request, Body: &payer}}, nil)
}

// Ended implements [kvscore.Journal].
func (j *Journal) Ended(request uint64, computed bool, tokens int64, n kvscore.Counts, answer []uint64) {
	end := &End{Computed: computed, Tokens: max(0, n.Prompt), Cached: -1, Output: max(0, tokens), AnswerTokens: max(0, n.Answer)}
	if n.CachedReported {
		end.Cached = max(0, n.Cached)
	}
	if len(answer) > 0 {
		end.Answer = &Prompt{Past: n.AnswerPast}
		if n.Answer > n.Prompt && n.Prompt > 0 {
			end.Answer.Weight = min(1000*(n.Answer-n.Prompt)/int64(len(answer)), math.MaxInt32)
		}
	}
	j.add(waiting{Record: Record{Kind: KindEnded, At: j.now(), Request: request, Body: end}}, answer)
}

// Bound implements [affinity.Journal].
func (j *Journal) Bound(key affinity.Key, want affinity.Want, v affinity.Version) {
	j.note(KindBound, want.Target, &affinity.Saved{Key: key, Want: want, Version: v})
}

// Used implements [affinity.Journal].
func (j *Journal) Used(key affinity.Key) {
	j.note(KindUsed, kvscore.Target{}, &affinity.Saved{Key: key})
}

// Unbound implements [affinity.Journal].
func (j *Journal) Unbound(key affinity.Key, v affinity.Version) {
	j.note(KindUnbound, kvscore.Target{}, &affinity.Saved{Key: key, Version: v})
}

// ResponseKept records a response that the engine of a target keeps.
func (j *Journal) ResponseKept(one Response, t kvscore.Target) {
	j.note(KindResponse, t, &one)
}

// LostCache records that a worker has lost its KV cache.
func (j *Journal) LostCache(worker uint64) {
	j.note(KindLost, kvscore.Target{Worker: worker}, new(Lost))
}

// Drained records that the drain of a worker begins or ends, and
// after how many calls of the admin API for it.
func (j *Journal) Drained(worker uint64, drains bool, version uint64) {
	j.note(KindDrained, kvscore.Target{Worker: worker}, &Drain{drains, version})
}

// ModelsListed records a worker's list of its models, nil if it has none.
func (j *Journal) ModelsListed(worker uint64, models []Model) {
	j.note(KindModels, kvscore.Target{Worker: worker}, &models)
}

// Charged records a change of what a tenant has used. Other routers do not get that of another one.
func (j *Journal) Charged(now time.Time, c quota.Change, remote bool) {
	if j.on.Load() {
		c.Age = max(0, c.Age)
		j.add(waiting{disk: remote, Record: Record{Kind: KindQuota, At: now, Body: &c}}, nil)
	}
}

// AccountState records how a tenant's account stands, for logs on disk.
func (j *Journal) AccountState(now time.Time, s quota.State) {
	if j.on.Load() {
		j.add(waiting{disk: true, Record: Record{Kind: KindTenant, At: now, Body: &s}}, nil)
	}
}

func (j *Journal) now() time.Time {
	if j.Clock != nil {
		return j.Clock()
	}
	return time.Now()
}

func (o *Outlet) take() batch {
	clear(o.spare.records) // they have pointers
	o.journal.mu.Lock()
	defer o.journal.mu.Unlock()
	b := o.batch
	o.batch, o.spare = batch{o.spare.records[:0], o.spare.blocks[:0]}, b
	return b
}

// Write writes what waits, and returns whether there was anything. dial returns the address of a
// worker; it is empty if that is gone. One goroutine may write.
func (o *Outlet) Write(e *Encoder, dial func(id uint64) string) bool {
	b := o.take()
	blocks := b.blocks
	for i := range b.records {
		r := &b.records[i]
		if id := r.Target.Worker; r.Kind.ofWorker() && !e.workers[id] {
			e.Worker(r.At, id, dial(id))
		}
		e.Write(&r.Record, blocks[:r.blocks])
		blocks = blocks[r.blocks:]
	}
	return len(b.records) > 0
}
