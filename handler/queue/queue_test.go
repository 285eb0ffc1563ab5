package queue

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

var t0 = time.Unix(1000, 0)

func always(any, kvscore.Room) bool { return true }

// run serves the queue by one worker until a time, and charges each request with its cost. more
// adds the requests that have come.
func run(q *Queue, until time.Duration, more func(now time.Time), served func(*Entry, time.Time)) {
	for now := t0; now.Before(t0.Add(until)); {
		more(now)
		e := q.First(always, false, now)
		if e == nil {
			now = now.Add(time.Millisecond)
			continue
		}
		q.Remove(e)
		q.Charge(e.Class, e.Tenant, e.Weight, e.Cost, now)
		served(e, now)
		now = now.Add(ms(e.Cost))
	}
}

// TestShares has endless tenants, and asks for their shares in each 30 s.
func TestShares(t *testing.T) {
	a, b := &Class{Name: "a", Weight: 3}, &Class{Name: "b"}
	for name, v := range map[string]struct {
		entries []Entry
		shares  []float64
	}{
		"equal":          {[]Entry{{Tenant: 1, Cost: 300}, {Tenant: 2, Cost: 10}}, []float64{0.5, 0.5}},
		"tenant weights": {[]Entry{{Tenant: 1, Cost: 100, Weight: 3}, {Tenant: 2, Cost: 70}}, []float64{0.75, 0.25}},
		"class weights":  {[]Entry{{Class: a, Tenant: 1, Cost: 100}, {Class: b, Tenant: 2, Cost: 70}}, []float64{0.75, 0.25}},
		"tenants of a class": {
			[]Entry{{Class: a, Tenant: 1, Cost: 50}, {Class: b, Tenant: 2, Cost: 20}, {Class: b, Tenant: 3, Cost: 90}},
			[]float64{0.75, 0.125, 0.125},
		},
		"background": {[]Entry{{Tenant: 1, Cost: 50}, {Class: &Class{Name: "c", Background: true}, Tenant: 2, Cost: 50}}, []float64{1, 0}},
		"tiers":      {[]Entry{{Tenant: 1, Cost: 50, Tier: 1}, {Tenant: 2, Cost: 50}}, []float64{0, 1}},
		"deadlines buy no share": {
			[]Entry{{Tenant: 1, Cost: 50, Deadline: t0}, {Tenant: 2, Cost: 50}}, []float64{0.5, 0.5},
		},
		"lanes": {[]Entry{{Tenant: 1, Cost: 80, Lane: 1}, {Tenant: 2, Cost: 60, Lane: 2}}, []float64{0.5, 0.5}},
	} {
		var q Queue
		var got [4][]float64
		waiting := make(map[uint64]int)
		for i := range got {
			got[i] = make([]float64, len(v.entries))
		}
		run(&q, 2*time.Minute, func(now time.Time) {
			for _, e := range v.entries {
				for ; waiting[e.Tenant] < 20; waiting[e.Tenant]++ {
					e := e
					e.Arrival = now
					if !e.Deadline.IsZero() {
						e.Deadline = now.Add(time.Second)
					}
					q.Push(&e, now)
				}
			}
		}, func(e *Entry, now time.Time) {
			waiting[e.Tenant]--
			for i := range v.entries {
				if v.entries[i].Tenant == e.Tenant {
					got[int(now.Sub(t0)/(30*time.Second))][i] += e.Cost / 30_000
				}
			}
		})
		for window, shares := range got {
			for i, want := range v.shares {
				if math.Abs(shares[i]-want) > 0.03 {
					t.Errorf("%s: in window %d the share of %d is %.3f, want %.3f", name, window, i, shares[i], want)
				}
			}
		}
	}
}

// TestSurplusWaits has a tenant with many requests. Its surplus may not start once a light tenant comes. Others pass it
// by as much service as deadlines may move, and no more.
func TestSurplusWaits(t *testing.T) {
	q := Queue{Parallel: 2}
	for range 10 {
		q.Push(&Entry{Tenant: 1, Cost: 100, Arrival: t0, Surplus: kvscore.Empty}, t0)
	}
	some := func(_ any, room kvscore.Room) bool { return room < kvscore.Empty }
	q.Charge(nil, 2, 1, 100, t0)
	for range 10 {
		if e := q.First(some, false, t0); e == nil || e.Tenant != 1 {
			t.Fatalf("alone, %+v is first", e)
		}
		q.Charge(nil, 1, 1, 100, t0)
	}
	passed := 0.0
	for {
		q.Push(&Entry{Tenant: 2, Cost: 100, Arrival: t0}, t0)
		e := q.First(some, false, t0)
		if e == nil {
			break
		}
		if e.Tenant == 1 {
			t.Fatal("surplus starts")
		}
		q.Remove(e)
		q.Charge(e.Class, e.Tenant, e.Weight, e.Cost, t0)
		passed += e.Cost
	}
	if passed < slack || passed > slack+200 {
		t.Errorf("others passed it by %v", passed)
	}
	if e := q.First(always, false, t0); e == nil || e.Tenant != 1 || !q.HasSurplus(nil, 1, t0) || q.HasSurplus(nil, 2, t0) {
		t.Errorf("%+v is first", e)
	}
	for i := range uint64(40) {
		q.Push(&Entry{Tenant: 3 + i, Arrival: t0}, t0)
	}
	if !q.HasSurplus(nil, 1, t0) || q.HasSurplus(nil, 1, t0.Add(lightFor)) {
		t.Error("a surplus beside many others counts only while light tenants come")
	}
}

