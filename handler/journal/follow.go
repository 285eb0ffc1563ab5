package journal

import (
	"bytes"
	"cmp"
	"maps"
	"math"
	"runtime/debug"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/quota"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

const (
	// silence is the time after which a router without entries has ended. Each sends one a heartbeat.
	silence = 5 * time.Second
	// remembered is how long a silent router stays in lists.
	remembered = 5 * time.Minute
	// maxPeers bounds the routers. Those beyond it are ignored.
	maxPeers = 256
	// maxLate bounds the age of a record when it is applied.
	maxLate = 15 * time.Minute
)

// Sent is what one router appended to a stream at a time.
type Sent struct {
	Router uint64 // a random id of its process
	Number uint64 // 1, 2, 3 ... of each router
	// Epoch is the Number with which its current epoch started; 0 is unknown.
	Epoch uint64
	// Entries are records, by an [Encoder]. They may be empty: the router lives.
	Entries []byte
}

// Follower applies the records of other routers to one pool, through the same calls as own requests.
// So they count alike in loads, cache models and what is learned. One goroutine may use it.
type Follower struct {
	Scheduler *kvscore.Scheduler
	// Sessions may be nil.
	Sessions *affinity.Bindings
	// Limits are what tenants have used.
	Limits *quota.Book
	// Worker returns the id here of the worker at an address, and false if it is none of the pool's.
	Worker func(dial string) (id uint64, ok bool)
	// Refuse says why a router with that head is not followed; nil if it is.
	Refuse func(*Head) error
	// Other gets the records that the Follower does not apply itself. These are KindState, and
	// KindResponse, KindLost, KindDrained and KindModels of a worker of the pool.
	Other func(r *Record, worker uint64)

	// Memory bounds what is kept of all routers, in bytes. Beyond it, the Follower gives up the router
	// that takes most, or a silent one. Default: 256 MiB, or an eighth of the process's memory limit
	// if that is less.
	Memory int64

	// Began gets the worker of each request that begins. It returns what is called at the end. It may be nil.
	Began func(worker uint64) (over func())
	// Pays gets who pays for a request. It returns what is called after its end. It may be nil.
	Pays func(*Payer, *kvscore.Lease) (over func())
	// Refused gets each router that is not followed for a while.
	Refused func(*Peer)
	// Joined gets each router that has sent its first epoch while this one followed.
	Joined func(*Peer)

	peers      map[uint64]*peer
	otherBytes int64 // of all peers but the one that is read
	selection  kvscore.Selection
	blocks     []uint64
}

// Peer is how another router fares.
type Peer struct {
	ID       uint64    `json:"-"`
	Name     string    `json:"name"`
	Seen     time.Time `json:"-"`
	Requests int       `json:"requests"` // under way
	Reported uint64    `json:"reported_requests"`
	// Late is the time from an event to its application here, in milliseconds, at least: what
	// differs from the earliest.
	Late    float64 `json:"late_ms"`
	Missed  uint64  `json:"missed_entries,omitzero"`
	Refused string  `json:"refused,omitempty"`
	Live    bool    `json:"live"`
}

// PeerStates are the states of routers.
var PeerStates = []string{"live", "silent", "refused"}

// State returns one of PeerStates.
func (p *Peer) State() string {
	switch {
	case !p.Live:
		return PeerStates[1]
	case p.Refused != "":
		return PeerStates[2]
	}
	return PeerStates[0]
}

type peer struct {
	Peer
	decoder         Decoder
	number          uint64
	epoch           uint64            // the number with which the current one started
	head            Head              // of the epoch; zero before the first one
	workers         map[uint64]uint64 // ids here, by those there; nil while it is refused, or the start of its epoch is unknown
	headSeen        bool
	refusedSince    time.Time // zero if it is not refused
	refusalReported bool      // to Follower.Refused

	// clockLag is the least of own clock less the router's, in milliseconds, in this epoch.
	clockLag int64
	lagKnown bool
}

// Take applies what another router has sent. past: it was sent before this router read the stream.
func (f *Follower) Take(now time.Time, s *Sent, past bool) {
	p := f.peers[s.Router]
	if p == nil {
		if len(f.peers) >= maxPeers {
			return
		}
		if f.peers == nil {
			f.peers = make(map[uint64]*peer)
		}
		p = &peer{Peer: Peer{ID: s.Router}}
		f.reset(p)
		f.peers[s.Router] = p
	}
	if p.number != 0 && s.Number <= p.number {
		return // twice
	}
	if p.number != 0 && s.Number > p.number+1 {
		p.Missed += s.Number - p.number - 1
		f.forget(p) // some ends may be missing
	}
	p.number, p.Seen, p.Live = s.Number, now, true
	if s.Epoch != 0 && s.Epoch != s.Number && s.Epoch != p.epoch {
		p.workers = nil // the start of its epoch is missing, and so is what its numbers mean
	}
	if f.Memory == 0 {
		f.Memory = min(4*PastBytes, debug.SetMemoryLimit(-1)/8)
	}
	f.otherBytes = f.bytes() - p.decoder.bytes()
	first := true
	_, _ = p.decoder.Read(bytes.NewReader(s.Entries), func(r *Record) bool { // a buffer has no errors
		if first && !past {
			p.compareClocks(now, r)
			first = false
		}
		if h, starts := r.Body.(*Head); starts {
			f.startEpoch(p, h, past)
		} else if p.workers != nil || r.Kind == KindQuota || r.Kind == KindTenant {
			// it is not refused, and the start of its epoch is known; what tenants use counts in any case
			f.apply(p, r, now.Add(-p.late(now, r.At, past)), past)
		}
		return true
	})
	if !p.headSeen && p.decoder.Damage.Entries > 0 && p.refusedSince.IsZero() {
		p.Refused, p.refusedSince = "what it tells is damaged, or of another version", now
	}
}

// reset makes a router one of which nothing is known. It is followed again from its next epoch on.
func (f *Follower) reset(p *peer) {
	f.forget(p)
	p.decoder, p.workers = Decoder{Aborted: p.abort}, nil
	p.decoder.grown = func() {
		if f.otherBytes+p.decoder.bytes() > f.Memory {
			f.evict()
			f.otherBytes = f.bytes() - p.decoder.bytes()
		}
	}
}

func (f *Follower) forget(p *peer) {
	p.decoder.Forget()
	f.Limits.EndRouter(p.ID)
}

func (f *Follower) bytes() (n int64) {
	for _, p := range f.peers {
		n += p.decoder.bytes()
	}
	return n
}

// evict gives up routers until the rest is within the memory.
func (f *Follower) evict() {
	weight := func(p *peer) int64 {
		if n := p.decoder.bytes(); p.Live || n == 0 {
			return n
		}
		return math.MaxInt64 // nothing more may come of it
	}
	for f.bytes() > f.Memory {
		worst := slices.MaxFunc(slices.Collect(maps.Values(f.peers)), func(a, b *peer) int {
			return cmp.Compare(weight(a), weight(b))
		})
		f.reset(worst)
		worst.Refused, worst.refusedSince = "it tells more than there is memory for", worst.Seen
	}
}

// compareClocks notes how far the router's clock is behind at most. Clocks drift, so it does so
// anew in each epoch.
func (p *peer) compareClocks(now time.Time, r *Record) {
	d := now.UnixMilli() - r.At.UnixMilli()
	if r.Kind == KindEpoch || !p.lagKnown {
		p.clockLag, p.lagKnown = d, true
	}
	p.clockLag = min(p.clockLag, d)
	p.Late = float64(d - p.clockLag)
}

// late returns how long ago the time of a record was.
func (p *peer) late(now, at time.Time, past bool) time.Duration {
	d := now.UnixMilli() - at.UnixMilli()
	if !past {
		d -= p.clockLag
	}
	return min(max(0, time.Duration(d)*time.Millisecond), maxLate)
}

// abort ends the lease of a request whose end will not come.
func (p *peer) abort(b *Booking) {
	if l := p.takeLease(b); l != nil {
		l.End(false, nil)
		b.callAfterEnd()
	}
}

// callAfterEnd ends what a Follower's Pays has begun.
func (b *Booking) callAfterEnd() {
	if b.afterEnd != nil {
		b.afterEnd()
		b.afterEnd = nil
	}
}

// takeLease takes the lease of a request that ends; nil if it has none.
func (p *peer) takeLease(b *Booking) *kvscore.Lease {
	l := b.lease
	if l == nil {
		return nil
	}
	b.lease = nil
	p.Requests--
	if b.onEnd != nil {
		b.onEnd()
	}
	return l
}

func (f *Follower) apply(p *peer, r *Record, at time.Time, past bool) {
	id, known := p.workers[r.Target.Worker]
	if r.Kind.ofWorker() && !known {
		return
	}
	switch b := r.Body.(type) {
	case *Address:
		delete(p.workers, r.Target.Worker)
		if id, ok := f.Worker(string(*b)); ok {
			p.workers[r.Target.Worker] = id
		}
	case *Booking:
		f.applyBooking(p, b, id, at)
	case *Answered:
		if l := r.Booking.lease; l != nil {
			applyAnswered(l, b, at)
		}
	case *Payer:
		if of := r.Booking; of.lease != nil && of.afterEnd == nil && f.Pays != nil {
			of.afterEnd = f.Pays(b, of.lease)
		}
	case *End:
		f.applyEnd(p, r.Booking, b, at)
	case *affinity.Saved:
		if b.Target = (kvscore.Target{Worker: id, Rank: r.Target.Rank}); f.Sessions != nil {
			f.applyBinding(r.Kind, b)
		}
	case *State:
		if past { // later, this router learns itself
			f.Other(r, 0)
		}
	case *quota.Change:
		if past { // others or the log know as a whole what was used before this router came
			b.Requests, b.Tokens = 0, 0
		}
		f.Limits.Apply(p.ID, at, *b)
	case *quota.State:
		f.Limits.Merge(at, b)
	default:
		f.Other(r, id)
	}
}

// startEpoch starts a router's epoch, maybe of a new run.
func (f *Follower) startEpoch(p *peer, h *Head, past bool) {
	if p.head.Run != h.Run {
		f.Limits.EndRouter(p.ID)
	}
	strange := !p.headSeen || p.Refused != "" || p.head.agrees(h) != nil // then it may have refused this router
	p.Name, p.Refused, p.head = h.Name, "", *h
	if err := f.Refuse(h); err != nil {
		p.Refused, p.workers = err.Error(), nil
		f.forget(p)
		if p.refusedSince.IsZero() {
			p.refusedSince = p.Seen
		}
	} else {
		p.workers, p.epoch, p.refusedSince = make(map[uint64]uint64), p.number, time.Time{}
	}
	if strange && p.Refused == "" && !past {
		f.Joined(&p.Peer)
	}
	p.headSeen = true
}

func (f *Follower) applyBooking(p *peer, b *Booking, worker uint64, at time.Time) {
	r := kvscore.Request{Streamed: b.Streamed, ExpectedTokens: b.Expected, Phase: b.Phase, Remote: true}
	r.Tokens = b.Tokens
	if b.Prompt != nil {
		f.blocks = b.Prompt.Append(f.blocks[:0])
		r.Root, r.Blocks, r.Past = b.Prompt.Root, f.blocks, b.Prompt.Past
		r.Weights, r.BlockTokens = cache.Same(b.Prompt.Weight), float64(b.Prompt.Weight)/1000
		if b.Text {
			r.Weights.Kinds = new([cache.Kinds]int32)
			for i := range r.Weights.Kinds {
				r.Weights.Kinds[i] = r.Weights.All
			}
		}
	}
	_, b.lease = f.Scheduler.Select(at, &r, []kvscore.TargetRef{{Target: kvscore.Target{Worker: worker, Rank: b.Target.Rank}}}, 0, nil, &f.selection)
	p.Requests++
	p.Reported++
	if f.Began != nil {
		b.onEnd = f.Began(worker)
	}
}

func applyAnswered(l *kvscore.Lease, a *Answered, at time.Time) {
	switch a.Sign {
	case kvscore.SignFirstToken:
		l.FirstToken(at)
	case kvscore.SignAnswered:
		l.Answered(at, a.Tokens)
	case kvscore.SignPrefilled:
		l.Prefilled(at)
	}
}

func (f *Follower) applyEnd(p *peer, b *Booking, e *End, at time.Time) {
	l := p.takeLease(b)
	if l == nil {
		return
	}
	n := kvscore.Counts{Prompt: e.Tokens, Cached: max(0, e.Cached), CachedReported: e.Cached >= 0, Answer: e.AnswerTokens}
	var answer []uint64
	if e.Answer != nil {
		f.blocks = e.Answer.Append(f.blocks[:0])
		answer, n.AnswerPast = f.blocks, e.Answer.Past
	}
	l.Output(at, e.Output)
	l.Counted(n)
	l.End(e.Computed, answer)
	b.callAfterEnd()
}

func (f *Follower) applyBinding(k Kind, b *affinity.Saved) {
	switch k { //nolint:exhaustive // the others are no bindings
	case KindUsed:
		f.Sessions.FollowUse(b.Key)
	case KindUnbound:
		f.Sessions.FollowEnd(b.Key, b.Version)
	case KindBound:
		f.Sessions.Follow(b)
	}
}

// Expire gives up routers that are silent, and returns those that became so.
func (f *Follower) Expire(now time.Time) (silent []Peer) {
	for id, p := range f.peers {
		age := now.Sub(p.Seen)
		if age > silence && p.Live {
			f.forget(p)
			p.Live = false
			silent = append(silent, p.Peer)
		}
		if p.Live && !p.refusalReported && !p.refusedSince.IsZero() && now.Sub(p.refusedSince) > silence { // at a start, sizes may change
			p.refusalReported = true
			f.Refused(&p.Peer)
		}
		if age > remembered || age > silence && !p.headSeen {
			delete(f.peers, id)
		}
	}
	return silent
}

// Close gives up all routers.
func (f *Follower) Close() {
	for _, p := range f.peers {
		f.forget(p)
	}
	f.peers = nil
}

// Peers returns the routers, in no order.
func (f *Follower) Peers() (list []Peer) {
	for _, p := range f.peers {
		list = append(list, p.Peer)
	}
	return list
}
