package kvscore

import (
	"testing"
	"time"
)

// TestRoutersShareTargets: of two routers that get requests at the same moments, each prefers one half
// of the idle targets. A router that gets all requests prefers none.
func TestRoutersShareTargets(t *testing.T) {
	const moments = 60
	var among []Target
	for i := range uint64(8) {
		among = append(among, Target{Worker: 10 + i})
	}
	for name, both := range map[string]bool{"both get requests": true, "one gets all": false} {
		var routers [2]*Scheduler
		for i := range routers {
			routers[i] = NewScheduler(Settings{})
			for _, at := range among {
				routers[i].Declare(at, 1_000_000)
			}
			routers[i].SetRouters(i, 2)
		}
		same, others, p, sel := 0, 0, NewPredictedLatency(), &Selection{Rand: seeded(1)}
		for m := range uint64(moments) {
			now := epoch.Add(time.Duration(m) * time.Minute)
			var chosen []int
			var leases []*Lease
			book := func(router, at, of int, remote bool) int {
				r := prompt(2*m+uint64(of), 7) //nolint:gosec // small
				r.Remote = remote
				if remote {
					now = now.Add(5 * time.Millisecond)
				}
				at, l := routers[router].selectOf(now, r, among, at, p, sel)
				leases = append(leases, l)
				return at
			}
			for i := range routers {
				if both || i == 0 {
					chosen = append(chosen, book(i, -1, i, false))
					if sel.Candidates[chosen[i]].Others {
						others++
					}
				}
			}
			for i, at := range chosen {
				book(1-i, at, i, true)
			}
			for _, l := range leases {
				l.End(true, nil)
			}
			if both && chosen[0] == chosen[1] {
				same++
			}
		}
		if same > 4 || both && others > 8 || !both && others < moments/3 {
			t.Errorf("%s: %d of %d moments chose one target twice, %d choices were another router's targets", name, same, moments, others)
		}
	}
}

// TestOverdueRoomIsNotPolled has a prefill that a later one has passed, and that does not end.
func TestOverdueRoomIsNotPolled(t *testing.T) {
	s, at := NewScheduler(Settings{}), Target{Worker: 1}
	s.Declare(at, 1_000_000)
	s.latency.samples = trusting
	var leases [2]*Lease
	for i := range leases {
		_, leases[i] = s.selectOf(epoch, prompt(uint64(1+i), 7), []Target{at}, 0, nil, new(Selection)) //nolint:gosec // small
	}
	leases[1].FirstToken(epoch.Add(time.Second))
	if room, in := s.Room(epoch.Add(time.Minute), at); room == Empty || in < lookAgain*time.Millisecond {
		t.Errorf("room %v, more in %v", room, in)
	}
}

// TestRoomOfASurplus has a short prompt booked, beside which a tenant's surplus of short prompts may begin.
func TestRoomOfASurplus(t *testing.T) {
	s, at := NewScheduler(Settings{}), Target{Worker: 1}
	s.Declare(at, 1_000_000)
	s.latency.samples = trusting
	r := prompt(1)
	r.Tokens = 100
	_, l := s.selectOf(epoch, r, []Target{at}, 0, nil, new(Selection))
	if got, in := s.Room(epoch, at); got != Clear || in == 0 {
		t.Errorf("room %v, more in %v", got, in)
	}
	l.Prefilled(epoch)
	if got, _ := s.Room(epoch, at); got != Empty {
		t.Errorf("room %v at the end of the prefill", got)
	}
	for tokens, want := range map[int64]Room{1000: Clear, 8000: Empty} {
		if got := RoomForSurplus(tokens); got != want {
			t.Errorf("%d tokens: room %v", tokens, got)
		}
	}
	l.End(true, nil)
}

// TestRoomOfRouters books one prompt of another router, and then one of this router's own.
func TestRoomOfRouters(t *testing.T) {
	for n, rooms := range map[int][2]bool{1: {false, false}, 2: {true, false}} {
		s, at := NewScheduler(Settings{}), Target{Worker: 1}
		s.Declare(at, 1_000_000)
		s.SetRouters(0, n)
		s.latency.samples = trusting
		var leases []*Lease
		for i, remote := range []bool{true, false} {
			r := prompt(uint64(i + 1))
			r.Tokens, r.Remote = 4*DefaultStepTokens, remote
			_, l := s.selectOf(epoch, r, []Target{at}, 0, nil, new(Selection))
			leases = append(leases, l)
			if got, _ := s.Room(epoch, at); (got > NoRoom) != rooms[i] || got >= Clear {
				t.Errorf("%d routers, after %d prompts: room %v", n, i+1, got)
			}
		}
		for _, l := range leases {
			l.Prefilled(epoch)
			l.End(true, nil)
		}
		if got, _ := s.Room(epoch, at); got != Empty {
			t.Errorf("%d routers, at the end: room %v", n, got)
		}
		if n > 1 {
			s.SetRouters(1, n) // router 0 prefers the target
			if got, in := s.Room(epoch, at); got != NoRoom || in != clearFor {
				t.Errorf("another router's target, right after an own long prompt: room %v, more in %v", got, in)
			}
			s.routers.lastLong = epoch.Add(-clearFor)
			if got, in := s.Room(epoch, at); got != SomeRoom || in != clearFor {
				t.Errorf("another router's target, at the end: room %v, more in %v", got, in)
			}
			if got, _ := s.Room(epoch.Add(clearFor), at); got != Empty {
				t.Errorf("another router's target, later: room %v", got)
			}
			s.settings.Bounded, s.latency.samples = true, 0
			if got, _ := s.Room(epoch.Add(clearFor), at); got != Empty {
				t.Errorf("another router's target, before times are learned: room %v", got)
			}
		}
	}
}
