package engine

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
)

// Role is which part of requests a worker serves.
type Role string

// The roles.
const (
	RoleBoth    Role = "both"    // whole requests
	RolePrefill Role = "prefill" // the prompts of requests that another worker answers
	RoleDecode  Role = "decode"  // answers to prompts that another worker computed
)

// Roles are all roles.
var Roles = []Role{RoleBoth, RolePrefill, RoleDecode}

// Role returns the operator's role, or else the one that the engine reports.
func (e *Engine) Role() Role {
	switch {
	case e.Settings.Role != "":
		return e.Settings.Role
	case e.Info.Role != "":
		return e.Info.Role
	}
	return RoleBoth
}

// ServesWhole returns whether the engine can serve a whole request.
func (e *Engine) ServesWhole() bool {
	l := kindOf(e.Type).legs
	return l == nil || l.whole || e.Role() == RoleBoth
}

// Legs are how two engines of a type share a request: one computes the prompt, the other the
// answer. The zero value: they do not.
type Legs struct {
	// Together: both legs are sent at once, and the decode engine waits for the prompt.
	// Otherwise the answer to the prefill leg says where the prompt is.
	Together bool
	// Fetches is how long the decode leg of a client that left may go on. The decode engine has
	// then fetched the prompt, or given up.
	Fetches time.Duration
	// Wedges: to cancel a decode leg before its first token may leave an engine without function.
	Wedges bool
	// TextOnly: a request with images or other media is not parted.
	TextOnly bool

	// apis are those in which the engines can.
	apis []string
	// whole: an engine for one leg can also serve a whole request.
	whole bool
	// prefill and decode change the body of a leg.
	prefill, decode func(*adapter)
	// handed reads what the answer to the prefill leg says for the decode leg. nil: nothing
	// is said.
	handed func(answer []byte, l *Leg) Handover
	// abort is the path to which a leg's id is posted to end it. Empty: the end of the
	// connection does it.
	abort string
}

var noLegs Legs

// Legs returns how engines of the type share a request. The caller must not change it.
func (e *Engine) Legs() *Legs {
	if l := kindOf(e.Type).legs; l != nil {
		return l
	}
	return &noLegs
}

// Leg is one of the two parts of a request, and what the engine must know of the other one.
type Leg struct {
	Prefill bool
	// ID names the legs to their engines. Room is the id of the transfer. Both are new for
	// each pair of legs.
	ID   string
	Room uint64
	// Host is the prefill worker's, as the decode engine reaches it, and Port that of its server for
	// transfers. Rank and Ranks are those of the prefill worker. Remote is the name of its rank in
	// Mooncake; empty for another connector.
	Host   string
	Port   int
	Rank   uint32
	Ranks  int
	Remote string
	// Handed is what the prefill engine answered for the decode engine. Prompt are the token ids
	// of the prompt, as a JSON list; nil if it did not tell them.
	Handed, Prompt []byte
	// Answer is the answer to the client if it ended with the prefill.
	Answer []byte
}

// Handover is what the answer to a prefill leg means for the decode leg.
type Handover uint8

// The meanings.
const (
	NotHanded  Handover = iota // the decode engine must compute the prompt itself
	HandedOver                 // the decode engine can get the prompt
	Over                       // the first token ended the answer, which is Leg.Answer; nil if the client needs another
)

// over records that the answer ended with the prefill.
func (l *Leg) over(answer []byte) Handover {
	l.Answer = answer
	return Over
}

// Pairs returns whether the engine can compute the prompt of a request in an API for a decode
// engine. Only engines of one type and version share a format of the KV cache.
func (e *Engine) Pairs(decode *Engine, name string) bool {
	return e.Parts(name) && e.Type == decode.Type && e.Info.Version == decode.Info.Version
}

// Parts returns whether the engine can compute the prompt of a request in an API for another engine
// of its type. With Mooncake, the router must know which rank computes it.
func (e *Engine) Parts(name string) bool {
	return slices.Contains(e.Legs().apis, name) && (!strings.Contains(e.Info.MooncakeIDs, "\n") || e.TakesRankIn(name))
}

// HandsOver returns whether the engine can hand prompts over now, as far as the router knows.
func (e *Engine) HandsOver() bool { return e.Settings.MooncakePort == 0 || e.Info.MooncakeIDs != "" }

// Meet says in a leg where a decode engine meets this prefill engine.
func (e *Engine) Meet(l *Leg) {
	l.Port = cmp.Or(e.Settings.MooncakePort, e.Info.TransferPort, DefaultTransferPort)
	if ids := strings.Split(e.Info.MooncakeIDs, "\n"); e.Settings.MooncakePort > 0 && int(l.Rank) < len(ids) {
		l.Remote = ids[l.Rank]
	}
}

// Handed reads the answer to the prefill leg.
func (e *Engine) Handed(answer []byte, leg *Leg) Handover {
	switch l := kindOf(e.Type).legs; {
	case l == nil:
		return NotHanded
	case l.handed == nil:
		return HandedOver
	default:
		return l.handed(answer, leg)
	}
}

// Abort returns the path and the body of the request that ends a leg; empty if the end of the
// connection does it.
func (e *Engine) Abort(id string) (path string, body []byte) {
	l := e.Legs()
	if l.abort == "" {
		return "", nil
	}
	return l.abort, append(append([]byte(`{"rid":`), quoted(id)...), '}')
}

// ownLegs are the grants for the members that name a transfer: only a router in front of this
// one may choose it.
func ownLegs(members ...string) (list []steering) {
	for _, m := range members {
		list = append(list, steering{member: m, grant: nvext.Pins})
	}
	return list
}

// leg changes the body for one of two legs.
func (f *adapter) leg() {
	switch {
	case f.Leg == nil || f.legs == nil:
	case f.Leg.Prefill:
		f.legs.prefill(f)
	default:
		f.legs.decode(f)
	}
}
