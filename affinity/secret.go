package affinity

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
)

// Secret keys the hashes that stand for sessions. Nobody without the secret can compute the
// hash of a session key, or find two keys with one hash. It does not change.
type Secret [32]byte

// NewSecret returns a random secret.
func NewSecret() (s Secret) {
	_, _ = rand.Read(s[:]) // never fails
	return s
}

// Identity is the hash of a session key as the client sent it, without its tenant. The zero
// Identity stands for none.
type Identity [16]byte

// What a hash is for. Hashes for different uses are never equal.
const (
	forIdentity = iota
	forSession
	forModel
)

// Identity returns the identity of a client's session key.
func (s *Secret) Identity(key string) Identity {
	return s.hash(forIdentity, key)
}

// Session returns the hash under which a session is bound. The scope names the tenant: each
// of its parts keeps sessions apart, and a part may be empty.
func (s *Secret) Session(id Identity, scope [2]string) [16]byte {
	return s.hash(forSession, string(id[:]), scope[0], scope[1])
}

// Model returns the hash under which a session is bound for one of its models. session is
// the session's own hash.
func (s *Secret) Model(session, model string) [16]byte {
	return s.hash(forModel, session, model)
}

// hash returns the first half of a SHA-256. As each part's length precedes it and half of the
// digest stays hidden, no hash can be extended to that of a longer input.
func (s *Secret) hash(use byte, parts ...string) (h [16]byte) {
	b := make([]byte, 0, 256)
	b = append(append(b, s[:]...), use)
	for _, part := range parts {
		b = binary.AppendUvarint(b, uint64(len(part)))
		b = append(b, part...)
	}
	sum := sha256.Sum256(b)
	copy(h[:], sum[:])
	return h
}
