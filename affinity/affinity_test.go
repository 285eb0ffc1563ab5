package affinity

import (
	"errors"
	"math"
	"strconv"
	"testing"
	"time"
)

func TestGetSlidesAndPeekDoesNot(t *testing.T) {
	var c fakeClock
	r := open(t, Options{Clock: c.now})
	put := mustPut(t, r, "s", 7, time.Minute, RouterOnly)
	if !put.Expires.Equal(epoch.Add(time.Minute)) || put.Version == 0 || put.Target != on(7) {
		t.Fatalf("put returned %+v", put)
	}
	c.advance(40 * time.Second)
	if b, ok := r.Peek("s"); !ok || b != put {
		t.Fatalf("peek = %+v, %v; want what was put", b, ok)
	}
	b, ok := r.Get("s")
	if !ok || !b.Expires.Equal(epoch.Add(100*time.Second)) || b.Version != put.Version {
		t.Fatalf("get = %+v, %v", b, ok)
	}
	c.advance(time.Minute - 1)
	if _, ok := r.Peek("s"); !ok {
		t.Fatal("gone before its time")
	}
	c.advance(1)
	if _, ok := r.Get("s"); ok {
		t.Fatal("alive at its deadline")
	}
	if r.Len() != 0 || r.Bytes() != 0 {
		t.Fatalf("noticed as expired, but still held: %d, %d bytes", r.Len(), r.Bytes())
	}
}

func TestEndsAreReported(t *testing.T) {
	const ttl = time.Minute
	tests := []struct {
		name string
		do   func(r *Ristretto, c *fakeClock)
		want []Reason
	}{
		{"expired, seen by get", func(r *Ristretto, c *fakeClock) { c.advance(ttl); r.Get("s") }, []Reason{Expired}},
		{"expired, seen by peek", func(r *Ristretto, c *fakeClock) { c.advance(ttl); r.Peek("s") }, []Reason{Expired}},
		{"expired, seen by remove", func(r *Ristretto, c *fakeClock) { c.advance(ttl); remove(r, "s") }, []Reason{Expired}},
		{"expired, seen by sweep", func(r *Ristretto, c *fakeClock) { c.advance(ttl); r.sweep() }, []Reason{Expired}},
		{"expired, seen by put", func(r *Ristretto, c *fakeClock) { c.advance(ttl); r.Put("s", on(2), ttl, RouterOnly) }, []Reason{Expired}},
		{"evicted", func(r *Ristretto, c *fakeClock) { c.advance(1); r.Put("other", on(2), ttl, RouterOnly) }, []Reason{Evicted}},
		{"moved", func(r *Ristretto, _ *fakeClock) { r.Put("s", on(2), ttl, RouterOnly) }, []Reason{Replaced}},
		{"moved twice", func(r *Ristretto, _ *fakeClock) {
			r.Put("s", on(2), ttl, EngineBacked)
			r.Put("s", on(3), ttl, EngineBacked)
		}, []Reason{Replaced, Replaced}},
		{"moved by a swap", func(r *Ristretto, _ *fakeClock) {
			b, _ := r.Peek("s")
			r.CompareAndSwap("s", b.Version, on(2), ttl, EngineBacked)
		}, []Reason{Replaced}},
		{"lost swap", func(r *Ristretto, _ *fakeClock) { r.CompareAndSwap("s", 0, on(2), ttl, EngineBacked) }, nil},
		{"renewed", func(r *Ristretto, _ *fakeClock) { r.Put("s", on(1), ttl, EngineBacked) }, nil},
		{"renewed, downgraded, moved", func(r *Ristretto, _ *fakeClock) {
			r.Put("s", on(1), ttl, RouterOnly)
			r.Put("s", on(2), ttl, RouterOnly)
		}, nil},
		{"upgraded, moved", func(r *Ristretto, _ *fakeClock) {
			r.Put("s", on(1), ttl, RouterOnly)
			r.Put("s", on(1), ttl, EngineBacked)
			r.Put("s", on(2), ttl, RouterOnly)
		}, []Reason{Replaced}},
		{"removed", func(r *Ristretto, _ *fakeClock) { remove(r, "s") }, nil},
		{"not removed", func(r *Ristretto, _ *fakeClock) { r.Remove("s", 0); r.Put("s", on(2), ttl, RouterOnly) }, []Reason{Replaced}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var c fakeClock
			var l ends
			r := open(t, Options{Clock: c.now, OnExpire: l.record, MaxSessions: 1})
			mustPut(t, r, "s", 1, ttl, EngineBacked)
			tt.do(r, &c)
			settled(t, r)
			cacheHolds(t, r)
			got := l.take()
			if len(got) != len(tt.want) {
				t.Fatalf("reported %v, want %v", got, tt.want)
			}
			for i, g := range got {
				if g.session != "s" || g.why != tt.want[i] || g.version == 0 {
					t.Fatalf("reported %v, want %v", got, tt.want)
				}
			}
		})
	}
}

