package affinity

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
)

// Secret keys the hashes that stand for sessions. Nobody without the secret can compute the
// hash of a client's key, or find two keys with one hash. It does not change. Routers that
// share a store must share it.
type Secret [32]byte

// NewSecret returns a random secret.
func NewSecret() (s Secret) {
	_, _ = rand.Read(s[:]) // never fails
	return s
}

// Identity is the hash of a session key as the client sent it, without its tenant. The zero
// Identity stands for none.
type Identity [16]byte

// Tenant names whose session it is. Each part keeps sessions apart, and a part may be empty.
type Tenant [2]string

// What a hash is for. Hashes for different uses are never equal.
const (
	forIdentity = iota
	forSession
	forScope
)

// Identity returns the identity of a client's session key.
func (s *Secret) Identity(key string) Identity {
	return s.hash(forIdentity, key)
}

// Session returns the key of a tenant's session with a model. A client that uses several
// models under one name has a session with each: engines share no cache between models.
func (s *Secret) Session(id Identity, of Tenant, model string) Key {
	return s.hash(forSession, string(id[:]), of[0], of[1], model)
}

// Scope returns the scope of a tenant's sessions, see [Want]. It is 0 for the empty Tenant.
// Two tenants may have one scope.
func (s *Secret) Scope(of Tenant) uint32 {
	if of == (Tenant{}) {
		return 0
	}
	h := s.hash(forScope, of[0], of[1])
	return max(binary.LittleEndian.Uint32(h[:]), 1)
}

// hash returns the first half of a SHA-256. As each part's length precedes it and half of the
// digest stays hidden, no hash can be extended to that of a longer input.
func (s *Secret) hash(use byte, parts ...string) (h [16]byte) {
	b := make([]byte, 0, 512)
	b = append(append(b, s[:]...), use)
	for _, part := range parts {
		b = binary.AppendUvarint(b, uint64(len(part)))
		b = append(b, part...)
	}
	sum := sha256.Sum256(b)
	copy(h[:], sum[:])
	return h
}
