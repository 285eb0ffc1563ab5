package journal

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/quota"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"github.com/zeebo/xxh3"
)

// memory is a stream in memory.
type memory struct {
	mu      sync.Mutex
	changed *sync.Cond
	keys    *Keys
	sent    []Sent
	broken  bool // it fails
	drop    bool // it loses what is appended
}

func newMemory() *memory {
	m := new(memory)
	m.changed = sync.NewCond(&m.mu)
	return m
}

func (m *memory) set(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f()
	m.changed.Broadcast()
}

var errBroken = errors.New("it is broken")

func (m *memory) Keys(_ context.Context, own Keys) (Keys, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.broken {
		return own, errBroken
	}
	if m.keys == nil {
		m.keys = &own
	}
	return *m.keys, nil
}

func (m *memory) Append(_ context.Context, s *Sent) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.broken {
		return errBroken
	}
	if !m.drop {
		m.sent = append(m.sent, Sent{s.Router, s.Number, s.Epoch, slices.Clone(s.Entries)})
	}
	m.changed.Broadcast()
	return nil
}

func (m *memory) Read(ctx context.Context, from string, wait time.Duration, each func(*Sent)) (string, error) {
	at, _ := strconv.Atoi(from)
	m.mu.Lock()
	defer m.mu.Unlock()
	ctx, end := context.WithTimeout(ctx, wait)
	defer end()
	defer context.AfterFunc(ctx, func() { m.set(func() {}) })()
	for at >= len(m.sent) && !m.broken && ctx.Err() == nil {
		m.changed.Wait()
	}
	if m.broken {
		return from, errBroken
	}
	for ; at < len(m.sent); at++ {
		each(&m.sent[at])
	}
	return strconv.Itoa(at), nil
}

func (m *memory) Trim(context.Context, int64) error { return nil }
func (m *memory) Close()                            {}

// router is a scheduler and a store with what shares them.
type router struct {
	*kvscore.Scheduler
	*Sharer
	journal  Journal
	sessions *affinity.Bindings
	end      context.CancelFunc
	ended    chan struct{}
	keys     Keys
}

var hosts = []kvscore.Target{{Worker: 1}, {Worker: 2}, {Worker: 3}}

func startRouter(t *testing.T, m *memory, name string, blockSize int) *router {
	t.Helper()
	r := &router{Scheduler: kvscore.NewScheduler(kvscore.Settings{BlockSize: blockSize}), ended: make(chan struct{})}
	store, err := affinity.NewBindings(affinity.Options{Journal: &r.journal})
	if err != nil {
		t.Fatal(err)
	}
	r.sessions = store
	r.SetJournal(&r.journal)
	for _, h := range hosts {
		r.Declare(h, 100_000)
	}
	r.keys = Keys{Secret: affinity.NewSecret(), Seed: rand.Uint64()}
	var mu sync.Mutex
	r.Sharer = &Sharer{
		Name: name,
		Dial: func() (Stream, error) { return m, nil },
		Keys: func() Keys {
			mu.Lock()
			defer mu.Unlock()
			return r.keys
		},
		Adopt: func(k Keys) {
			mu.Lock()
			defer mu.Unlock()
			r.keys = k
		},
		Source: &Source{
			Head: func() *Head { return &Head{TextBlock: 64, BlockSize: blockSize} }, Dial: named,
			State: func() *State { return new(State) },
			Bindings: func(e *Encoder, at time.Time, _ time.Duration) {
				for _, h := range hosts {
					e.Worker(at, h.Worker, named(h.Worker))
				}
				store.Dump(func(part []affinity.Saved) bool {
					for i := range part {
						e.Write(&Record{Kind: KindBound, At: at, Target: part[i].Target, Body: &part[i]}, nil)
					}
					return true
				})
			},
			Tenants: func(*Encoder, time.Time, time.Duration) {},
		},
		Follower: &Follower{
			Scheduler: r.Scheduler, Sessions: store, Limits: new(quota.Book), Other: func(*Record, uint64) {},
			Worker: func(dial string) (id uint64, ok bool) {
				_, err := fmt.Sscanf(dial, "10.0.0.%d", &id)
				return id, err == nil && id <= 3
			},
		},
		Failed: func(error) {}, Silent: func(*Peer) {}, Refused: func(*Peer) {},
	}
	var ctx context.Context
	ctx, r.end = context.WithCancel(context.Background())
	o := r.journal.Open(true)
	go func() {
		defer close(r.ended)
		r.Run(ctx, o)
	}()
	t.Cleanup(r.stop)
	return r
}

