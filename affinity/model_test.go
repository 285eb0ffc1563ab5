package affinity

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// model is what the store should be: one map, no concurrency, expiry at once.
type model struct {
	now   int64
	max   int
	live  map[string]*modelled
	ended []reported
}

type modelled struct {
	target    kvscore.Target
	kind      Kind
	ttl       time.Duration
	due, used int64
	version   Version
}

func (m *model) end(session string, why Reason) {
	if b := m.live[session]; b.kind == EngineBacked {
		m.ended = append(m.ended, reported{named(session), b.version, why})
	}
	delete(m.live, session)
}

func (m *model) advance(d int64) {
	m.now += d
	for s, b := range m.live {
		if b.due <= m.now {
			m.end(s, Expired)
		}
	}
}

// idlest returns the session that has not been used for longest.
func (m *model) idlest() (session string) {
	for s, b := range m.live {
		if session == "" || b.used < m.live[session].used {
			session = s
		}
	}
	return session
}

func (m *model) put(session string, b modelled) {
	if old := m.live[session]; old != nil && old.kind == EngineBacked && old.target != b.target {
		m.ended = append(m.ended, reported{named(session), old.version, Replaced})
	}
	b.used, b.due = m.now, m.now+int64(b.ttl)
	m.live[session] = &b
}

func (b *modelled) is(got Binding) bool {
	return got.Target == b.target && got.Kind == b.kind && got.TTL == b.ttl && got.Version == b.version &&
		got.Expires.Equal(epoch.Add(time.Duration(b.due)))
}

