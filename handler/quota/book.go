package quota

import (
	"cmp"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// maxAccounts bounds the accounts, and so the memory: about 300 bytes each.
	maxAccounts = 1 << 16
	// sampled is how many accounts a new one looks at, to forget those that are idle.
	sampled = 8
	// shownName bounds the names that are kept to be shown, in bytes.
	shownName = 128
	// maxUsage is the largest plausible number of tokens of one request. A larger one is no usage.
	maxUsage = 1 << 24
	// firstTypical is the expected answer of a tenant that has had none, in tokens, and learns the
	// weight of each further one.
	firstTypical, learns = 256, 0.1
	// reportEvery is the least time between two reports that a tenant is refused.
	reportEvery = time.Hour
)

// Book has the accounts of all tenants. The zero value limits nothing. Its methods may be called at
// the same time.
type Book struct {
	// Journal gets the changes, to share and to keep them. It may be nil.
	Journal Journal

	rules atomic.Pointer[rules]

	most int // accounts; 0 stands for maxAccounts

	mu        sync.Mutex
	began     time.Time // when the book's time begins
	accounts  map[Key]*account
	peers     map[uint64]map[Key]int // requests under way at other routers
	refused   [units]uint64
	forgotten uint64 // accounts, for want of room
}

// Journal keeps what changes.
type Journal interface {
	// Charged takes a change of an account. remote says that it is another router's.
	Charged(now time.Time, c Change, remote bool)
	// AccountState takes how an account stands, as another router reports it.
	AccountState(now time.Time, s State)
}

// Set replaces the settings. What was used stays used.
func (b *Book) Set(s *Settings) { b.rules.Store(rulesOf(s)) }

// Weight returns the weight of a tenant in the queue.
func (b *Book) Weight(tenant uint64) float64 {
	if r := b.rules.Load(); r != nil {
		if t := r.tenants[tenant]; t.Weight != 0 {
			return t.Weight
		}
	}
	return 1
}

// Limits returns whether any tenant has a limit.
func (b *Book) Limits() bool {
	r := b.rules.Load()
	return r != nil && r.any
}

// Ask is what a request needs, before it is computed.
type Ask struct {
	Name   string // of the tenant
	Tenant uint64 // its Hash
	Class  string // the name of the request's class
	// Prompt are the prompt's tokens, about. Answer is the most that the answer may have; 0 is
	// unknown. Choices is how many answers are computed, 0 if none is.
	Prompt, Answer int64
	Choices        int
}

// expected returns the tokens of the answer, as far as the tenant's earlier ones show.
func (a *Ask) expected(typical float64) int64 {
	n := int64(math.Ceil(typical)) * int64(a.Choices)
	if a.Answer > 0 {
		n = min(n, min(a.Answer, maxUsage)*int64(a.Choices))
	}
	return min(n, maxUsage)
}

// Reservation is what one request may use. One goroutine may use it. A nil one is of a tenant without
// limits.
type Reservation struct {
	Figures
	book   *Book
	key    Key
	began  time.Time
	prompt int64 // reserved
	answer int64
	ended  bool
}

// Figures are what an answer says of a tenant's limits, by Requests and Tokens. Each is the limit of
// which least remains.
type Figures [2]Figure

// Figure is how one limit stands. It is the zero value without a limit.
type Figure struct {
	Set              bool
	Limit, Remaining int64
	Reset            time.Duration // until nothing of it is used
}

// Exceeded is the error of a request that a limit forbids.
type Exceeded struct { //nolint:errname // the field's word
	Figures
	Limit Limit
	// Wait is the time after which the request may be within the limit. It is 0 if that is never so.
	Wait   time.Duration
	Needs  int64 // tokens of the prompt, if it is too long for the limit
	Tenant string
	// First says that the tenant was not refused for a while.
	First bool
}

// Error implements error.
func (e *Exceeded) Error() string {
	switch {
	case e.Wait > 0:
		return fmt.Sprintf("the limit of %s is reached; try again in %s", e.Limit, shown(e.Wait))
	case e.Needs > 0:
		return fmt.Sprintf("the prompt has about %d tokens, and the limit is %s", e.Needs, e.Limit)
	}
	return fmt.Sprintf("the limit is %s", e.Limit)
}