// TestMayPass has requests come while one waits for more room. They may pass it as they might if they waited.
func TestMayPass(t *testing.T) {
	q, other := Queue{Parallel: 1}, &Class{Name: "other"}
	every := func(any) bool { return true }
	q.Push(&Entry{Tenant: 1, Tier: 1, Arrival: t0, Surplus: kvscore.Empty}, t0)
	passes := func(c *Class, tenant uint64, tier int) bool { return q.MayPass(c, tenant, tier, every) }
	if !passes(nil, 2, 1) || !passes(other, 2, 1) || passes(nil, 2, 2) {
		t.Error("new tenants may pass, and no lower tier")
	}
	q.Charge(nil, 2, 1, slack, t0)
	if !passes(nil, 2, 1) {
		t.Error("a tenant with a little more service may pass")
	}
	q.Charge(nil, 2, 1, 1, t0)
	if passes(nil, 2, 1) || !passes(nil, 2, 0) || !q.MayPass(nil, 2, 1, func(any) bool { return false }) {
		t.Error("a tenant with more service may pass only in a higher tier or another lane")
	}
	q.Charge(other, 2, 1, slack+2, t0)
	if passes(other, 3, 1) {
		t.Error("a class with more service passes")
	}
}

// TestLightClass has a class with one request of each tenant, and a class that takes less than its share.
func TestLightClass(t *testing.T) {
	q, heavy, chat := Queue{Parallel: 2}, &Class{Name: "heavy"}, &Class{Name: "chat"}
	for i := range uint64(3) {
		q.Push(&Entry{Class: heavy, Tenant: i, Arrival: t0}, t0)
	}
	q.Charge(chat, 9, 1, 100, t0)
	for range 2 {
		q.Charge(heavy, 0, 1, 1000, t0)
	}
	if q.HasSurplus(heavy, 1, t0) {
		t.Error("a surplus, and no light class has come")
	}
	q.Charge(chat, 9, 1, 100, t0)
	if !q.HasSurplus(heavy, 1, t0) || q.HasSurplus(chat, 9, t0) {
		t.Error("the heavy class has no surplus, or the light one has")
	}
}

func TestOrderInATenant(t *testing.T) {
	class := &Class{Name: "c"}
	for name, v := range map[string]struct {
		first, second Entry
		parallel      int
	}{
		"arrival":          {Entry{Arrival: t0}, Entry{Arrival: t0.Add(time.Second)}, 1},
		"short":            {Entry{Arrival: t0.Add(time.Second), Cost: 1}, Entry{Arrival: t0, Cost: 5000}, 1},
		"ageing":           {Entry{Arrival: t0, Cost: 5000}, Entry{Arrival: t0.Add(13 * time.Second), Cost: 1}, 1},
		"parallel":         {Entry{Arrival: t0, Cost: 5000}, Entry{Arrival: t0.Add(4 * time.Second), Cost: 1}, 1000},
		"deadline":         {Entry{Arrival: t0.Add(time.Second), Deadline: t0.Add(2 * time.Second)}, Entry{Arrival: t0, Deadline: t0.Add(3 * time.Second)}, 1},
		"late are behind":  {Entry{Arrival: t0.Add(20 * time.Second), Deadline: t0.Add(22 * time.Second)}, Entry{Arrival: t0.Add(17 * time.Second), Deadline: t0.Add(19 * time.Second)}, 1},
		"but not for ever": {Entry{Arrival: t0, Deadline: t0.Add(time.Second)}, Entry{Arrival: t0.Add(20 * time.Second), Deadline: t0.Add(22 * time.Second)}, 1},
	} {
		for _, swap := range []bool{false, true} {
			q := Queue{Parallel: v.parallel}
			a, b := v.first, v.second
			a.Class, b.Class = class, class
			if swap {
				q.Push(&b, t0)
				q.Push(&a, t0)
			} else {
				q.Push(&a, t0)
				q.Push(&b, t0)
			}
			if q.First(always, false, t0.Add(20*time.Second)) != &a {
				t.Errorf("%s, swapped %v: the other one is first", name, swap)
			}
		}
	}
}