// TestModel compares the store with the model over random operations. A store
// of up to sampleSize bindings sees all of them in a sample, so that what it
// evicts is determined, too.
func TestModel(t *testing.T) {
	for _, tt := range []struct {
		name               string
		max, sessions, ops int
		ttl                int64
		evicts             bool
	}{
		{"with room", 1000, 150, 40_000, 2000, false},
		{"full", 12, 40, 25_000, 400, true},
		{"of one", 1, 3, 20_000, 40, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			seed := rand.Uint64()
			t.Logf("seed %d", seed)
			rnd := rand.New(rand.NewPCG(seed, 1))
			var c fakeClock
			var l ends
			r := open(t, Options{Clock: c.now, OnExpire: l.record, MaxSessions: tt.max})
			m := &model{max: tt.max, live: map[string]*modelled{}}
			counts := map[Reason]int{}
			versions := map[Version]bool{}

			for op := range tt.ops {
				step := 1 + rnd.Int64N(4)
				if rnd.IntN(2000) == 0 {
					step = 2 * tt.ttl // everybody's end
				}
				m.advance(step)
				c.advance(time.Duration(step))
				s := fmt.Sprintf("s%d", rnd.IntN(tt.sessions))
				fail := func(format string, args ...any) {
					t.Helper()
					t.Fatalf("operation %d on %s: %s", op, s, fmt.Sprintf(format, args...))
				}
				agree := func(b Binding, ok bool) {
					t.Helper()
					if want := m.live[s]; ok != (want != nil) || ok && !want.is(b) {
						fail("got %+v, %v; want %+v", b, ok, want)
					}
				}
				other := func() Version { // a version of the past, of any session
					return Version(uint64(epoch.UnixNano()) + rnd.Uint64N(uint64(op)+1)) //nolint:gosec // after 1970
				}
				w := modelled{
					target: on(rnd.Uint64N(3)),
					kind:   Kind(rnd.IntN(2)),
					ttl:    time.Duration(1 + rnd.Int64N(tt.ttl)),
				}
				accepted := func(b Binding) {
					t.Helper()
					if versions[b.Version] || b.Version == 0 {
						fail("version %d again", b.Version)
					}
					versions[b.Version] = true
					w.version = b.Version
					if m.live[s] == nil && len(m.live) == m.max {
						m.end(m.idlest(), Evicted)
					}
					m.put(s, w)
					agree(b, true)
				}
				switch k := rnd.IntN(100); {
				case k < 30:
					if b := m.live[s]; b != nil {
						b.used, b.due = m.now, m.now+int64(b.ttl)
					}
					b, ok := get(r, s)
					agree(b, ok)
				case k < 45:
					b, ok := peek(r, s)
					agree(b, ok)
				case k < 55:
					has, version := m.live[s], other()
					if has != nil && rnd.IntN(3) > 0 {
						version = has.version
					}
					matches := has != nil && has.version == version
					if matches {
						has.used, has.due = m.now, m.now+int64(has.ttl)
					}
					b, ok := r.Touch(named(s), version)
					if ok != matches {
						fail("touched version %d: %v", version, ok)
					}
					agree(b, has != nil)
				case k < 88:
					old, has := Version(0), m.live[s]
					if has != nil && rnd.IntN(3) > 0 {
						old = has.version
					} else if rnd.IntN(3) == 0 {
						old = other()
					}
					matches := has == nil && old == 0 || has != nil && has.version == old
					b, ok, err := bind(r, s, old, w.target, w.ttl, w.kind)
					switch {
					case err != nil || ok != matches:
						fail("swap of %d: %v, %v", old, ok, err)
					case ok:
						accepted(b)
					case has != nil:
						agree(b, true)
					case b != Binding{}:
						fail("lost to %+v, which is not there", b)
					}
				case k < 96:
					has, version := m.live[s], other()
					if has != nil && rnd.IntN(3) > 0 {
						version = has.version
					}
					b, ok := r.Unbind(named(s), version)
					if ok != (has != nil && has.version == version) {
						fail("removed %+v of version %d: %v", b, version, ok)
					}
					agree(b, has != nil)
					if ok {
						delete(m.live, s)
					}
				case k < 98:
					r.sweep()
					if n, want := r.Len(), len(m.live); n != want {
						fail("swept, holds %d, want %d", n, want)
					}
				case k < 99:
					limit := 1 + rnd.IntN(20)
					after := named(s)
					page := r.List(after, limit)
					compareList(t, m, page, after, limit)
				case rnd.IntN(10) == 0:
					m.max = 1 + tt.max/2 + rnd.IntN(tt.max/2+1)
					for len(m.live) > m.max {
						m.end(m.idlest(), Evicted)
					}
					if r.SetMaxSessions(m.max); len(dumped(t, r)) != len(m.live) {
						fail("dumps %d bindings, want %d", len(dumped(t, r)), len(m.live))
					}
				}
				if n := r.Len(); n < len(m.live) || n > m.max {
					fail("holds %d of %d, bound %d", n, len(m.live), m.max)
				}
				if op%500 == 0 || op == tt.ops-1 {
					r.sweep()
					cacheHolds(t, r)
					r.Reported()
					for _, e := range m.ended {
						counts[e.why]++
					}
					compareEnds(t, l.take(), m.ended)
					m.ended = nil
					compareList(t, m, all(r), Key{}, 1000)
				}
			}
			t.Logf("ends: %v", counts)
			if counts[Expired] == 0 || counts[Replaced] == 0 || (counts[Evicted] > 0) != tt.evicts {
				t.Errorf("the test did not come by everything: %v", counts)
			}
		})
	}
}

func compareEnds(t *testing.T, got, want []reported) {
	t.Helper()
	order := func(a, b reported) int { return int(a.version) - int(b.version) }
	slices.SortFunc(got, order)
	slices.SortFunc(want, order)
	if !slices.Equal(got, want) {
		t.Fatalf("reported %v\nwant %v", got, want)
	}
}

func compareList(t *testing.T, m *model, got []Entry, after Key, limit int) {
	t.Helper()
	byKey := make(map[Key]*modelled)
	var want []Key
	for s, b := range m.live {
		if k := named(s); compare(k, after) > 0 {
			want = append(want, k)
			byKey[k] = b
		}
	}
	slices.SortFunc(want, compare)
	want = want[:min(limit, len(want))]
	if len(got) != len(want) {
		t.Fatalf("listed %d, want %d", len(got), len(want))
	}
	for i, e := range got {
		if e.Key != want[i] || !byKey[e.Key].is(e.Binding) {
			t.Fatalf("listed %+v, want %s %+v", e, want[i], byKey[want[i]])
		}
	}
}