func (r *router) stop() {
	r.end()
	<-r.ended
}

// book books a prompt on a target.
func (r *router) book(at kvscore.Target, blocks []uint64) *kvscore.Lease {
	var sel kvscore.Selection
	p := cache.Prompt{Root: 1, Blocks: blocks, BlockTokens: 16, Tokens: int64(16 * len(blocks))}
	_, l := r.Select(time.Now(), &kvscore.Request{Prompt: p, Streamed: true}, r.Refs(at), 0, nil, &sel)
	return l
}

// overlap returns the tokens of a prompt that the cache model has on a target.
func (r *router) overlap(at kvscore.Target, blocks []uint64) int64 {
	p := &cache.Prompt{Root: 1, Blocks: blocks, BlockTokens: 16, Tokens: int64(16*len(blocks)) + 1, Weights: cache.Same(16_000)}
	var sel kvscore.Selection
	r.Explain(time.Now(), &kvscore.Request{Prompt: *p}, r.Refs(at), 0, new(kvscore.LeastLoad), &sel)
	return sel.Candidates[0].OverlapTokens
}

func (r *router) running(at kvscore.Target) kvscore.Booked {
	l, _ := r.Load(time.Now(), at)
	return l.Booked
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(what)
		}
	}
}

func someBlocks(n int) []uint64 {
	b := make([]uint64, n)
	for i := range b {
		b[i] = rand.Uint64()
	}
	return b
}

// TestRoutersKnowWhatOthersDo has two routers that share from the start, and a third that joins.
func TestRoutersKnowWhatOthersDo(t *testing.T) {
	t.Parallel() // it waits
	m := newMemory()
	a, b := startRouter(t, m, "a", 16), startRouter(t, m, "b", 16)
	eventually(t, "they do not meet", func() bool { return len(a.Status().Peers) == 1 && len(b.Status().Peers) == 1 })
	prompt := someBlocks(300)
	before := b.Stats().Timings
	l := a.book(hosts[1], prompt[:200])
	eventually(t, "no booking", func() bool {
		load := b.running(hosts[1])
		return load.Requests == 1 && load.Remote == 1 && load.PrefillTokens == 3200 && load.PromptBlocks > 199
	})
	if own := a.running(hosts[1]); own.Remote != 0 || own.Requests != 1 {
		t.Errorf("its own request came back: %+v", own)
	}
	time.Sleep(50 * time.Millisecond)
	l.FirstToken(time.Now())
	eventually(t, "no first token", func() bool { return b.running(hosts[1]).PrefillTokens == 0 })
	l.Output(time.Now(), 160)
	l.Counted(kvscore.Counts{Prompt: 3200, CachedReported: true, Answer: 3360})
	l.End(true, prompt[:210])
	eventually(t, "no end", func() bool { return b.running(hosts[1]).Requests == 0 })
	if got := b.overlap(hosts[1], prompt); got != 3360 {
		t.Errorf("%d tokens of the conversation are known", got)
	}
	if got := b.Stats().Timings - before; got != 1 {
		t.Errorf("it has learned from %d first tokens", got)
	}
	p := cache.Prompt{Root: 1, Blocks: prompt[:100], BlockTokens: 16, Tokens: 1600}
	_, l = a.Select(time.Now(), &kvscore.Request{Prompt: p, Streamed: true, Phase: kvscore.PhaseDecode}, a.Refs(hosts[2]), 0, nil, new(kvscore.Selection))
	eventually(t, "no decode phase", func() bool {
		load := b.running(hosts[2])
		return load.Requests == 1 && load.PrefillTokens == 0 && load.PromptBlocks > 99
	})
	l.End(false, nil)
	key := affinity.Key{7}
	_, ok, err := a.sessions.Bind(key, 0, affinity.Want{Target: hosts[2], TTL: time.Minute})
	if !ok || err != nil {
		t.Fatal(err)
	}
	var bound affinity.Binding
	eventually(t, "no binding", func() bool {
		bound, ok = b.sessions.Peek(key)
		return ok && bound.Target == hosts[2]
	})
	open := a.book(hosts[0], prompt[:10])

	c := startRouter(t, m, "c", 16) // it reads the past
	eventually(t, "the third does not know the conversation", func() bool { return c.overlap(hosts[1], prompt) == 3360 })
	eventually(t, "nor the binding", func() bool {
		_, ok = c.sessions.Peek(key)
		return ok
	})
	eventually(t, "nor what is under way", func() bool { return c.running(hosts[0]).Remote == 1 })
	if _, ok, err = c.sessions.Bind(key, bound.Version, affinity.Want{Target: hosts[0], TTL: time.Minute}); !ok || err != nil {
		t.Fatal("it cannot move the session", err)
	}
	for _, r := range []*router{a, b} {
		eventually(t, "the session has not moved", func() bool {
			bound, _ := r.sessions.Peek(key)
			return bound.Target == hosts[0]
		})
	}
	a.stop()
	eventually(t, "its requests stay", func() bool { return b.running(hosts[0]).Requests+c.running(hosts[0]).Requests == 0 })
	open.End(false, nil)
}

