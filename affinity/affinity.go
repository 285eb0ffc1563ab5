// Package affinity keeps the bindings of sessions to targets, so that the turns of one
// conversation go where their prefix is already cached.
//
// A [Store] maps a session's [Key] to a [Binding]: a target (worker and data-parallel rank)
// and a sliding time to live. [Ristretto] is the store in memory.
//
// [Sessions] coordinates the requests of one router over a store. Concurrent first requests
// of a session go to one target. A binding does not expire while a request uses it.
//
// A binding of kind [EngineBacked] stands for a session that the engine itself holds open.
// If such a binding expires, is evicted or is replaced, the store reports its end once to its
// owner. The owner can then release the engine's session.
//
// [Ristretto.Dump] and [Ristretto.Restore] let the owner keep bindings over a restart.
//
// The package does not choose targets, does not know whether a worker is healthy, calls no
// engine, and writes nothing to disk.
package affinity

import (
	"context"
	"encoding/hex"
	"errors"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

var (
	// ErrFull says that the store cannot accept a binding: live requests use nearly all
	// bindings.
	ErrFull = errors.New("affinity: store is full")
	// ErrClosed is returned during and after Close.
	ErrClosed = errors.New("affinity: store is closed")
	// ErrTTL is returned for a time to live of zero or less.
	ErrTTL = errors.New("affinity: time to live is not positive")
)

// Key identifies a session. The caller makes it from the session's name by a keyed hash. So
// no client can choose keys that collide, and a key does not reveal the name. Routers that
// share a store must share the hash's secret.
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
)

// String returns "router_only" or "engine_backed".
func (k Kind) String() string {
	if k == EngineBacked {
		return "engine_backed"
	}
	return "router_only"
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
	switch r {
	case Expired:
		return "expired"
	case Evicted:
		return "evicted"
	case Replaced:
	}
	return "replaced"
}

// Want is what a session is to be bound to.
type Want struct {
	// Target is the worker and data-parallel rank that the session's requests go to.
	Target kvscore.Target
	// TTL is how long the binding lives after its last use. It must be positive. More than
	// 100 years count as 100.
	TTL time.Duration
	// Scope is the tenant that the session belongs to, 0 if tenants are not told apart. It
	// must be the same in all calls for a key. A store limits each scope's share of its
	// entries.
	Scope uint32
	// Kind says whether the engine has a counterpart.
	Kind Kind
	// EngineSession is the engine's own id of an EngineBacked session, empty for others.
	EngineSession string
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

// Store keeps the bindings of sessions. Several routers may share one. Its methods are safe
// for concurrent use, also during and after Close: then they return [ErrClosed].
//
// Every read sees the writes that returned before it, in any router. Writes are conditional
// on a version, so that no router overwrites a binding that it has not seen. If the condition
// does not hold, the method returns the current binding, false and no error. The binding is
// zero if the session has none. Losing a race is an ordinary outcome, and the caller needs
// the winner.
//
// An error means that the store could not be asked. A write that returns an error other than
// ErrTTL, ErrFull and ErrClosed may have happened: the next read tells. The error of a
// context that has ended is the context's; a store that does not wait may ignore contexts.
type Store interface {
	// Get returns the session's binding and restarts its time to live. It returns false
	// for a session that is unknown or expired.
	Get(ctx context.Context, key Key) (Binding, bool, error)

	// Peek returns the session's binding without extending its life. It returns false for
	// a session that is unknown or expired.
	Peek(ctx context.Context, key Key) (Binding, bool, error)

	// Bind binds the session if its present binding has the version expect, or for 0, if
	// it has no binding. It returns the new binding and true. If there is no room, the
	// store evicts another session's binding.
	//
	// Bind to the same target renews the binding and reports no end, even if the kind
	// changes. A caller that makes an EngineBacked binding RouterOnly must release the
	// engine's session itself.
	Bind(ctx context.Context, key Key, expect Version, want Want) (Binding, bool, error)

	// Unbind ends the session's binding if it has the version expect, and returns it. The
	// store does not report this end.
	Unbind(ctx context.Context, key Key, expect Version) (Binding, bool, error)

	// Touch restarts the binding's time to live if it has the version expect.
	Touch(ctx context.Context, key Key, expect Version) (Binding, bool, error)

	// List returns up to limit live bindings with keys greater than after, ordered by key.
	// Start with the zero Key and continue with the last key of a full page. List never
	// returns the zero Key. It may read the whole store for every page and is meant for
	// administration.
	List(ctx context.Context, after Key, limit int) ([]Entry, error)

	// Len returns the number of bindings in this router's memory. An expired one counts
	// until its end is noticed.
	Len() int

	// Bytes estimates the memory of the bindings that Len counts, in bytes.
	Bytes() int64

	// Close ends every goroutine of the store. A store in memory ends all bindings without
	// reporting them.
	Close() error
}
