package pool

import (
	"cmp"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/queue"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

// LateError is the error of Pool.Seat for a request of a class that refuses late requests.
type LateError struct {
	Class     string
	Predicted time.Duration // until its first token; 0: its time is up
	Left      time.Duration // until its deadline
}

func (e *LateError) Error() string {
	if e.Predicted == 0 {
		return fmt.Sprintf("all workers are full, and none had a free slot within the ttft of class %s", e.Class)
	}
	return fmt.Sprintf("the first token is predicted in %.1f s, and the ttft of class %s leaves %.1f s", e.Predicted.Seconds(), e.Class, max(0, e.Left.Seconds()))
}

// After returns after how long a request may be in time, by the prediction.
func (e *LateError) After() time.Duration { return e.Predicted - e.Left }

// isPromised returns whether the request is refused or demoted if it will be late. A request that a
// worker has already failed is served all the same.
func (w *Wants) isPromised() bool {
	return w.Class != nil && w.Class.Late != queue.Serve && !w.Demoted && !w.Deadline.IsZero() &&
		!w.Again && !w.Rest && w.Kind != worker.KindOther && w.Part != worker.Prefill
}

// isOverdue returns whether the time of such a request is up.
func (w *Wants) isOverdue() bool { return w.isPromised() && w.left(time.Now()) <= 0 }

// within returns how soon the first token of a request must come, in milliseconds, for its class to serve
// it. It is 0 if the class serves it in any case.
func (p *Pool) within(want *Wants, t time.Time) float64 {
	if !want.isPromised() || p.Promises.doubts(want.Class, t) != "" {
		return 0
	}
	return max(1e-3, want.left(t))
}

// left returns how many milliseconds are left until the request's deadline.
func (w *Wants) left(t time.Time) float64 { return w.Deadline.Sub(t).Seconds() * 1e3 }

// predict records when the first token of a request is predicted to come from its chosen candidate. It
// returns whether the request is late and not served in its class. seated: it need not wait in the router.
func (p *Pool) predict(s *Seat, want *Wants, c *Candidates, bound, chosen int, seated bool) (late bool) {
	terms, others := &c.Sel.Candidates[chosen], 0.0
	if !seated && want.Class != nil {
		others = p.queue.ahead(want, terms.PrefillTime)
	}
	if s.Demoted = want.Demoted; s.Predicted.IsZero() {
		s.Predicted = c.At.Add(time.Duration((terms.TTFT() + others) * float64(time.Millisecond)))
		if left := want.left(c.At); !want.Deadline.IsZero() && left > 0 {
			p.Promises.expect(want.class(), (terms.TTFT()+others)/left, c.At)
		}
	}
	if !want.isPromised() {
		return false
	}
	if s.soonest = c.Sel.Soonest(bound) + others; s.soonest <= cmp.Or(c.Sel.Within, want.left(c.At)) {
		return false
	}
	if c.Sel.Within == 0 {
		p.servesLate(want.Class, c.At)
	}
	return c.Sel.Within > 0
}

// Late returns the error with which the pool would refuse a request as late; nil if it would not. waits: it would
// wait in the queue.
func (p *Pool) Late(want *Wants, c *Candidates, bound, chosen int, waits bool) error {
	within, soonest := p.within(want, c.At), c.Sel.Soonest(bound)
	if waits {
		soonest += p.queue.ahead(want, c.Sel.Candidates[chosen].PrefillTime)
	}
	if within == 0 || soonest <= within || want.Class.Late != queue.Refuse {
		return nil
	}
	_, err := late(want, soonest, c.At)
	return err
}

// ahead returns for how many milliseconds other requests of the queue start before the request would, if it
// waited: see [queue.Queue.Ahead]. Work that waits for other models does not count.
func (q *waiters) ahead(want *Wants, cost float64) float64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.order.Len() == 0 {
		return 0
	}
	same := 0
	for _, l := range q.lanes {
		if l.want.Model == want.Model {
			same += l.length
		}
	}
	all := q.order.Ahead(&queue.Entry{Class: want.Class, Tenant: want.Tenant, Weight: want.TenantWeight, Cost: cost})
	return all * float64(same) / float64(q.order.Len()) / float64(max(1, q.order.Parallel))
}

// servesLate records that a request is served although it is predicted to be late.
func (p *Pool) servesLate(class *queue.Class, t time.Time) {
	if why := p.Promises.doubts(class, t); why == incidentOff {
		p.Raise(t, why)
	}
	p.Promises.checks(class.Name, t)
}