// TestStreamsFail breaks the stream in all the ways in which it can break. Afterwards, all routers
// know the same.
func TestStreamsFail(t *testing.T) {
	t.Parallel() // it waits
	m := newMemory()
	a, b := startRouter(t, m, "a", 16), startRouter(t, m, "b", 16)
	eventually(t, "they do not meet", func() bool { return len(a.Status().Peers) == 1 && len(b.Status().Peers) == 1 })
	prompt := someBlocks(100)
	for _, harm := range []struct{ break_, mend func() }{
		{func() { m.broken = true }, func() { m.broken = false }},
		{func() { m.drop = true }, func() { m.drop = false }},
		{func() {
			for range 1000 {
				m.sent = append(m.sent, Sent{rand.Uint64N(100), rand.Uint64N(9) + 1, 0, binary.BigEndian.AppendUint64(nil, rand.Uint64())})
			}
		}, func() {}},
	} {
		l := a.book(hosts[0], prompt)
		eventually(t, "no booking", func() bool { return b.running(hosts[0]).Requests == 1 })
		m.set(harm.break_)
		l.End(true, nil)
		time.Sleep(1200 * time.Millisecond)
		m.set(harm.mend)
		eventually(t, "its requests stay", func() bool { return b.running(hosts[0]).Requests == 0 })
		l = a.book(hosts[1], prompt)
		eventually(t, "it sends nothing any more", func() bool { return b.running(hosts[1]).Requests == 1 && b.overlap(hosts[1], prompt) == 1600 })
		l.End(true, nil)
		eventually(t, "it sends no end", func() bool { return b.running(hosts[1]).Requests == 0 })
	}
	other := startRouter(t, m, "other", 32)
	eventually(t, "routers with other blocks are not refused", func() bool {
		s := other.Status()
		return len(s.Peers) >= 2 && slices.ContainsFunc(s.Peers, func(p Peer) bool { return p.Name == "a" && p.Refused != "" })
	})
}

