// Package queue orders the requests that wait for a worker. It knows neither workers nor clocks.
//
// The order of two requests is that of the first rule by which they differ:
//
//  1. Background classes come after all others.
//  2. Tier, the lower one first.
//  3. Class: the one with the least service for its weight.
//  4. Tenant: the one with the least service for its weight. Among tenants that differ by less than
//     slack, the earliest latest start. So a deadline never buys more than a fair share.
//  5. Within a tenant, the earliest time. With a deadline that is the latest start, deadline - cost.
//     Without one it is arrival + kappa x cost. Kappa is half of how many requests wait for each one
//     that runs: what it costs them if this one goes first. The arrival in it is the ageing.
//
// Service is work in milliseconds. It counts only while requests wait: what is used while nobody
// waits is taken from nobody. A tenant or class that comes back from idle begins with the least
// service of those that wait. It has no credit from before. This is start-time fair queueing
// (Goyal, Vin, Cheng: SIGCOMM 1996) with the lift of VTC (Sheng and others: OSDI 2024). What other
// routers serve counts, too: see RemoteShare.
//
// A tenant or class is light if it comes with less service than those that wait: it takes less than its share.
// While light ones come, the others have a surplus, which must not fill the engines: see HasSurplus.
package queue

import (
	"cmp"
	"container/heap"
	"math"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// slack is the difference of service, in milliseconds, within which deadlines decide.
const slack = 500

// RemoteShare is the share of other routers' work that a router charges. With all of it, routers that have once
// charged two tenants unequally would stay so. Each could serve only one tenant, and together they would be fair.
// But what the other tenant sent to that router would wait until the first one has nothing there.
const RemoteShare = 0.95

// lightFor is how long a surplus leaves room for a light tenant or class after it came.
const lightFor = 30 * time.Second

// aged is the share of what a request costs those behind it that counts against its age. With 1, the
// longest waits in overload are up to 1.24 times as long, for nothing in the mean.
const aged = 0.5

// latePatience is after how many times its target a late request is as urgent as those in time.
const latePatience = 4

// Entry is a request that waits. The queue does not change what the caller sets.
type Entry struct {
	Class  *Class // nil is a class without a name
	Tenant uint64 // a hash of its name
	Weight float64
	Tier   int
	// Arrival is when the request came. It may have a head start.
	Arrival time.Time
	// Deadline of its first token; zero is none.
	Deadline time.Time
	// Cost is the work before its first token, in milliseconds.
	Cost float64
	// Surplus is the room that the request needs if it is of its tenant's surplus.
	Surplus kvscore.Room
	// Lane is a comparable value. Workers that may serve a request may serve all of its lane.
	Lane  any
	Value any

	flow   *flow
	key    time.Time // see rule 5
	number uint64
	index  int
	late   bool // see checkLate
}

// Queue is requests that wait, in order. It is not safe for concurrent use.
type Queue struct {
	// Parallel is how many requests start at a time, about: the number of targets.
	Parallel int

	lanes       []*lane // in order of coming
	byKey       map[any]*lane
	services    map[string]*service // of classes
	accounts    map[account]*Account
	length      int
	entered     uint64
	lastService float64   // the service that the class served last had then
	lastLight   time.Time // when a request of a light tenant or class last came
}

// lane is the requests that the same workers may serve.
type lane struct {
	key   any
	bands []*band // in order, none empty
	room  kvscore.Room
}

// band is the requests of a lane that no class nor tenant parts.
type band struct {
	background bool
	tier       int
	classes    []*flows // none empty
}

// flows are the tenants of a class in a band: a heap by service.
type flows struct {
	service *service
	band    *band
	heap    []*flow
}

// flow is the requests of one tenant there: a heap by key.
type flow struct {
	account *Account
	class   *flows
	lane    *lane
	heap    []*Entry
	number  uint64 // in order of coming
	index   int    // in class.heap; -1 before it is there
}

// service is what a class has used.
type service struct {
	name        string
	weight      float64
	used        float64 // for its weight
	lastService float64 // the service that the tenant served last had then
	waiting     int
	cost        float64   // of those that wait
	lastLight   time.Time // when a request last came while the class was light
}

// account names a tenant in a class.
type account struct {
	class  string
	tenant uint64
}

// Account is the service of a tenant in a class.
type Account struct {
	account
	service *service
	used    float64 // for its weight
	weight  float64
	waiting int
	cost    float64 // of those that wait
	flows   []*flow
}

// Len returns how many requests wait.
func (q *Queue) Len() int { return q.length }

// Push adds a request that waits.
func (q *Queue) Push(e *Entry, now time.Time) {
	if q.byKey == nil {
		q.byKey = make(map[any]*lane)
		q.begin()
	}
	a := q.account(e.Class, e.Tenant, e.Weight)
	q.noteLight(e.Class, a, now)
	if a.service.waiting == 0 {
		a.service.used = max(a.service.used, q.leastClassService())
	}
	if a.waiting == 0 {
		a.used = max(a.used, q.leastTenantService(a.service))
	}
	a.waiting++
	a.service.waiting++
	a.cost += e.Cost
	a.service.cost += e.Cost
	q.length++
	q.entered++
	e.number, e.late = q.entered, false
	e.key = e.Arrival.Add(ms(aged * (0.5 + float64(a.waiting)/float64(max(1, q.Parallel))) * e.Cost))
	if !e.Deadline.IsZero() {
		e.key = e.Deadline.Add(-ms(e.Cost))
		e.checkLate(now)
	}
	n := q.flow(e, a)
	e.flow = n
	heap.Push((*entries)(&n.heap), e)
	if n.index < 0 {
		heap.Push((*byService)(&n.class.heap), n)
	}
}

// Remove removes a request. It does nothing if the request does not wait.
func (q *Queue) Remove(e *Entry) {
	n := e.flow
	if n == nil {
		return
	}
	e.flow = nil
	heap.Remove((*entries)(&n.heap), e.index)
	a := n.account
	a.waiting--
	a.service.waiting--
	a.cost -= e.Cost
	a.service.cost -= e.Cost
	q.length--
	if len(n.heap) == 0 {
		q.drop(n)
	}
	if a.waiting == 0 {
		a.cost = 0 // without errors of rounding
	}
	if a.service.waiting == 0 {
		a.service.cost = 0
	}
	if q.length == 0 { // all begin anew
		q.begin()
	}
}

func (q *Queue) begin() {
	q.services, q.accounts, q.lastService = make(map[string]*service), make(map[account]*Account), 0
}

// leastClassService returns the least service of a class that waits; if none does, of the one served last.
func (q *Queue) leastClassService() float64 {
	least := math.Inf(1)
	for _, s := range q.services {
		if s.waiting > 0 {
			least = min(least, s.used)
		}
	}
	if math.IsInf(least, 1) {
		return q.lastService
	}
	return least
}

// leastTenantService returns the least service of a tenant of a class that waits; if none does, of the one
// served last.
func (q *Queue) leastTenantService(s *service) float64 {
	least := math.Inf(1)
	for _, l := range q.lanes {
		for _, b := range l.bands {
			for _, c := range b.classes {
				if c.service == s {
					least = min(least, c.heap[0].account.used)
				}
			}
		}
	}
	if math.IsInf(least, 1) {
		return s.lastService
	}
	return least
}

// First returns the first request of the lanes that may start; nil if there is none. may says whether a lane
// has a room. It is asked for more room only if the lane has less. Lanes that are not apart have the same room.
// There, no request passes one that waits for more: see MayPass.
func (q *Queue) First(may func(lane any, room kvscore.Room) bool, apart bool, now time.Time) *Entry {
	var best, bound *flow
	for _, l := range q.lanes {
		l.room = kvscore.NoRoom
		for l.room < kvscore.Empty && may(l.key, l.room+1) {
			l.room++
		}
		if l.room > kvscore.NoRoom && !apart {
			bound = l.firstByService(bound)
		}
	}
	for _, l := range q.lanes {
		if l.room == kvscore.NoRoom {
			continue
		}
		n := l.first(now, func(n *flow) bool {
			return (n.heap[0].Surplus <= l.room || !q.hasSurplus(n.account, now)) && (bound == nil || bound.yieldsTo(n.class, n.account.used))
		})
		if n != nil && (best == nil || n.precedes(best)) {
			best = n
		}
	}
	if best == nil {
		return nil
	}
	return best.heap[0]
}

// MayPass returns whether a request that comes may start before those of some lanes that wait for more room. It may if
// First would find it there.
func (q *Queue) MayPass(c *Class, tenant uint64, tier int, in func(lane any) bool) bool {
	var bound *flow
	for _, l := range q.lanes {
		if in(l.key) {
			bound = l.firstByService(bound)
		}
	}
	own := 0.0 // it has no service if it is not known
	if a := q.accounts[account{c.name(), tenant}]; a != nil {
		own = a.used
	}
	of := &band{background: c.isBackground(), tier: tier}
	return bound == nil || bound.yieldsTo(&flows{service: q.services[c.name()], band: of}, own)
}

// firstByService returns the first request of the lane by service alone, or least if that is before it.
func (l *lane) firstByService(least *flow) *flow {
	c := l.bands[0].first()
	n := c.heap[0]
	if least == nil || cmp.Or(c.band.compare(least.class.band), c.service.compare(least.class.service), cmp.Compare(n.account.used, least.account.used)) < 0 {
		return n
	}
	return least
}

// yieldsTo returns whether a tenant with some service, in a class that may be nil, may pass n.
func (n *flow) yieldsTo(in *flows, used float64) bool {
	switch c := in.band.compare(n.class.band); {
	case c != 0:
		return c < 0
	case in.service != n.class.service:
		return in.service == nil || in.service.used <= n.class.service.used
	}
	return used <= n.account.used+slack
}

// HasSurplus returns whether more requests of the tenant wait than can start at once. While light tenants come, that is
// enough. If another class is light, the requests of all tenants of the class count. Otherwise they must be a
// quarter of those that wait, which makes shares more even.
func (q *Queue) HasSurplus(c *Class, tenant uint64, now time.Time) bool {
	a := q.accounts[account{c.name(), tenant}]
	return a != nil && q.hasSurplus(a, now)
}

func (q *Queue) hasSurplus(a *Account, now time.Time) bool {
	waiting := a.waiting
	if now.Sub(q.lastLight) >= lightFor {
		return waiting > q.Parallel && 4*waiting > q.length && waiting < q.length
	}
	for _, s := range q.services {
		if s != a.service && now.Sub(s.lastLight) < lightFor {
			waiting = a.service.waiting
		}
	}
	return waiting > q.Parallel
}

// noteLight notes whether a tenant or its class is light. Background classes have what others leave, and are not.
func (q *Queue) noteLight(c *Class, a *Account, now time.Time) {
	switch {
	case c.isBackground() || a.waiting > 0:
	case a.service.used+slack < q.lastService:
		q.lastLight, a.service.lastLight = now, now
	case a.used+slack < a.service.lastService:
		q.lastLight = now
	}
}

// All calls f for each request, in no order. f must not change the queue.
func (q *Queue) All(f func(*Entry)) {
	for _, l := range q.lanes {
		for _, b := range l.bands {
			for _, c := range b.classes {
				for _, n := range c.heap {
					for _, e := range n.heap {
						f(e)
					}
				}
			}
		}
	}
}

// Last returns the request that a full queue gives up. It is the last one of the tenant with the most
// requests for its weight, of those of a background class if one waits.
func (q *Queue) Last() *Entry {
	var most *flow
	for _, l := range q.lanes {
		b := l.bands[len(l.bands)-1]
		for _, c := range b.classes {
			for _, n := range c.heap {
				if most == nil || n.after(most) {
					most = n
				}
			}
		}
	}
	if most == nil {
		return nil
	}
	var last *Entry
	for _, n := range most.account.flows { // in all lanes
		if n.class.band.compare(most.class.band) == 0 {
			if e := slices.MaxFunc(n.heap, (*Entry).compare); last == nil || e.compare(last) > 0 {
				last = e
			}
		}
	}
	return last
}

// Charge charges a tenant with work while requests wait. It returns the account to settle, nil if
// nothing waits.
func (q *Queue) Charge(c *Class, tenant uint64, weight, work float64, now time.Time) *Account {
	if q.length == 0 {
		return nil
	}
	a := q.account(c, tenant, weight)
	q.noteLight(c, a, now)
	if a.service.lastService = max(a.service.lastService, a.used); !c.isBackground() {
		q.lastService = max(q.lastService, a.service.used)
	}
	a.add(work)
	return a
}

// Settle adds work to an account, less than 0 if the charge was too high.
func (q *Queue) Settle(a *Account, work float64) {
	if a != nil && q.accounts[a.account] == a { // else nothing has waited meanwhile
		a.add(work)
	}
}

func (a *Account) add(work float64) {
	a.service.used += work / a.service.weight
	a.used += work / a.weight
	for _, n := range a.flows {
		heap.Fix((*byService)(&n.class.heap), n.index)
	}
}

// mostAsked is of how many tenants Ahead finds out what waits. Of more, they stand for all.
const mostAsked = 256

// Ahead returns how much work, in milliseconds, would start before the request if it came now. That
// is what waits of its tenant, and as much of each other tenant of its class for its weight. Other
// classes add as much for theirs.
func (q *Queue) Ahead(e *Entry) float64 {
	own, weight := 0.0, positive(e.Weight)
	if a := q.accounts[account{e.Class.name(), e.Tenant}]; a != nil {
		own = a.cost
	}
	asked, tenants := 0, 0.0
	for _, a := range q.accounts { // they come in random order
		if a.class == e.Class.name() && a.tenant != e.Tenant {
			tenants += min(a.cost, (own+e.Cost)*a.weight/weight)
		}
		if asked++; asked == mostAsked {
			tenants *= float64(len(q.accounts)) / mostAsked
			break
		}
	}
	class, others, classes := own+tenants, 0.0, 0.0
	for _, s := range q.services {
		if s.name != e.Class.name() {
			others, classes = others+s.cost, classes+1
		}
	}
	return class + min(others, (class+e.Cost)*classes/e.Class.weight())
}

// Tenants calls f for each tenant that waits.
func (q *Queue) Tenants(f func(class string, tenant uint64, service float64)) {
	for _, a := range q.accounts {
		if a.waiting > 0 {
			f(a.class, a.tenant, a.used)
		}
	}
}

// mostIdle bounds the accounts that are kept of tenants that do not wait.
const mostIdle = 4096

func (q *Queue) account(c *Class, tenant uint64, weight float64) *Account {
	name := account{c.name(), tenant}
	a := q.accounts[name]
	if a == nil {
		if len(q.accounts) > q.length+mostIdle {
			q.forget()
		}
		s := q.services[name.class]
		if s == nil {
			s = &service{name: name.class, used: q.leastClassService()}
			q.services[name.class] = s
		}
		a = &Account{account: name, service: s, used: q.leastTenantService(s)}
		q.accounts[name] = a
	}
	a.weight, a.service.weight = positive(weight), c.weight()
	return a
}

// forget forgets the tenants that do not wait. Those it should have kept lose what they owe.
func (q *Queue) forget() {
	for name, a := range q.accounts {
		if a.waiting == 0 {
			delete(q.accounts, name)
		}
	}
}

// flow returns where a request waits. The flow may be new, and then in no heap.
func (q *Queue) flow(e *Entry, a *Account) *flow {
	l := q.byKey[e.Lane]
	if l == nil {
		l = &lane{key: e.Lane}
		q.byKey[e.Lane] = l
		q.lanes = append(q.lanes, l)
	}
	for _, n := range a.flows {
		if n.lane == l && n.class.band.tier == e.Tier && n.class.band.background == e.Class.isBackground() {
			return n
		}
	}
	sought := &band{background: e.Class.isBackground(), tier: e.Tier}
	i, found := slices.BinarySearchFunc(l.bands, sought, (*band).compare)
	if !found {
		l.bands = slices.Insert(l.bands, i, sought)
	}
	b := l.bands[i]
	k := slices.IndexFunc(b.classes, func(c *flows) bool { return c.service == a.service })
	if k < 0 {
		k = len(b.classes)
		b.classes = append(b.classes, &flows{service: a.service, band: b})
	}
	n := &flow{account: a, class: b.classes[k], lane: l, number: e.number, index: -1}
	a.flows = append(a.flows, n)
	return n
}

// drop drops a flow without requests.
func (q *Queue) drop(n *flow) {
	heap.Remove((*byService)(&n.class.heap), n.index)
	n.account.flows = slices.DeleteFunc(n.account.flows, func(o *flow) bool { return o == n })
	b := n.class.band
	if len(n.class.heap) == 0 {
		b.classes = slices.DeleteFunc(b.classes, func(c *flows) bool { return c == n.class })
	}
	if len(b.classes) == 0 {
		n.lane.bands = slices.DeleteFunc(n.lane.bands, func(o *band) bool { return o == b })
	}
	if len(n.lane.bands) == 0 {
		delete(q.byKey, n.lane.key)
		q.lanes = slices.DeleteFunc(q.lanes, func(l *lane) bool { return l == n.lane })
	}
}

// first returns the class with the least service.
func (b *band) first() *flows {
	return slices.MinFunc(b.classes, func(a, b *flows) int { return a.service.compare(b.service) })
}

func (s *service) compare(o *service) int {
	return cmp.Or(cmp.Compare(s.used, o.used), cmp.Compare(s.name, o.name))
}

// first returns the tenant whose request is the first of the lane.
func (l *lane) first(now time.Time, may func(*flow) bool) (best *flow) {
	of := l.bands[0].first()
	least := of.heap[0].account.used
	for _, n := range of.heap[:min(len(of.heap), 15)] { // the least ones are there
		if !may(n) || n.account.used > least+slack {
			continue
		}
		if n.checkLate(now); best == nil || n.precedes(best) {
			best = n
		}
	}
	return best
}

// precedes returns whether a tenant's first request comes before another's, of another lane.
func (n *flow) precedes(o *flow) bool {
	a, b := n.account, o.account
	if c := n.class.band.compare(o.class.band); c != 0 {
		return c < 0
	}
	if a.service != b.service {
		return a.service.compare(b.service) < 0
	}
	if a != b {
		if d := a.used - b.used; math.Abs(d) > slack || n.due().Equal(o.due()) {
			return d < 0 || d == 0 && n.heap[0].compare(o.heap[0]) < 0
		}
		return n.due().Before(o.due())
	}
	return n.heap[0].compare(o.heap[0]) < 0
}

// after returns whether a full queue gives up a request of n before one of o.
func (n *flow) after(o *flow) bool {
	if c := n.class.band.compare(o.class.band); c != 0 {
		return c > 0
	}
	return float64(n.account.waiting)/n.account.weight > float64(o.account.waiting)/o.account.weight
}

func (b *band) compare(o *band) int {
	if b.background != o.background {
		if b.background {
			return 1
		}
		return -1
	}
	return cmp.Compare(b.tier, o.tier)
}

// due is the latest start of the first request if it has a deadline.
func (n *flow) due() time.Time {
	if e := n.heap[0]; !e.Deadline.IsZero() {
		return e.key
	}
	return time.Unix(1<<40, 0)
}

// checkLate moves requests that have become late back. Each moves once.
func (n *flow) checkLate(now time.Time) {
	for n.heap[0].checkLate(now) {
		heap.Fix((*entries)(&n.heap), 0)
	}
}

// checkLate gives a request that has just become late a later key. Those that can still be in time
// go before it, but not for ever.
func (e *Entry) checkLate(now time.Time) bool {
	if e.late || e.Deadline.IsZero() || !e.key.Before(now) {
		return false
	}
	e.late = true
	e.key = e.Deadline.Add(latePatience * max(0, e.Deadline.Sub(e.Arrival)))
	return true
}

func (e *Entry) compare(o *Entry) int {
	return cmp.Or(e.key.Compare(o.key), cmp.Compare(e.number, o.number))
}

func ms(f float64) time.Duration { return time.Duration(f * float64(time.Millisecond)) }

func positive(weight float64) float64 {
	if weight > 0 {
		return weight
	}
	return 1
}

// item is what a heap has.
type item[T any] interface {
	comparable
	before(T) bool
	setIndex(index int) // in the heap
}

// ordered is a heap.
type ordered[T item[T]] []T

func (h ordered[T]) Len() int           { return len(h) }
func (h ordered[T]) Less(i, k int) bool { return h[i].before(h[k]) }
func (h ordered[T]) Swap(i, k int) {
	h[i], h[k] = h[k], h[i]
	h[i].setIndex(i)
	h[k].setIndex(k)
}

func (h *ordered[T]) Push(x any) {
	e := x.(T) //nolint:forcetypeassert,errcheck // container/heap has no other types
	e.setIndex(len(*h))
	*h = append(*h, e)
}

func (h *ordered[T]) Pop() any {
	var none T
	n := len(*h) - 1
	e := (*h)[n]
	(*h)[n] = none
	*h = (*h)[:n]
	return e
}

// entries is a heap by key, and flows one by the tenants' service.
type (
	entries   = ordered[*Entry]
	byService = ordered[*flow]
)

func (e *Entry) before(o *Entry) bool { return e.compare(o) < 0 }
func (e *Entry) setIndex(index int)   { e.index = index }

func (n *flow) before(o *flow) bool {
	a, b := n.account, o.account
	return a.used < b.used || a.used == b.used && n.number < o.number
}

func (n *flow) setIndex(index int) { n.index = index }
