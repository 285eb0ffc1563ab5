// Package affinity keeps the bindings of sessions to targets, so that the turns of one
// conversation go where their prefix is already cached.
//
// [Bindings], the store, maps a session's [Key] to a [Binding]: a target (worker and
// data-parallel rank) and a sliding time to live.
//
// A [Use] is a request's part in its session. Concurrent first requests of a session go to one
// target. A binding does not expire while the session has live requests.
//
// A binding of kind [EngineBacked] stands for a session that the engine itself holds open.
// If such a binding expires, is evicted or is replaced, the store reports its end once to its
// owner. The owner can then release the engine's session.
//
// [Bindings.Dump] and [Bindings.Restore] let the owner keep bindings over a restart.
//
// The package does not choose targets, does not know whether a worker is healthy, calls no
// engine, and writes nothing to disk.
package affinity

import (
	"encoding/hex"
	"errors"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// ErrFull says that the store cannot accept a binding: live requests use nearly all
// bindings, or it is closed.
var ErrFull = errors.New("affinity: store is full")

// Key identifies a session. The caller makes it from the session's name by a keyed hash. So
// no client can choose keys that collide, and a key does not reveal the name. If two
// keys begin with the same 8 bytes, the older session loses its binding. With a million sessions,
// that happens once in 10^13 new ones. Routers that share a store must share the hash's secret.
type Key [16]byte

// String returns the key as 32 hexadecimal digits.
func (k Key) String() string { return hex.EncodeToString(k[:]) }

// IsZero returns whether k is the zero Key, which stands for no session.
func (k Key) IsZero() bool { return k == Key{} }

// ParseKey parses what [Key.String] returns. It returns false for anything else.
func ParseKey(s string) (k Key, ok bool) {
	if len(s) != hex.EncodedLen(len(k)) {
		return Key{}, false
	}
	_, err := hex.Decode(k[:], []byte(s))
	if err != nil || k.String() != s {
		return Key{}, false
	}
	return k, true
}

// Version identifies a binding among all that a session has ever had. A later one is
// greater. No binding has version 0, and a store uses no version twice, also across restarts.
type Version uint64

// Kind says whether the engine knows of a binding.
type Kind uint8

const (
	// RouterOnly bindings exist only in the router. The store does not report their end.
	RouterOnly Kind = iota
	// EngineBacked bindings have a counterpart in the engine that must be released. The
	// store reports their end: see [Options.OnExpire].
	EngineBacked
	// Fixed bindings exist only in the router, too. An operator made them, and they do not
	// change while their worker exists.
	Fixed
)

// String returns "router_only", "engine_backed" or "fixed".
func (k Kind) String() string {
	return [...]string{RouterOnly: "router_only", EngineBacked: "engine_backed", Fixed: "fixed"}[k]
}

// Reason says why a binding ended.
type Reason uint8

const (
	// Expired: the binding was not used for its time to live.
	Expired Reason = iota + 1
	// Evicted: the store needed room or its limits were lowered, and the binding was the
	// longest idle of a sample.
	Evicted
	// Replaced: the session was bound to another target.
	Replaced
)

// String returns "expired", "evicted" or "replaced".
func (r Reason) String() string {
	return [...]string{Expired: "expired", Evicted: "evicted", Replaced: "replaced"}[r]
}

// Want is what a session is to be bound to.
type Want struct {
	// Target is the worker and data-parallel rank that the session's requests go to.
	Target kvscore.Target `cbor:"-"`
	// TTL is how long the binding lives after its last use. With zero or less, it has ended when
	// it begins. More than 100 years count as 100.
	TTL time.Duration `cbor:"4,keyasint,omitempty"`
	// Scope is the tenant that the session belongs to, 0 if tenants are not told apart. It
	// must be the same in all calls for a key. A store limits each scope's share of its
	// entries.
	Scope uint32 `cbor:"5,keyasint,omitempty"`
	// Kind says whether the engine has a counterpart.
	Kind Kind `cbor:"6,keyasint,omitempty"`
	// EngineSession is the engine's own id of an EngineBacked session, empty for others.
	EngineSession string `cbor:"7,keyasint,omitempty"`
}

// Binding is the state of a session's binding at one moment. The zero Binding stands for
// none.
type Binding struct {
	Want
	// Expires is when the binding ends if it is not used before.
	Expires time.Time
	// Version changes with every successful Bind. Get and Touch do not change it.
	Version Version
}

// Entry is a binding together with its session, for listings.
type Entry struct {
	Key Key
	Binding
}