// concurrentWait is what a client is told to wait if too many of its requests are under way.
const concurrentWait = time.Second

// Reserve reserves what a request needs, or refuses it. The reservation is nil if the tenant has no
// limit. Otherwise it must be settled or dropped.
func (b *Book) Reserve(now time.Time, ask *Ask) (*Reservation, *Exceeded) {
	r := b.rules.Load()
	if r == nil || !r.any {
		return nil, nil
	}
	k := Key{ask.Tenant, r.classes[ask.Class]}
	if len(r.limitsOf(k)) == 0 {
		return nil, nil
	}
	res := &Reservation{book: b, key: k, began: now, prompt: min(max(0, ask.Prompt), maxUsage)}
	var refused *Exceeded
	b.with(now, k, func(a *account, t moment) {
		if a.name == "" {
			a.name = ask.Name[:min(len(ask.Name), shownName)]
		}
		a.advance(t)
		res.answer = ask.expected(a.typical)
		if refused = a.exceeds(t, res); refused != nil {
			b.refuse(a, t, refused)
			return
		}
		a.add(Change{Requests: 1, Tokens: res.prompt + res.answer}, t)
		a.running++
		res.Figures = a.figures(t)
	})
	if refused != nil {
		return nil, refused
	}
	b.changed(now, Change{Key: k, Requests: 1, Tokens: res.prompt + res.answer, Running: 1}, false)
	return res, nil
}

// refuse counts a refusal. The lock is held.
func (b *Book) refuse(a *account, t moment, e *Exceeded) {
	a.refused++
	b.refused[e.Limit.Unit]++
	if e.First = a.reportedAt == 0 || t.book-a.reportedAt > int64(reportEvery); e.First {
		a.reportedAt = max(1, t.book)
	}
	e.Figures, e.Tenant = a.figures(t), a.name
}

// exceeds returns why a request is not within the limits; nil if it is. The limit with the longest wait
// counts. An answer that is expected to be too long for a limit is no reason: it may be shorter.
func (a *account) exceeds(t moment, res *Reservation) *Exceeded {
	worst, wait := -1, time.Duration(0)
	for i := range a.limits {
		if forbids, until := a.forbids(i, t, res); forbids && (worst < 0 || until > wait) {
			worst, wait = i, until
		}
	}
	if worst < 0 {
		return nil
	}
	e := &Exceeded{Limit: a.limits[worst]}
	if wait < forever {
		e.Wait = wait
	} else if e.Limit.Unit == Tokens {
		e.Needs = res.prompt
	}
	return e
}

// forever is the wait for what never comes.
const forever = time.Duration(math.MaxInt64)

// forbids returns whether a limit forbids a request, and for how long.
func (a *account) forbids(i int, t moment, res *Reservation) (bool, time.Duration) {
	l, need := &a.limits[i], int64(1)
	switch {
	case l.Unit == Concurrent && l.Amount > 0:
		return int64(a.running+a.remote) >= l.Amount, concurrentWait
	case l.Unit == Tokens && res.prompt <= l.Amount:
		need = min(res.prompt+res.answer, l.Amount)
	case l.Unit == Tokens:
		need = res.prompt
	}
	if l.Amount == 0 || need > l.Amount {
		return true, forever
	}
	wait := a.meters[i].wait(l, t, float64(l.Amount-need))
	return wait > 0, wait
}

// figures returns how the limits stand. The meters are those of now.
func (a *account) figures(t moment) (f Figures) {
	for i := range a.limits {
		l, m := &a.limits[i], &a.meters[i]
		if l.Unit == Concurrent {
			continue
		}
		left := max(0, l.Amount-int64(math.Ceil(m.used)))
		if to := &f[l.Unit]; !to.Set || left < to.Remaining {
			*to = Figure{true, l.Amount, left, m.wait(l, t, 0)}
		}
	}
	return f
}

