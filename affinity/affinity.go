// Package affinity keeps the bindings of sessions to targets, so that the turns of one
// conversation go where their prefix is already cached.
//
// A binding is a session id, a target (worker and data-parallel rank) and a sliding time to
// live. A binding of kind [EngineBacked] stands for a session that the engine itself holds
// open. If such a binding expires, is evicted or is replaced, the store reports its end
// once to its owner. The owner can then release the engine's session.
//
// The package does not choose targets, does not know whether a worker is healthy, calls no
// engine and persists nothing. A store lives in one process and shares nothing with others.
package affinity

import (
	"errors"
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

var (
	// ErrFull says that the store cannot accept a binding. Either the session id alone is
	// larger than the memory bound, or OnExpire is so far behind that the store cannot
	// guarantee a further report. The session keeps the binding that it had.
	ErrFull = errors.New("affinity: store is full")
	// ErrClosed is returned by writes during and after Close.
	ErrClosed = errors.New("affinity: store is closed")
	// ErrTTL is returned for a time to live of zero or less.
	ErrTTL = errors.New("affinity: time to live is not positive")
)

// Kind says whether the engine knows of a binding.
type Kind uint8

const (
	// RouterOnly bindings exist only in the router. The store does not report their end.
	RouterOnly Kind = iota
	// EngineBacked bindings have a counterpart in the engine that must be released. The
	// store reports their end: see [Options.OnExpire].
	EngineBacked
)

// String returns "router_only", "engine_backed", or the number of an
// unknown kind.
func (k Kind) String() string {
	switch k {
	case RouterOnly:
		return "router_only"
	case EngineBacked:
		return "engine_backed"
	}
	return "kind_" + strconv.Itoa(int(k))
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

// String returns "expired", "evicted", "replaced", or the number of an unknown
// reason.
func (r Reason) String() string {
	switch r {
	case Expired:
		return "expired"
	case Evicted:
		return "evicted"
	case Replaced:
		return "replaced"
	}
	return "reason_" + strconv.Itoa(int(r))
}

// Binding is the state of a session's binding at one moment.
type Binding struct {
	// Target is the worker and data-parallel rank that the session's requests go to.
	Target kvscore.Target
	// Kind says whether the engine has a counterpart.
	Kind Kind
	// TTL is how long the binding lives after its last use.
	TTL time.Duration
	// Expires is when the binding ends if it is not used before.
	Expires time.Time
	// Version changes with every accepted Put and CompareAndSwap. A store never uses a
	// version twice, and never 0. Get does not change it.
	Version uint64
}

// Entry is a binding together with its session, for listings.
type Entry struct {
	// Session is the session id as given to Put. It identifies a user's conversation: do
	// not log it in clear text.
	Session string
	Binding
}

// Store keeps the bindings of sessions. Its methods are safe for concurrent use, also during
// and after Close: then reads find nothing and writes return [ErrClosed]. Every read sees
// the writes that returned before it.
//
// The caller bounds the length of a session id.
type Store interface {
	// Get returns the session's binding and restarts its time to live. It returns false
	// for a session that is unknown or expired.
	Get(session string) (Binding, bool)

	// Peek returns the session's binding without extending its life. It returns false for
	// a session that is unknown or expired.
	Peek(session string) (Binding, bool)

	// Put binds the session to a target, replacing any other binding, and returns the new
	// binding. If there is no room, the store evicts another session's binding. The errors
	// are ErrTTL, ErrFull and ErrClosed. After an error the session keeps the binding that
	// it had.
	//
	// Put on the same target renews the binding and reports nothing, even if the kind
	// changes. A caller that makes an EngineBacked binding RouterOnly must release the
	// engine's session itself.
	Put(session string, t kvscore.Target, ttl time.Duration, kind Kind) (Binding, error)

	// Remove ends the session's binding if it still has the version, and returns it. The
	// store does not report this end. Remove returns false and changes nothing if the
	// session is unknown or expired, or if its binding has another version. No binding has
	// version 0.
	Remove(session string, version uint64) (Binding, bool)

	// CompareAndSwap is Put if the session's binding still has the version old, or for 0,
	// if the session has no binding. It returns the new binding and true. If the condition
	// does not hold, it returns the current binding, false and no error. That is the zero
	// Binding if there is none, and its life is not extended. The errors are those of Put.
	CompareAndSwap(session string, old uint64, t kvscore.Target, ttl time.Duration, kind Kind) (Binding, bool, error)

	// List returns up to limit live bindings with sessions that sort after the given one,
	// ordered by session. Start with "" and continue with the last session of a full page.
	// List never returns a session named "". It reads the whole store for every page and
	// is meant for administration.
	List(after string, limit int) []Entry

	// Range calls f with every live binding, in no order, until f returns false. It may
	// miss a binding that is made or ended meanwhile, and may repeat one. f must not use
	// the store. Range reads the whole store and is meant for administration.
	Range(f func(Entry) bool)

	// Len returns the number of bindings. An expired one counts until the next sweep at
	// the latest.
	Len() int

	// Bytes estimates the memory of the bindings that Len counts, in bytes.
	Bytes() int64

	// Close ends all bindings without reporting them, and every goroutine of
	// the store. It always returns nil.
	Close() error
}