func TestCompareAndSwap(t *testing.T) {
	var c fakeClock
	r := open(t, Options{Clock: c.now})
	first, ok, err := r.CompareAndSwap("s", 0, on(1), time.Minute, RouterOnly)
	if !ok || err != nil {
		t.Fatalf("of an unknown session: %v, %v", ok, err)
	}
	c.advance(time.Second)
	if b, ok, err := r.CompareAndSwap("s", 0, on(2), time.Minute, RouterOnly); ok || err != nil || b != first {
		t.Fatalf("the loser got %+v, %v, %v; want the winner, not renewed", b, ok, err)
	}
	second, ok, _ := r.CompareAndSwap("s", first.Version, on(1), time.Minute, RouterOnly)
	if !ok || second.Version == first.Version {
		t.Fatalf("with the right version: %+v, %v", second, ok)
	}
	if b, ok, _ := r.CompareAndSwap("s", first.Version, on(3), time.Minute, RouterOnly); ok || b != second {
		t.Fatalf("same target, older version: %+v, %v", b, ok)
	}
	remove(r, "s")
	if b, ok, err := r.CompareAndSwap("s", second.Version, on(3), time.Minute, RouterOnly); ok || err != nil || b != (Binding{}) {
		t.Fatalf("of a removed session: %+v, %v, %v", b, ok, err)
	}
	if _, ok := r.Peek("s"); ok {
		t.Fatal("a lost swap bound the session")
	}
}

func TestCollidingSessionsDoNotShareABinding(t *testing.T) {
	var l ends
	r := open(t, Options{OnExpire: l.record})
	r.hash = func(string) uint64 { return 42 }
	a := mustPut(t, r, "a", 1, time.Minute, EngineBacked)
	if _, ok := r.Get("b"); ok {
		t.Fatal("b reads a's binding")
	}
	if _, ok := r.Remove("b", a.Version); ok {
		t.Fatal("b removes a's binding")
	}
	mustPut(t, r, "b", 2, time.Minute, EngineBacked)
	if b, ok := r.Get("b"); !ok || b.Target != on(2) {
		t.Fatalf("b = %+v, %v", b, ok)
	}
	if _, ok := r.Get("a"); ok {
		t.Fatal("a reads b's binding")
	}
	settled(t, r)
	if got := l.take(); len(got) != 1 || got[0] != (ended{"a", a.Version, Evicted}) {
		t.Fatalf("reported %v", got)
	}
	if r.Len() != 1 {
		t.Fatalf("holds %d", r.Len())
	}
}

func TestTimeToLive(t *testing.T) {
	r := open(t, Options{})
	for _, ttl := range []time.Duration{0, -1, math.MinInt64} {
		if _, err := r.Put("s", on(1), ttl, RouterOnly); !errors.Is(err, ErrTTL) {
			t.Errorf("put for %v: %v", ttl, err)
		}
		if _, ok, err := r.CompareAndSwap("s", 0, on(1), ttl, RouterOnly); ok || !errors.Is(err, ErrTTL) {
			t.Errorf("swap for %v: %v", ttl, err)
		}
	}
	if b := mustPut(t, r, "s", 1, math.MaxInt64, RouterOnly); b.TTL != maxTTL {
		t.Errorf("the longest life is %v", b.TTL)
	}
	if _, ok := r.Get("s"); !ok {
		t.Error("the longest life is over at once")
	}
}

func TestListPages(t *testing.T) {
	var c fakeClock
	r := open(t, Options{Clock: c.now})
	for _, s := range []string{"d", "a", "c", "b", "e", "é", "aa"} {
		mustPut(t, r, s, 1, time.Minute, RouterOnly)
	}
	mustPut(t, r, "bb", 1, time.Second, RouterOnly)
	c.advance(time.Second)
	remove(r, "d")
	var got []string
	for after := ""; ; {
		page := r.List(after, 2)
		for _, e := range page {
			got = append(got, e.Session)
			if b, ok := r.Peek(e.Session); !ok || b != e.Binding {
				t.Errorf("%q listed as %+v, is %+v", e.Session, e.Binding, b)
			}
		}
		if len(page) < 2 {
			break
		}
		after = page[1].Session
	}
	want := []string{"a", "aa", "b", "c", "e", "é"}
	if len(got) != len(want) {
		t.Fatalf("listed %v, want %v", got, want)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Fatalf("listed %v, want %v", got, want)
		}
	}
	for _, limit := range []int{0, -1} {
		if page := r.List("", limit); len(page) != 0 {
			t.Errorf("a page of %d has %d entries", limit, len(page))
		}
	}
}

func TestNames(t *testing.T) {
	for _, tt := range []struct{ got, want string }{
		{RouterOnly.String(), "router_only"},
		{EngineBacked.String(), "engine_backed"},
		{Kind(9).String(), "kind_9"},
		{Expired.String(), "expired"},
		{Evicted.String(), "evicted"},
		{Replaced.String(), "replaced"},
		{Reason(0).String(), "reason_0"},
	} {
		if tt.got != tt.want {
			t.Errorf("%q, want %q", tt.got, tt.want)
		}
	}
}

// TestRangeSeesWhatIsLive goes over the store whole, and in part; expired and
// removed bindings are not there.
func TestRangeSeesWhatIsLive(t *testing.T) {
	clock := new(fakeClock)
	r := open(t, Options{Clock: clock.now})
	for i := range 3000 {
		mustPut(t, r, strconv.Itoa(i), uint64(i), time.Duration(1+i%2)*time.Minute, RouterOnly)
	}
	clock.advance(90 * time.Second)
	remove(r, "1")
	seen := make(map[string]uint64)
	r.Range(func(e Entry) bool {
		seen[e.Session] = e.Target.Worker
		return true
	})
	for i := range 3000 {
		worker, ok := seen[strconv.Itoa(i)]
		if live := i%2 == 1 && i != 1; ok != live || live && worker != uint64(i) {
			t.Fatalf("session %d: there %v, worker %d", i, ok, worker)
		}
	}
	calls := 0
	r.Range(func(Entry) bool { calls++; return calls < 10 })
	if calls != 10 {
		t.Errorf("%d calls after the tenth said no more", calls)
	}
	r.Close()
	r.Range(func(Entry) bool { t.Error("a closed store has bindings"); return false })
}