// late handles a request that is predicted to be late: it gets another class, or the error is its refusal.
func late(want *Wants, predicted float64, t time.Time) (*Wants, error) {
	if want.Class.Late == queue.Refuse {
		ms := time.Duration(predicted * float64(time.Millisecond))
		return want, &LateError{want.Class.Name, ms, want.Deadline.Sub(t)}
	}
	demoted := *want
	demoted.Class, demoted.Demoted, demoted.Deadline = want.Class.Demote, true, time.Time{}
	if target := demoted.Class.TTFT; target > 0 {
		demoted.Deadline = t.Add(target)
	}
	return &demoted, nil
}

// Promises are how well the first tokens of each class were predicted. No request is refused or demoted
// because of predictions that were not checked or were wrong.
type Promises struct {
	mu      sync.Mutex
	of      map[string]*accuracy
	targets map[string]bool // the classes with a target: see Settings
}

// accuracy is how well the first tokens of a class were predicted.
type accuracy struct {
	off      float64 // the mean of |ln(predicted/actual)|, in which recent ones weigh more
	samples  int
	expected observe.Decaying // predictions, and the sum of their shares of the target
	checked  time.Time        // of the latest sample, or when a late request was last served to get one
}

const (
	// fewSamples are too few to refuse requests.
	fewSamples = 10
	// recentSample is the weight of a sample. The first ones weigh more.
	recentSample = 0.05
	// checkEvery is how often a late request is served if nothing else shows how predictions are.
	checkEvery = 10 * time.Second
	// Below soonEnough and beyond tooLate of a target, the error of a prediction does not matter. While all
	// requests are very late, their times depend on those that come later.
	soonEnough, tooLate = 0.1, 2
)

// Compare records when a first token was predicted and when it came, both from the time when the request
// was ready.
func (p *Promises) Compare(class string, target, predicted, actual time.Duration, now time.Time) {
	least, most := max(soonEnough*target.Seconds(), 1e-3), math.Inf(1)
	if target > 0 {
		most = tooLate * target.Seconds()
	}
	matters := func(d time.Duration) float64 { return min(max(d.Seconds(), least), most) }
	off := math.Abs(math.Log(matters(predicted) / matters(actual)))
	p.mu.Lock()
	defer p.mu.Unlock()
	a := p.accuracy(class)
	a.samples++
	a.off += (off - a.off) * max(recentSample, 1/float64(a.samples))
	a.checked = now
}

// Why a late request is served.
const (
	incidentOff = "first tokens are predicted badly, and no late request is refused or demoted"
	unchecked   = "the predictions were not checked recently"
)

// defaultTolerance is the Tolerance of classes that have none.
const defaultTolerance = 2

// doubts returns why no late request of a class may be refused or demoted; empty if it may.
func (p *Promises) doubts(class *queue.Class, now time.Time) (why string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch a := p.accuracy(class.Name); {
	case a.samples < fewSamples:
		return unchecked
	case math.Exp(a.off) > cmp.Or(class.Tolerance, defaultTolerance):
		return incidentOff
	case now.Sub(a.checked) >= checkEvery:
		return unchecked
	}
	return ""
}

// expectFor is how long predictions count in Expected, about.
const expectFor = 30 * time.Second

// expect records a predicted first token, in relation to its target.
func (p *Promises) expect(class string, share float64, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	d := p.accuracy(class).expected.To(now, expectFor)
	d.Count, d.Sum = d.Count+1, d.Sum+share
}

// Keep makes the classes with a target known, and forgets all others. It returns those that had one before.
func (p *Promises) Keep(targets map[string]bool) (gone []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for class := range p.targets {
		if _, stays := targets[class]; !stays {
			gone = append(gone, class)
			delete(p.of, class)
		}
	}
	p.targets = targets
	return gone
}

// Expected returns the recent mean of the predicted first tokens of each class, in relation to its target. It is 0
// without recent requests.
func (p *Promises) Expected(now time.Time) map[string]float64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	of := make(map[string]float64, len(p.targets))
	for class := range p.targets {
		of[class] = 0
		if a := p.of[class]; a != nil && a.expected.To(now, expectFor).Count >= 0.05 {
			of[class] = a.expected.Sum / a.expected.Count
		}
	}
	return of
}

// checks records that a late request is served, which will show how predictions are.
func (p *Promises) checks(class string, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.accuracy(class).checked = now
}

// accuracy returns the accuracy of a class. The caller holds the lock.
func (p *Promises) accuracy(class string) *accuracy {
	a := p.of[class]
	if a == nil {
		if p.of == nil {
			p.of = make(map[string]*accuracy)
		}
		a = new(accuracy)
		p.of[class] = a
	}
	return a
}