// TestQueueStaysWhole draws pushes, removals and charges, and checks what First returns.
func TestQueueStaysWhole(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	classes := []*Class{nil, {Name: "a", Weight: 2}, {Name: "b", Background: true}, {Name: "c", TTFT: time.Second}}
	q := Queue{Parallel: 4}
	var in []*Entry
	var charged []*Account
	now := t0
	for range 20_000 {
		now = now.Add(time.Duration(r.IntN(10)) * time.Millisecond)
		switch n := r.IntN(10); {
		case n < 5 || len(in) == 0:
			e := &Entry{Class: classes[r.IntN(4)], Tenant: r.Uint64N(30), Tier: r.IntN(2), Arrival: now, Cost: float64(r.IntN(500)), Lane: r.IntN(5)}
			if e.Class != nil && e.Class.TTFT > 0 {
				e.Deadline = now.Add(e.Class.TTFT)
			}
			q.Push(e, now)
			in = append(in, e)
		case n < 8:
			lane := r.IntN(5)
			e := q.First(func(l any, _ kvscore.Room) bool { return l == lane }, false, now)
			if e == nil {
				continue
			}
			if e.Lane != lane {
				t.Fatalf("of lane %v, want %v", e.Lane, lane)
			}
			for _, o := range in {
				if o.Lane == lane && !o.Class.isBackground() && (e.Class.isBackground() || o.Tier < e.Tier) {
					t.Fatalf("%+v is before %+v", e, o)
				}
				if o.flow == e.flow && o.compare(e) < 0 {
					t.Fatalf("%+v is before %+v of the same tenant", e, o)
				}
			}
			q.Remove(e)
			in = removed(in, e)
			charged = append(charged, q.Charge(e.Class, e.Tenant, e.Weight, e.Cost, now))
		case n < 9:
			e := in[r.IntN(len(in))]
			if n == 8 {
				e = q.Last()
			}
			q.Remove(e)
			q.Remove(e)
			in = removed(in, e)
		case len(charged) > 0:
			q.Settle(charged[r.IntN(len(charged))], r.Float64()*100-50)
		}
		if q.Len() != len(in) {
			t.Fatalf("%d wait, want %d", q.Len(), len(in))
		}
	}
	for len(in) > 0 {
		e := q.First(always, false, now)
		q.Remove(e)
		in = removed(in, e)
	}
	if q.Len() != 0 || len(q.lanes) != 0 || len(q.accounts) != 0 || q.First(always, false, now) != nil {
		t.Errorf("left: %+v", q)
	}
}

func removed(in []*Entry, e *Entry) []*Entry {
	for i := range in {
		if in[i] == e {
			return append(in[:i], in[i+1:]...)
		}
	}
	return in
}

// TestInventedTenants has a million names that come and go while one request waits.
func TestInventedTenants(t *testing.T) {
	var q Queue
	q.Push(&Entry{Lane: "other", Arrival: t0}, t0)
	for i := range uint64(1_000_000) {
		e := Entry{Tenant: i, Arrival: t0, Cost: -5, Weight: math.NaN()}
		q.Push(&e, t0)
		q.Remove(&e)
		q.Charge(nil, i, 0, 10, t0)
	}
	if len(q.accounts) > 2*mostIdle {
		t.Errorf("%d accounts", len(q.accounts))
	}
}

func TestAhead(t *testing.T) {
	var q Queue
	for range 10 {
		q.Push(&Entry{Tenant: 1, Cost: 100, Arrival: t0}, t0)
	}
	for range 2 {
		q.Push(&Entry{Tenant: 2, Cost: 100, Arrival: t0}, t0)
	}
	for tenant, want := range map[uint64]float64{1: 1200, 2: 500, 3: 200} {
		if got := q.Ahead(&Entry{Tenant: tenant, Cost: 100}); got != want {
			t.Errorf("tenant %d: %v, want %v", tenant, got, want)
		}
	}
	other := &Class{Name: "other"}
	if got := q.Ahead(&Entry{Class: other, Tenant: 1, Cost: 100}); got != 100 {
		t.Errorf("another class: %v, want 100", got)
	}
	for i := range uint64(5000) { // half of them with less than 100
		q.Push(&Entry{Class: other, Tenant: i, Cost: 50 + float64(i%2)*1000, Arrival: t0}, t0)
	}
	// 75 of each, and as much of the class before
	if got := q.Ahead(&Entry{Class: other, Tenant: 1e6, Cost: 100}); math.Abs(got/(5000*75+1200)-1) > 0.15 {
		t.Errorf("many tenants: %v, want about %v", got, 5000*75+1200)
	}
}
