package journal

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/quota"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// limitedRouter is a router with limits that follows another one.
type limitedRouter struct {
	journal Journal
	outlet  *Outlet
	encoder Encoder
	sent    uint64
	quota.Book
	Follower
	id    uint64
	ahead time.Duration // its clock
}

func newLimited(t *testing.T, id uint64, ahead time.Duration, at time.Time) *limitedRouter {
	t.Helper()
	r := &limitedRouter{id: id, ahead: ahead}
	var limits []quota.Limit
	for _, text := range []string{"tokens 6000 per 1m", "requests 50 per day", "concurrent 9"} {
		l, err := quota.ParseLimit(text)
		if err != nil {
			t.Fatal(err)
		}
		limits = append(limits, l)
	}
	r.Set(&quota.Settings{Default: limits})
	r.outlet, r.Book.Journal = r.journal.Open(true), &r.journal
	r.Follower = Follower{
		Scheduler: kvscore.NewScheduler(kvscore.Settings{}), Limits: &r.Book, Refuse: func(*Head) error { return nil },
		Joined: func(*Peer) {}, Worker: func(string) (uint64, bool) { return 1, true },
	}
	r.encoder.NewRun()
	r.encoder.StartEpoch(at.Add(ahead), new(Head))
	return r
}

// send has another router read what this one has to send.
func (r *limitedRouter) send(to *limitedRouter, at time.Time, past bool) *Sent {
	r.outlet.Write(&r.encoder, named)
	r.sent++
	s := &Sent{Router: r.id, Number: r.sent, Entries: bytes.Clone(r.encoder.Entry())}
	to.Take(at.Add(to.ahead), s, past)
	return s
}

func (r *limitedRouter) used(at time.Time) string {
	top := r.Standing(at.Add(r.ahead), 9).Top
	if len(top) == 0 {
		return "none"
	}
	text := ""
	for _, l := range top[0].Limits {
		text += fmt.Sprint(l.Used, " ")
	}
	return text
}

// TestLimitsOfRoutersWhoseClocksDiffer shares what a tenant uses between two routers, and a third one
// that joins.
func TestLimitsOfRoutersWhoseClocksDiffer(t *testing.T) {
	now := time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
	for _, ahead := range []time.Duration{0, time.Minute, -time.Minute} {
		a, b := newLimited(t, 1, 0, now), newLimited(t, 2, ahead, now)
		a.send(b, now, false)
		b.send(a, now, false)
		at := now
		reserve := func(r *limitedRouter, tokens int64) *quota.Reservation {
			res, refused := r.Reserve(at.Add(r.ahead), &quota.Ask{Name: "t", Tenant: 7, Prompt: tokens})
			if refused != nil {
				t.Fatal(refused)
			}
			return res
		}
		usage := func(n int64) quota.Usage { return quota.Usage{Prompt: n, Completion: 0, Cached: -1, Whole: true} }
		for range 20 { // 2,000 tokens in 20 s, of which all come back
			one, two := reserve(a, 40), reserve(b, 40)
			at = at.Add(500 * time.Millisecond)
			one.Settle(at.Add(a.ahead), usage(50))
			two.Settle(at.Add(b.ahead), usage(50))
			a.send(b, at.Add(5*time.Millisecond), false)
			b.send(a, at.Add(5*time.Millisecond), false)
			at = at.Add(500 * time.Millisecond)
		}
		open := reserve(a, 3000)
		past := a.send(b, at, false)
		for _, r := range []*limitedRouter{a, b} {
			if got := r.used(at); got != "3010 41 1 " {
				t.Errorf("clock %v ahead: router %d has used %s", ahead, r.id, got)
			}
		}

		// a third one reads the past, and gets the state of the tenants
		c := newLimited(t, 3, ahead, at)
		c.Take(at.Add(c.ahead), past, true)
		if got := c.used(at); got != "0 0 1 " {
			t.Errorf("clock %v ahead: the past counts: %s", ahead, got)
		}
		a.States(at, 0, func(s *quota.State) { a.encoder.Write(&Record{Kind: KindTenant, At: at, Body: s}, nil) })
		for range 2 {
			a.send(c, at, false)
		}
		if got := c.used(at); got != "3010 41 1 " {
			t.Errorf("clock %v ahead: the third router has used %s", ahead, got)
		}

		// a router that falls silent leaves what it has reserved, but runs nothing
		at = at.Add(10 * time.Second)
		b.Expire(at.Add(b.ahead))
		if got := b.used(at); got != "2010 41 0 " {
			t.Errorf("clock %v ahead: after its end %s", ahead, got)
		}
		open.Drop(at)
	}
}
