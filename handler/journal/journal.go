package journal

import (
	"encoding/binary"
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
	records []record
	blocks  []uint64
}

type record struct {
	at     int64   // Unix milliseconds
	worker *uint64 // whose number it has, nil if none
	live   bool    // only live outlets take it
	disk   bool    // only the others do
	blocks int     // in the batch
	write  func(e *Encoder, at int64, blocks []uint64)
}

// add adds a record for all outlets.
func (j *Journal) add(r record, blocks []uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	r.blocks = len(blocks)
	for _, o := range j.outlets {
		b := &o.batch
		switch {
		case r.live && !o.live || r.disk && o.live:
			continue
		case len(b.records) == maxRecords || len(b.blocks)+len(blocks) > maxWaiting:
			o.lost.Add(1)
			continue
		}
		b.records, b.blocks = append(b.records, r), append(b.blocks, blocks...)
		select {
		case o.wake <- struct{}{}:
		default:
		}
	}
}

// note adds a record without blocks, of a worker or of none.
func (j *Journal) note(worker *uint64, write func(e *Encoder, at int64)) {
	if !j.on.Load() {
		return
	}
	r := record{at: j.now(), worker: worker, write: func(e *Encoder, at int64, _ []uint64) { write(e, at) }}
	j.add(r, nil)
}

// Booked implements [kvscore.Journal].
func (j *Journal) Booked(now time.Time, t kvscore.Target, p *cache.Prompt, v *cache.View, streamed bool, expected int64, phase kvscore.Phase) (request uint64) {
	if !j.on.Load() {
		return 0
	}
	b := &booking{
		target: t, root: p.Root, tokens: v.Tokens, expected: expected, matched: v.Known.Blocks,
		weight: v.NewWeight(p), past: p.Past, streamed: streamed, text: p.Weights.Kinds != nil, phase: phase,
	}
	b.request = j.requests.Add(1)
	j.add(record{at: now.UnixMilli(), worker: &b.target.Worker, write: b.write}, p.Blocks)
	return b.request
}

// Answered implements [kvscore.Journal].
func (j *Journal) Answered(request uint64, now time.Time, how kvscore.Sign, tokens int64) {
	j.add(record{at: now.UnixMilli(), live: true, write: func(e *Encoder, at int64, _ []uint64) {
		e.answered(at, request, how, tokens)
	}}, nil)
}

// Paid records who pays for a request.
func (j *Journal) Paid(request uint64, by *Payer) {
	if request == 0 || !j.live.Load() {
		return
	}
	one := *by
	j.add(record{at: j.now(), live: true, write: func(e *Encoder, at int64, _ []uint64) { e.paid(at, request, &one) }}, nil)
}

// Ended implements [kvscore.Journal].
func (j *Journal) Ended(request uint64, computed bool, tokens int64, n kvscore.Counts, answer []uint64) {
	end := &ending{request: request, computed: computed, tokens: n.Prompt, output: tokens, answerTokens: n.Answer, past: n.AnswerPast, cached: -1}
	if n.CachedReported {
		end.cached = n.Cached
	}
	if n.Answer > n.Prompt && n.Prompt > 0 && len(answer) > 0 {
		end.weight = 1000 * (n.Answer - n.Prompt) / int64(len(answer))
	}
	j.add(record{at: j.now(), write: end.write}, answer)
}

// Bound implements [affinity.Journal].
func (j *Journal) Bound(key affinity.Key, want affinity.Want, v affinity.Version) {
	s := &affinity.Saved{Key: key, Want: want, Version: v}
	j.note(&s.Target.Worker, func(e *Encoder, at int64) { e.Bound(at, s) })
}

// Used implements [affinity.Journal].
func (j *Journal) Used(key affinity.Key) {
	j.note(nil, func(e *Encoder, at int64) { e.key(KindUsed, at, &affinity.Saved{Key: key}) })
}

// Unbound implements [affinity.Journal].
func (j *Journal) Unbound(key affinity.Key, v affinity.Version) {
	j.note(nil, func(e *Encoder, at int64) { e.key(KindUnbound, at, &affinity.Saved{Key: key, Version: v}) })
}

