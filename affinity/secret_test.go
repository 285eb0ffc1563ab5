package affinity

import (
	"strings"
	"testing"
)

// TestHashesTellSessionsApart hashes what differs in one part only, or where one part ends
// and the next begins.
func TestHashesTellSessionsApart(t *testing.T) {
	s, other := NewSecret(), NewSecret()
	id := s.Identity("k")
	session := s.Session(id, Tenant{}, "")
	seen := make(map[[16]byte]string)
	for name, h := range map[string][16]byte{
		"identity":               id,
		"identity of no key":     s.Identity(""),
		"identity, other secret": other.Identity("k"),
		"session":                session,
		"session of a tenant":    s.Session(id, Tenant{"ab", ""}, ""),
		"tenant in other part":   s.Session(id, Tenant{"", "ab"}, ""),
		"tenant in two parts":    s.Session(id, Tenant{"a", "b"}, ""),
		"long tenant":            s.Session(id, Tenant{strings.Repeat("x", 9000), ""}, ""),
		"longer tenant":          s.Session(id, Tenant{strings.Repeat("x", 9001), ""}, ""),
		"model":                  s.Session(id, Tenant{}, "m"),
		"other model":            s.Session(id, Tenant{}, "n"),
		"salt and model":         s.Session(id, Tenant{"", "m"}, "m"),
		"hash as a key":          s.Identity(string(session[:])),
	} {
		if with, ok := seen[h]; ok {
			t.Errorf("%s and %s have one hash", name, with)
		}
		seen[h] = name
	}
	if s.Identity("k") != id || s.Session(id, Tenant{}, "") != session {
		t.Error("the same input has another hash")
	}
}

// TestScopesOfTenants has tenants that differ in one part only.
func TestScopesOfTenants(t *testing.T) {
	s, other := NewSecret(), NewSecret()
	seen := make(map[uint32]Tenant)
	for _, of := range []Tenant{{}, {"a", ""}, {"", "a"}, {"a", "b"}, {"ab", ""}} {
		scope := s.Scope(of)
		if with, ok := seen[scope]; ok {
			t.Errorf("%q and %q have one scope", of, with)
		}
		if none := of == (Tenant{}); (scope == 0) != none || !none && scope == other.Scope(of) {
			t.Errorf("%q has the scope %d", of, scope)
		}
		seen[scope] = of
	}
}

// TestHashesDoNotAllocate hashes keys and tenants of usual length.
func TestHashesDoNotAllocate(t *testing.T) {
	s, key, of := NewSecret(), strings.Repeat("k", 200), Tenant{strings.Repeat("t", 100), strings.Repeat("s", 100)}
	if n := testing.AllocsPerRun(100, func() {
		s.Session(s.Identity(key), of, key)
		s.Scope(of)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