// TestRefusedRoutersJoinLater has a router begin with blocks of another size, which its engines then correct.
// Until then it has refused this one, so it counts as one that joins. This one may learn the size before it, or after.
func TestRefusedRoutersJoinLater(t *testing.T) {
	joined, own := 0, 32
	_, f := aFollower()
	f.Joined = func(*Peer) { joined++ }
	f.Refuse = func(h *Head) error {
		if h.BlockSize != own {
			return errors.New("other blocks")
		}
		return nil
	}
	var e Encoder
	for i, want := range []struct{ own, size, joined int }{
		{32, 16, 0}, {32, 32, 1}, {32, 32, 1}, {32, 16, 1}, {32, 32, 2}, {16, 16, 3}, {32, 32, 4}, {32, 32, 4},
	} {
		own = want.own
		e.StartEpoch(time.Now(), &Head{BlockSize: want.size})
		number := uint64(i + 1) //nolint:gosec // small
		f.Take(time.Now(), &Sent{Router: 1, Number: number, Epoch: number, Entries: e.Entry()}, false)
		if joined != want.joined {
			t.Errorf("after epoch %d: joined %d times, want %d", i, joined, want.joined)
		}
	}
}

// TestRoutersOfOtherVersions has a router of another version of the format, in whose place one of this version comes.
func TestRoutersOfOtherVersions(t *testing.T) {
	_, f := aFollower()
	var refused []Peer
	f.Refused = func(p *Peer) { refused = append(refused, *p) }
	now := time.Now()
	for i := range uint64(8) {
		now = now.Add(time.Second)
		var e Encoder
		e.StartEpoch(now, &Head{Name: "r"})
		b := e.Entry()
		if i < 7 {
			b[4]--
		}
		f.Take(now, &Sent{Router: 1, Number: i + 1, Entries: b}, false)
		f.Expire(now)
	}
	if p := f.Peers()[0]; len(refused) != 1 || refused[0].Refused == "" || p.Refused != "" || p.Name != "r" {
		t.Errorf("refused %+v, then %+v", refused, p)
	}
}

// TestClocksMayDiffer follows a router whose clock is a minute ahead, or behind. Its requests take as
// long as there.
func TestClocksMayDiffer(t *testing.T) {
	for _, ahead := range []time.Duration{0, time.Minute, -time.Minute} {
		var j Journal
		o := j.Open(true)
		s, f := aFollower()
		var e Encoder
		number := uint64(0)
		send := func(now time.Time) {
			o.Write(&e, named)
			number++
			f.Take(now, &Sent{Router: 1, Number: number, Entries: e.Entry()}, false)
		}
		now := time.Now()
		e.StartEpoch(now.Add(ahead), new(Head))
		send(now.Add(50 * time.Millisecond)) // its epoch starts late
		for i := range 30 {
			now = now.Add(time.Second)
			p := &cache.Prompt{Root: 1, Blocks: someBlocks(200), BlockTokens: 16, Tokens: 3200}
			id := j.Booked(now.Add(ahead), hosts[0], p, &cache.View{Findings: cache.Findings{Tokens: 3200}}, true, 0, kvscore.PhaseWhole)
			late := time.Duration(i%2) * 30 * time.Millisecond
			if late == 0 { // else both are sent at once
				send(now)
			}
			j.Answered(id, now.Add(ahead+100*time.Millisecond), kvscore.SignFirstToken, 0)
			j.Clock = func() time.Time { return now.Add(ahead + 100*time.Millisecond) }
			j.Ended(id, true, 1, kvscore.Counts{Prompt: 3200, CachedReported: true}, nil)
			send(now.Add(100*time.Millisecond + late))
		}
		if took, n := s.Stats().Latency.Prefill(3200, 0, 0), s.Stats().Timings; n != 30 || took < 95 || took > 105 {
			t.Errorf("clock %v ahead: %d prefills took %.0f ms", ahead, n, took)
		}
	}
}