// Kept records a response that the engine of a target keeps.
func (j *Journal) Kept(one Response, t kvscore.Target) {
	j.note(&t.Worker, func(e *Encoder, at int64) { e.Response(at, &one, t) })
}

// LostCache records that a worker has lost its KV cache.
func (j *Journal) LostCache(worker uint64) {
	j.note(&worker, func(e *Encoder, at int64) { e.Lost(at, worker) })
}

// Drained records that the drain of a worker begins or ends, and
// after how many calls of the admin API for it.
func (j *Journal) Drained(worker uint64, drains bool, version uint64) {
	j.note(&worker, func(e *Encoder, at int64) { e.Drained(at, worker, drains, version) })
}

// Lists records a worker's list of its models, nil if it has none.
func (j *Journal) Lists(worker uint64, models []Model) {
	j.note(&worker, func(e *Encoder, at int64) { e.Models(at, worker, models) })
}

// now returns the time in Unix milliseconds.
func (j *Journal) now() int64 {
	if j.Clock != nil {
		return j.Clock().UnixMilli()
	}
	return time.Now().UnixMilli()
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
		own := blocks[:r.blocks]
		blocks = blocks[r.blocks:]
		if r.worker == nil || e.names(r.at, *r.worker, dial) {
			r.write(e, r.at, own)
		}
	}
	return len(b.records) > 0
}

// names makes a worker known. It returns false if that is gone.
func (e *Encoder) names(now int64, id uint64, dial func(id uint64) string) bool {
	if e.Knows(id) {
		return true
	}
	if at := dial(id); at != "" {
		e.Worker(now, id, at)
	}
	return e.Knows(id)
}

// Charged records a change of what a tenant has used. Other routers do not get that of another one.
func (j *Journal) Charged(now time.Time, c quota.Change, remote bool) {
	if !j.on.Load() {
		return
	}
	j.add(record{at: now.UnixMilli(), disk: remote, write: func(e *Encoder, at int64, _ []uint64) { e.change(at, &c) }}, nil)
}

// Stands records how a tenant's account stands, for logs on disk.
func (j *Journal) Stands(now time.Time, s quota.State) {
	if !j.on.Load() {
		return
	}
	j.add(record{at: now.UnixMilli(), disk: true, write: func(e *Encoder, at int64, _ []uint64) { e.Tenant(at, &s) }}, nil)
}

func (e *Encoder) account(k quota.Key) {
	e.fields = binary.LittleEndian.AppendUint64(e.fields, k.Tenant)
	if e.flags(k.Class != 0); k.Class != 0 {
		e.fields = binary.LittleEndian.AppendUint64(e.fields, k.Class)
	}
}

func (e *Encoder) change(at int64, c *quota.Change) {
	e.begin(KindQuota, at)
	e.account(c.Key)
	for _, n := range []int64{c.Requests, c.Tokens, int64(c.Running)} {
		e.fields = binary.AppendVarint(e.fields, n)
	}
	e.number(c.Age.Milliseconds())
	e.end()
}

// Tenant writes how a tenant's account stands.
func (e *Encoder) Tenant(at int64, s *quota.State) {
	e.begin(KindTenant, at)
	e.account(s.Key)
	for _, l := range s.Levels {
		e.fields = binary.AppendVarint(append(e.fields, byte(l.Of)), int64(l.Per))
		e.number(l.Used)
		e.number(l.Period)
	}
	e.end()
}

func (r *reader) account() (k quota.Key) {
	k.Tenant = r.fixed()
	if r.flags()&1 != 0 {
		k.Class = r.fixed()
	}
	return k
}

func (r *reader) change() (c quota.Change) {
	c.Key, c.Requests, c.Tokens = r.account(), r.varint(), r.varint()
	c.Running = int(min(max(r.varint(), -1), 1))
	c.Age = r.millis()
	return c
}

const maxLevels = 64

func (r *reader) tenant() (s quota.State) {
	s.Key = r.account()
	for len(r.b) > 0 && len(s.Levels) < maxLevels {
		of := quota.Unit(r.flags())
		s.Levels = append(s.Levels, quota.Level{Of: of, Per: quota.Window(r.varint()), Used: r.count(), Period: r.count()})
	}
	return s
}
