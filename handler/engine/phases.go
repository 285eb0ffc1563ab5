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
	RoleBackup  Role = "backup"  // requests that no other worker can serve now
)

// Roles are all roles.
var Roles = []Role{RoleBoth, RolePrefill, RoleDecode, RoleBackup}

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
	l := e.Phases()
	return l.apis == nil || l.whole || e.Role() == RoleBoth
}

// Phases are how two engines of a type share a request: one computes the prompt, the other the
// answer. The zero value: they do not.
type Phases struct {
	// Concurrent: both phases are sent at once, and the decode engine waits for the prompt.
	// Otherwise the answer to the prefill phase says where the prompt is.
	Concurrent bool
	// TransferTimeout is how long the decode phase of a client that left may go on. The decode engine has
	// then fetched the prompt, or given up.
	TransferTimeout time.Duration
	// CancelUnsafe: to cancel a decode phase before its first token may leave an engine without function.
	CancelUnsafe bool
	// TextOnly: a request with images or other media is not split.
	TextOnly bool

	// apis are those in which the engines can.
	apis []string
	// whole: an engine for one phase can also serve a whole request.
	whole bool
	// prefill and decode change the body of a phase.
	prefill, decode func(*adapter)
	// readTransfer reads what the answer to the prefill phase says for the decode phase. nil: nothing
	// is said.
	readTransfer func(answer []byte, l *Phase) PrefillResult
	// abort is the path to which a phase's id is posted to end it. Empty: the end of the
	// connection does it.
	abort string
}

// Phases returns how engines of the type share a request. The caller must not change it.
func (e *Engine) Phases() *Phases { return &kindOf(e.Type).phases }

// Phase is one of the two parts of a request, and what the engine must know of the other one.
type Phase struct {
	Prefill bool
	// ID names the phases to their engines. Room is the id of the transfer. Both are new for
	// each pair of phases.
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
	// TransferParams are the prefill engine's for the decode engine, as a JSON object. Prompt are the
	// token ids of the prompt, as a JSON list; nil if the prefill engine did not return them.
	TransferParams, Prompt []byte
	// Answer is the answer to the client if it ended with the prefill.
	Answer []byte
}

// PrefillResult is what the answer to a prefill phase means for the decode phase.
type PrefillResult uint8

// The meanings.
const (
	NoTransfer   PrefillResult = iota // the decode engine must compute the prompt itself
	Transferable                      // the decode engine can get the prompt's KV cache
	AnswerEnded                       // the first token ended the answer, which is Phase.Answer; nil if the client needs another
)

// over records that the answer ended with the prefill.
func (l *Phase) over(answer []byte) PrefillResult {
	l.Answer = answer
	return AnswerEnded
}

// Pairs returns whether the engine can compute the prompt of a request in an API for a decode
// engine.
func (e *Engine) Pairs(decode *Engine, name string) bool { return e.Splits(name) && e.Alike(decode) }

// Alike returns whether both engines have one type and version. Only then they share a format of the KV cache.
func (e *Engine) Alike(other *Engine) bool {
	return e.Type == other.Type && e.Info.Version == other.Info.Version
}

// Splits returns whether the engine can compute the prompt of a request in an API for another engine
// of its type. With Mooncake, the router must know which rank computes it.
func (e *Engine) Splits(name string) bool {
	return slices.Contains(e.Phases().apis, name) && (!strings.Contains(e.Info.MooncakeIDs, "\n") || e.TakesRankIn(name))
}

// CanTransfer returns whether a decode engine can get prompts of the engine now, as far as the router knows.
func (e *Engine) CanTransfer() bool { return e.Settings.MooncakePort == 0 || e.Info.MooncakeIDs != "" }

// Meet says in a phase where a decode engine meets this prefill engine.
func (e *Engine) Meet(l *Phase) {
	l.Port = cmp.Or(e.Settings.MooncakePort, e.Info.TransferPort, DefaultTransferPort)
	if ids := strings.Split(e.Info.MooncakeIDs, "\n"); e.Settings.MooncakePort > 0 && int(l.Rank) < len(ids) {
		l.Remote = ids[l.Rank]
	}
}

// ReadTransfer reads the answer to the prefill phase into the phase.
func (e *Engine) ReadTransfer(answer []byte, phase *Phase) PrefillResult {
	switch l := e.Phases(); {
	case l.apis == nil:
		return NoTransfer
	case l.readTransfer == nil:
		return Transferable
	default:
		return l.readTransfer(answer, phase)
	}
}

// Abort returns the path and the body of the request that ends a phase; empty if the end of the
// connection does it.
func (e *Engine) Abort(id string) (path string, body []byte) {
	l := e.Phases()
	if l.abort == "" {
		return "", nil
	}
	return l.abort, append(append([]byte(`{"rid":`), quoted(id)...), '}')
}

// ownPhases are the grants for the members that name a transfer: only a router in front of this
// one may choose it.
func ownPhases(members ...string) (list []steering) {
	for _, m := range members {
		list = append(list, steering{member: m, grant: nvext.Pins})
	}
	return list
}

// phase changes the body for one of two phases.
func (f *adapter) phase() {
	switch {
	case f.Phase == nil || f.phases.apis == nil:
	case f.Phase.Prefill:
		f.phases.prefill(f)
	default:
		f.phases.decode(f)
	}
}