// FuzzFollow follows anything. It leaves no load behind.
func FuzzFollow(f *testing.F) {
	w := newWorld(1)
	for range 5 {
		w.turn(time.UnixMilli(1))
	}
	var e Encoder
	e.StartEpoch(time.UnixMilli(0), &Head{})
	w.outlet.Write(&e, named)
	write(&e, records()[11:])
	e.Write(&Record{Kind: KindQuota, Body: &quota.Change{Requests: 1, Running: 1}}, nil)
	e.Write(&Record{Kind: KindPaid, Request: 5, Body: &Payer{Class: "c", Tenant: 7, Weight: 2}}, nil)
	f.Add(slices.Clone(e.entry.Bytes()[headBytes:]))
	f.Fuzz(func(t *testing.T, b []byte) {
		s := kvscore.NewScheduler(kvscore.Settings{})
		follower := &Follower{
			Scheduler: s, Refuse: func(*Head) error { return nil }, Other: func(*Record, uint64) {}, Joined: func(*Peer) {},
			Worker: func(string) (uint64, bool) { return 1, true },
		}
		follower.Limits = new(quota.Book)
		follower.Limits.Set(&quota.Settings{Default: []quota.Limit{{Unit: quota.Tokens, Amount: 5, Per: quota.Day}, {Unit: quota.Concurrent, Amount: 1}}})
		follower.Memory = int64(len(b)) // less than some take
		paying := 0
		follower.Pays = func(by *Payer, _ *kvscore.Lease) func() {
			if paying++; by.Weight < 0 || by.Weight > maxWeight {
				t.Errorf("%+v", by)
			}
			return func() { paying-- }
		}
		for i := range uint64(2) {
			follower.Take(time.Now(), &Sent{Router: i, Number: 1, Entries: entryOf(b)}, i == 0)
			follower.Take(time.Now(), &Sent{Router: i, Number: 2, Entries: b}, i == 0)
			if n := follower.bytes(); n > follower.Memory {
				t.Errorf("%d bytes are kept of %d that were sent", n, len(b))
			}
		}
		follower.Close()
		for _, one := range follower.Limits.Standing(time.Now(), 9).Top {
			if one.Running != 0 {
				t.Errorf("%d requests stay", one.Running)
			}
		}
		if s.Stats().Leases != 0 || paying != 0 {
			t.Errorf("%d leases stay, %d pay", s.Stats().Leases, paying)
		}
	})
}

// TestPayers sends another router the payer of a request, until its end.
func TestPayers(t *testing.T) {
	_, f := aFollower()
	var j Journal
	o := j.Open(true)
	var e Encoder
	n := uint64(0)
	send := func() {
		o.Write(&e, named)
		n++
		f.Take(time.Now(), &Sent{Router: 1, Number: n, Entries: e.Entry()}, false)
	}
	e.StartEpoch(time.Now(), new(Head))
	var payers []Payer
	over := 0
	f.Pays = func(by *Payer, l *kvscore.Lease) func() {
		if payers = append(payers, *by); l.Target() != hosts[1] {
			t.Errorf("on %v", l.Target())
		}
		return func() { over++ }
	}
	want := Payer{Class: "batch", Tenant: 1<<63 + 5, Weight: 2.5}
	p := &cache.Prompt{Root: 1, Blocks: someBlocks(10), BlockTokens: 16, Tokens: 160}
	id := j.Booked(time.Now(), hosts[1], p, &cache.View{Findings: cache.Findings{Tokens: 160}}, true, 0, kvscore.PhaseWhole)
	j.Paid(id, &want)
	if send(); len(payers) != 1 || payers[0] != want || over != 0 {
		t.Fatalf("payers %+v, %d are over", payers, over)
	}
	j.Ended(id, true, 1, kvscore.Counts{}, nil)
	if send(); over != 1 {
		t.Errorf("%d are over", over)
	}
}

// aFollower returns a follower of workers 1 to 3, and its scheduler.
func aFollower() (*kvscore.Scheduler, *Follower) {
	s := kvscore.NewScheduler(kvscore.Settings{BlockSize: 16})
	for _, h := range hosts {
		s.Declare(h, 100_000)
	}
	return s, &Follower{
		Scheduler: s, Limits: new(quota.Book), Refuse: func(*Head) error { return nil }, Joined: func(*Peer) {}, Other: func(*Record, uint64) {},
		Worker: func(dial string) (id uint64, ok bool) {
			_, err := fmt.Sscanf(dial, "10.0.0.%d", &id)
			return id, err == nil && id <= 3
		},
	}
}

