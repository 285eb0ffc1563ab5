package pool

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/handler/queue"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// bill is what a tenant was charged for a request. It is nothing if no request waited then.
type bill struct {
	account *queue.Account
	work    float64 // milliseconds: see kvscore.Selection.Work
}

// charge charges a request's tenant with work. The caller holds the lock.
func (q *waiters) charge(want *Wants, work float64) bill {
	return bill{q.order.Charge(want.Class, want.Tenant, want.TenantWeight, work, time.Now()), work}
}

// seat charges for a request that gets a seat, or corrects what it was charged when the queue granted
// it. It takes no lock if nothing waits.
func (q *waiters) seat(b *bill, want *Wants, work float64) {
	if b.account != nil {
		q.settle(b, work)
		return
	}
	if q.length.Load() > 0 {
		q.mu.Lock()
		defer q.mu.Unlock()
		*b = q.charge(want, work)
	}
}

// settle corrects what was charged.
func (q *waiters) settle(b *bill, work float64) {
	if b.account == nil {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.order.Settle(b.account, work-b.work)
	b.work = work
}

// maxClasses bounds the classes that the queue knows.
const maxClasses = 256

// know remembers a class, for requests of other routers. The caller holds the lock.
func (q *waiters) know(c *queue.Class) {
	if c == nil || q.classes[c.Name] == c {
		return
	}
	if q.classes == nil || len(q.classes) >= maxClasses {
		q.classes = make(map[string]*queue.Class)
	}
	q.classes[c.Name] = c
}

// paysElsewhere charges a tenant for a request of another router, until over settles it. So several
// routers together are as fair as one.
func (q *waiters) paysElsewhere(by *journal.Payer, l *kvscore.Lease) (over func()) {
	if q.length.Load() == 0 {
		return nil
	}
	want := &Wants{Tenant: by.Tenant, TenantWeight: by.Weight}
	work := queue.RemoteShare * l.Booked()
	q.mu.Lock()
	defer q.mu.Unlock()
	if want.Class = q.classes[by.Class]; want.Class == nil || !want.Class.Background {
		q.workers.foreground.Store(time.Now().UnixNano())
	}
	if want.Class == nil && by.Class != "" {
		return nil // no request of the class has waited here
	}
	b := q.charge(want, work)
	if b.account == nil {
		return nil
	}
	return func() { q.settle(&b, queue.RemoteShare*l.Work(time.Now())) }
}