// Usage is what a request has used. Counts of tokens are the engine's, -1 if it reported none.
type Usage struct {
	Prompt, Completion, Cached int64
	// Seen are the tokens of the answer that were seen as it passed.
	Seen int64
	// Whole says that the answer came to its end, unseen or not.
	Whole bool
}

// Settle charges what a request has used, in place of what was reserved. It returns false if the
// engine's counts are impossible: then the estimate counts. Only the first call counts.
func (r *Reservation) Settle(now time.Time, u Usage) (plausible bool) {
	if r == nil || r.ended {
		return true
	}
	plausible = true
	for _, n := range []*int64{&u.Prompt, &u.Completion, &u.Cached} {
		if *n < -1 || *n > maxUsage {
			*n, plausible = -1, false
		}
	}
	prompt, completion := u.Prompt, u.Completion
	if prompt < 0 {
		prompt = r.prompt
	}
	switch {
	case completion >= 0:
	case u.Seen > 0 || !u.Whole:
		completion = min(max(0, u.Seen), maxUsage)
	default: // nothing of it could be read
		completion = r.answer
	}
	if cached := min(u.Cached, prompt); cached > 0 {
		weight := r.book.rules.Load().cached
		prompt -= int64(float64(cached) * (1 - weight))
	}
	r.end(now, Change{Tokens: prompt + completion - r.prompt - r.answer}, completion)
	return plausible
}

// Refused ends a request that its engine has refused. It counts as a request without tokens.
func (r *Reservation) Refused(now time.Time) {
	if r != nil {
		r.end(now, Change{Tokens: -r.prompt - r.answer}, 0)
	}
}

// Drop ends a request that reached no engine. It counts for nothing.
func (r *Reservation) Drop(now time.Time) {
	if r != nil {
		r.end(now, Change{Requests: -1, Tokens: -r.prompt - r.answer}, 0)
	}
}

func (r *Reservation) end(now time.Time, c Change, answer int64) {
	if r.ended {
		return
	}
	r.ended = true
	c.Key, c.Running, c.Age = r.key, -1, max(0, now.Sub(r.began))
	r.book.with(now, c.Key, func(a *account, t moment) {
		a.add(c, t)
		a.running = max(0, a.running-1)
		if answer > 0 {
			a.typical += learns * (float64(answer) - a.typical)
		}
	})
	r.book.changed(now, c, false)
}

func (b *Book) changed(now time.Time, c Change, remote bool) {
	if b.Journal != nil {
		b.Journal.Charged(now, c, remote)
	}
}

// moment returns a time as meters compare it. The lock is held.
func (b *Book) moment(t time.Time) moment {
	if b.began.IsZero() {
		b.began = t.Add(-time.Nanosecond) // the first moment is not 0
	}
	return moment{t, int64(t.Sub(b.began))}
}

// with does something to an account, which is new if there was none. Nobody else uses the book meanwhile.
func (b *Book) with(now time.Time, k Key, do func(*account, moment)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	r, t, a := b.rules.Load(), b.moment(now), b.accounts[k]
	if a == nil {
		if b.accounts == nil {
			b.accounts = make(map[Key]*account)
		}
		b.makeRoom(t, r)
		a = &account{typical: firstTypical}
		b.accounts[k] = a
	}
	a.follow(r, k)
	do(a, t)
}

// makeRoom looks at a few accounts, and forgets those that say nothing. If there are too many accounts, it
// forgets one more: that with the least use of its limits among those without a request under way.
func (b *Book) makeRoom(t moment, r *rules) {
	var least Key
	part, found, n := 0.0, false, 0
	full := len(b.accounts) >= cmp.Or(b.most, maxAccounts)
	for k, a := range b.accounts { // in random order
		if n++; n > sampled && (!full || found || n > 8*sampled) {
			break
		}
		a.follow(r, k)
		a.advance(t)
		if a.idle() {
			delete(b.accounts, k)
			full = false
			continue
		}
		if p := a.used(); a.running == 0 && a.remote == 0 && (!found || p < part) {
			least, part, found = k, p, true
		}
	}
	if full && found {
		delete(b.accounts, least)
		b.forgotten++
	}
}