// TestLostEpochStart loses the entry with which an epoch of a router starts. The numbers in the next
// ones mean other workers.
func TestLostEpochStart(t *testing.T) {
	s, f := aFollower()
	var j Journal
	o := j.Open(true)
	var e Encoder
	n, epoch := uint64(0), uint64(0)
	startEpoch := func(first, second uint64) {
		at := time.Now()
		e.StartEpoch(at, new(Head))
		e.Worker(at, first, named(first))
		e.Worker(at, second, named(second))
		epoch = n + 1
	}
	send := func(lost bool) {
		o.Write(&e, named)
		n++
		if b := e.Entry(); !lost {
			f.Take(time.Now(), &Sent{Router: 1, Number: n, Epoch: epoch, Entries: b}, false)
		}
	}
	book := func() {
		p := &cache.Prompt{Root: 1, Blocks: someBlocks(10), BlockTokens: 16, Tokens: 160}
		j.Booked(time.Now(), hosts[1], p, &cache.View{Findings: cache.Findings{Tokens: 160}}, true, 0, kvscore.PhaseWhole) // on worker 2
	}
	requests := func(h kvscore.Target) int {
		l, _ := s.Load(time.Now(), h)
		return l.Booked.Requests
	}
	e.NewRun()
	startEpoch(1, 2)
	send(false)
	startEpoch(2, 1)
	send(true)
	book()
	send(false)
	if n := requests(hosts[0]) + requests(hosts[1]); n != 0 {
		t.Errorf("%d requests count, and nobody knows where they are", n)
	}
	startEpoch(2, 1)
	book()
	send(false)
	if requests(hosts[0]) != 0 || requests(hosts[1]) != 1 {
		t.Errorf("%d and %d requests, want 0 and 1", requests(hosts[0]), requests(hosts[1]))
	}
}

// TestHostileEntriesTakeNoMemory has entries that claim millions of earlier prompts.
func TestHostileEntriesTakeNoMemory(t *testing.T) {
	entry := func(started bool) []byte {
		var e Encoder
		if e.StartEpoch(time.UnixMilli(0), new(Head)); !started {
			e.Entry()
		}
		body := binary.LittleEndian.AppendUint32(append([]byte{version}, make([]byte, 8)...), maxPrompts)
		b := append(binary.LittleEndian.AppendUint32(slices.Clone(e.Entry()), uint32(len(body))), body...)
		return binary.LittleEndian.AppendUint64(b, xxh3.Hash(body))
	}
	for _, started := range []bool{false, true} {
		var d Decoder
		if _, err := d.Read(bytes.NewReader(entry(started)), func(*Record) bool { return true }); err != nil || cap(d.prompts) > maxMissing {
			t.Errorf("%v: room for %d prompts, %v", started, cap(d.prompts), err)
		}
	}
}

