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
	session := s.Session(id, [2]string{})
	seen := make(map[[16]byte]string)
	for name, h := range map[string][16]byte{
		"identity":               id,
		"identity of no key":     s.Identity(""),
		"identity, other secret": other.Identity("k"),
		"session":                session,
		"session of a tenant":    s.Session(id, [2]string{"ab", ""}),
		"tenant in other part":   s.Session(id, [2]string{"", "ab"}),
		"tenant in two parts":    s.Session(id, [2]string{"a", "b"}),
		"long tenant":            s.Session(id, [2]string{strings.Repeat("x", 9000), ""}),
		"longer tenant":          s.Session(id, [2]string{strings.Repeat("x", 9001), ""}),
		"model":                  s.Model(string(session[:]), "m"),
		"other model":            s.Model(string(session[:]), "n"),
		"hash as a key":          s.Identity(string(session[:])),
	} {
		if with, ok := seen[h]; ok {
			t.Errorf("%s and %s have one hash", name, with)
		}
		seen[h] = name
	}
	if s.Identity("k") != id || s.Session(id, [2]string{}) != session {
		t.Error("the same input has another hash")
	}
}

// FuzzSecret hashes pairs of keys and tenants: only equal ones have equal hashes.
func FuzzSecret(f *testing.F) {
	f.Add("key", "", "", "key", "", "")
	f.Add("k", "a", "", "k", "", "a")
	f.Add("", "\x01a", "", "", "", "\x01a")
	s := NewSecret()
	f.Fuzz(func(t *testing.T, key, tenant, salt, key2, tenant2, salt2 string) {
		same := key == key2 && tenant == tenant2 && salt == salt2
		a := s.Session(s.Identity(key), [2]string{tenant, salt})
		b := s.Session(s.Identity(key2), [2]string{tenant2, salt2})
		if (a == b) != same {
			t.Errorf("%q %q %q and %q %q %q: equal hashes %t", key, tenant, salt, key2, tenant2, salt2, a == b)
		}
	})
}

// BenchmarkSessionHash hashes a key of usual length.
func BenchmarkSessionHash(b *testing.B) {
	s := NewSecret()
	key := "0b5f3a52-6c3a-4a8e-9b6f-0d4c1f2e3a4b"
	b.ReportAllocs()
	for b.Loop() {
		s.Session(s.Identity(key), [2]string{"tenant", ""})
	}
}
