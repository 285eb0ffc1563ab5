// Package affinity remembers which worker a session is bound to, so that the
// turns of one conversation go where their prefix is already cached.
//
// A binding is a session id, a target (worker and data-parallel rank) and a
// sliding time to live. Bindings of kind [EngineBacked] stand for a session
// the engine itself holds open; the store tells its owner, once, when such a
// binding ends without having been asked for, so that the engine's side can be
// released.
//
// The package is not a router and not a prefix index: it does not choose
// targets, does not know whether a worker is healthy, speaks to no engine and
// persists nothing. A store lives in one process; two instances do not share
// their bindings.
package affinity

import (
	"errors"
	"strconv"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

var (
	// ErrFull is returned when a binding cannot be accepted: the session id
	// alone is larger than the memory bound, or the owner's OnExpire is so far
	// behind that no further end can be promised to be reported. Nothing has
	// changed for the session asked for.
	ErrFull = errors.New("affinity: store is full")
	// ErrClosed is returned by writes during and after Close.
	ErrClosed = errors.New("affinity: store is closed")
	// ErrTTL is returned for a time to live of zero or less.
	ErrTTL = errors.New("affinity: time to live is not positive")
)

// Kind says who knows about a binding.
type Kind uint8

const (
	// RouterOnly bindings exist in the router alone. Their end is not reported.
	RouterOnly Kind = iota
	// EngineBacked bindings have a counterpart in the engine, which somebody
	// has to release. Their end is reported, see [Options.OnExpire].
	EngineBacked
)

// String returns "router_only", "engine_backed", or the number of a kind this
// package does not know.
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
	// Evicted: the binding was the longest idle of a sample when room was
	// needed, or the limits were lowered.
	Evicted
	// Replaced: the session was bound to another target.
	Replaced
)

// String returns "expired", "evicted", "replaced", or the number of a reason
// this package does not know.
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

// Binding is what the store knows about a session at one moment.
type Binding struct {
	// Target is the worker, and the data-parallel rank in it, that the
	// session's requests go to.
	Target kvscore.Target
	// Kind says whether the engine has a counterpart.
	Kind Kind
	// TTL is how long the binding lives after its last use.
	TTL time.Duration
	// Expires is when the binding ends if it is not used before.
	Expires time.Time
	// Version is another number after every accepted Put and CompareAndSwap,
	// never used twice by one store and never 0. Uses do not change it.
	Version uint64
}

// Entry is a binding together with its session, for listings.
type Entry struct {
	// Session is the session id as given to Put. It identifies a user's
	// conversation: do not log it in the clear.
	Session string
	Binding
}

// Store keeps the bindings of sessions. All methods may be called from any
// goroutine, also during and after Close; then reads find nothing and writes
// return [ErrClosed]. A write that has returned is seen by every later read.
//
// The store does not bound the length of a session id, its caller does.
type Store interface {
	// Get returns the session's binding and starts its time to live anew. It
	// returns false for a session which is unknown or expired.
	Get(session string) (Binding, bool)

	// Peek returns the session's binding without extending its life. It
	// returns false for a session which is unknown or expired.
	Peek(session string) (Binding, bool)

	// Put binds the session to a target, whatever it was bound to, and returns
	// the new binding. If there is no room, another session's binding makes
	// way. The errors are ErrTTL, ErrFull and ErrClosed; on any of them the
	// session keeps the binding it had.
	//
	// A session put again on its target is renewed, and nothing is reported,
	// not even if its kind changes: who turns an EngineBacked binding into a
	// RouterOnly one takes over its release.
	Put(session string, t kvscore.Target, ttl time.Duration, kind Kind) (Binding, error)

	// Remove ends the session's binding if that still has the version, and
	// returns it; the end is the caller's to act upon and is not reported. It
	// returns false for a session which is unknown or expired, or whose binding
	// has another version: that one stays as it is. No binding has version 0.
	Remove(session string, version uint64) (Binding, bool)

	// CompareAndSwap is Put on the condition that the session's binding still
	// has the version old, or, for 0, that the session has none. It returns
	// the new binding and true. If the condition does not hold it returns
	// false without an error, and the binding that stands in the way; that is
	// the zero Binding if there is none any more. Losing does not extend the
	// winner's life. The errors are those of Put.
	CompareAndSwap(session string, old uint64, t kvscore.Target, ttl time.Duration, kind Kind) (Binding, bool, error)

	// List returns up to limit live bindings whose session sorts after the one
	// given, ordered by session. Start with "" and go on with the last session
	// of a full page. (A session named "" is therefore never listed.) It reads
	// the whole store for every page and is meant for administration.
	List(after string, limit int) []Entry

	// Range calls f with every live binding, in no order, until f returns
	// false. One that is made or ended meanwhile may be missed, and one may
	// come twice. f must not use the store. Range reads the whole store and is
	// meant for administration.
	Range(f func(Entry) bool)

	// Len returns how many bindings are held. An expired one counts until it
	// is noticed, at the latest by the next sweep.
	Len() int

	// Bytes estimates the memory, in bytes, that the bindings counted by Len
	// take.
	Bytes() int64

	// Close ends all bindings without reporting them, and every goroutine of
	// the store. It always returns nil.
	Close() error
}