// TestWritersCannotFillTheMemory has a router that never ends, or never starts a new epoch, beside one that
// behaves.
func TestWritersCannotFillTheMemory(t *testing.T) {
	now := time.Now()
	book := func(e *Encoder, request int, t kvscore.Target, blocks int) {
		b := &Booking{Prompt: &Prompt{Root: 1}}
		e.Write(&Record{Kind: KindBooked, At: now, Target: t, Request: uint64(request), Body: b}, someBlocks(blocks)) //nolint:gosec // small
	}
	for name, grow := range map[string]func(e *Encoder, i int){
		"LongPrompts": func(e *Encoder, i int) { book(e, i, hosts[0], 20_000) },
		"LongPromptsThatEnd": func(e *Encoder, i int) {
			book(e, i, hosts[0], 100)
			end := &End{Computed: true, Answer: new(Prompt)}
			e.Write(&Record{Kind: KindEnded, At: now, Request: uint64(i), Body: end}, someBlocks(20_000)) //nolint:gosec // small
		},
		"LongPromptsInEpochs": func(e *Encoder, i int) {
			e.StartEpoch(now, new(Head))
			e.Worker(now, 1, named(1))
			book(e, i, hosts[0], 20_000)
		},
		"UnknownWorker": func(e *Encoder, i int) {
			e.workers[9] = true
			book(e, i, kvscore.Target{Worker: 9}, 20_000)
		},
		"ShortRequests": func(e *Encoder, i int) {
			for n := range 1000 {
				book(e, 1000*i+n, hosts[0], 0)
			}
		},
		"LostPrompts": func(e *Encoder, i int) {
			e.out(e.Entry())
			e.prompts += maxMissing - 1
			book(e, 1, hosts[0], 1)
		},
		"Workers": func(e *Encoder, i int) {
			for n := range 1000 {
				e.Worker(now, uint64(1000*i+n), named(1)) //nolint:gosec // small
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, f := aFollower()
			f.Memory = 4 << 20
			var good, bad Encoder
			for _, e := range []*Encoder{&good, &bad} {
				e.NewRun()
				e.StartEpoch(now, new(Head))
				e.Worker(now, 1, named(1))
				e.Worker(now, 2, named(2))
			}
			most, refused := int64(0), false
			for i := range 100 {
				book(&good, i, hosts[1], 10)
				f.Take(now, &Sent{Router: 1, Number: uint64(i + 1), Entries: good.Entry()}, false)
				var sent bytes.Buffer
				bad.out = func(b []byte) { sent.Write(b) }
				grow(&bad, i)
				sent.Write(bad.Entry())
				f.Take(now, &Sent{Router: 2, Number: uint64(i + 1), Entries: sent.Bytes()}, false)
				most = max(most, f.bytes())
				refused = refused || f.peers[2].Refused != ""
			}
			if most > f.Memory || most < f.Memory/2 || !refused {
				t.Errorf("up to %d bytes are kept, refused: %v", most, refused)
			}
			if l, _ := s.Load(now, hosts[1]); l.Booked.Requests != 100 {
				t.Errorf("%d requests of the router that behaves are known", l.Booked.Requests)
			}
			f.Expire(now.Add(silence / 2)) // both speak
			f.peers[2].Live = false
			f.Memory = f.bytes() - 1
			if f.evict(); f.peers[1].Refused != "" || f.peers[2].decoder.bytes() != 0 {
				t.Error("a silent router is kept, and another one given up")
			}
			f.Close()
			if n := s.Stats().Leases; n != 0 {
				t.Errorf("%d leases are left", n)
			}
		})
	}
}

// TestServerStartsAnew reads the stream of a server that has lost the old one. Its clock is behind, so
// that the position is ahead of all that comes.
func TestServerStartsAnew(t *testing.T) {
	t.Parallel() // it waits
	m := newMemory()
	for i := range uint64(1000) {
		m.sent = append(m.sent, Sent{Router: 9, Number: 1 + i})
	}
	a := startRouter(t, m, "a", 16)
	read := func() uint64 {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.entriesRead
	}
	eventually(t, "the past is not read", func() bool { return read() > 1000 })
	m.set(func() { m.sent = nil })
	before := read()
	eventually(t, "the new stream is not read", func() bool { return read() > before })
}

// TestPastEnds reads a stream to which others append before each read.
func TestPastEnds(t *testing.T) {
	m := newMemory()
	for i := range uint64(100) {
		m.sent = append(m.sent, Sent{Router: 1 + i%2, Number: 1 + i})
	}
	ctx, end := context.WithCancel(t.Context())
	waits := 0
	_, f := aFollower()
	s := &Sharer{Follower: f, Failed: func(error) {}, Silent: func(*Peer) {}, id: 2, stream: readOne{m, func(wait time.Duration) {
		if wait > 0 {
			end()
		}
		waits++
	}}}
	if s.readAll(ctx); waits > 5 {
		t.Errorf("%d reads of the past", waits)
	}
}

// readOne returns an entry at a time.
type readOne struct {
	*memory
	reads func(time.Duration)
}

func (r readOne) Read(_ context.Context, from string, wait time.Duration, each func(*Sent)) (string, error) {
	r.reads(wait)
	i, _ := strconv.Atoi(from)
	if i < len(r.sent) {
		each(&r.sent[i])
	}
	return strconv.Itoa(i + 1), nil
}
