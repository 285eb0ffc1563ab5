package engine

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine/batch"
)

// Role is the part of a request that an engine can do.
type Role string

// The roles. A vLLM and a TensorRT-LLM do whatever a request asks for, and do not tell their role.
// An SGLang refuses requests without a room if it has one, and tells it at /server_info.
const (
	BothPhases    Role = ""
	PrefillPhases Role = "prefill"
	DecodePhases  Role = "decode"
)

// Transfer is how an engine hands the KV of prompts to other engines, and gets it from them. A vLLM
// uses NIXL's words, an SGLang and a TensorRT-LLM their own. All times are virtual.
type Transfer struct {
	Role Role
	// Fixed and PerToken are the milliseconds of a transfer. Transfers do not slow each other.
	// Default: 2, and 0.005 for each token that the decode engine lacks.
	Fixed, PerToken float64
	// Lease is for how long a vLLM or TensorRT-LLM keeps a prompt's blocks that nobody fetches.
	// Default: 30 s.
	Lease time.Duration
	// Lost is after how long a decode engine answers 500 if the prefill engine is not there or
	// lost the blocks. Default: 5 s; for an SGLang 15 s.
	Lost time.Duration
	// Alone is after how long a phase of an SGLang answers 500 if the other one does not come.
	// Default: 300 s.
	Alone time.Duration
}

func (t *Transfer) complete(f Flavour) error {
	lost := 5 * time.Second
	if f == SGLang {
		lost = 15 * time.Second
	}
	if t.Fixed == 0 && t.PerToken == 0 {
		t.Fixed, t.PerToken = 2, 0.005
	}
	orDefault(&t.Lease, 30*time.Second)
	orDefault(&t.Lost, lost)
	orDefault(&t.Alone, 300*time.Second)
	switch {
	case f != VLLM && f != SGLang && f != TRTLLM:
		return fmt.Errorf("a %s that transfers", f)
	case t.Role != BothPhases && t.Role != PrefillPhases && t.Role != DecodePhases, f == SGLang && t.Role == BothPhases:
		return fmt.Errorf("role %q of a %s", t.Role, f)
	}
	return nil
}

// Transfers are the numbers of prompts that an engine prefilled for other engines.
type Transfers struct {
	// Held are those whose blocks wait for a decode engine now. Fetched and Expired are all that
	// were fetched, and all that nobody fetched in time.
	Held, Fetched, Expired int64
}

// transferCounts are those of all lives.
type transferCounts struct{ held, fetched, expired atomic.Int64 }

// Transfers returns the present numbers.
func (e *Engine) Transfers() Transfers {
	return Transfers{e.transfers.held.Load(), e.transfers.fetched.Load(), e.transfers.expired.Load()}
}

// side is where the decode engines ask a prefill engine for KV: NIXL's side channel, or SGLang's
// bootstrap server. It ends with the engine's life.
type side struct {
	engine *Engine

	mu    sync.Mutex
	kept  map[string]*kept
	rooms map[uint64]*room
}

// offer is a prompt whose KV a prefill engine has. Cached are the tokens that it had cached.
type offer struct {
	Tokens int `json:"tokens"`
	Cached int `json:"cached"`
}

// kept is the KV of a prompt, for decode engines.
type kept struct {
	offer
	rank *rank
	slot *batch.Slot
}

// room is where the two phases of an SGLang meet. The first one makes it.
type room struct {
	prefill, decode bool // it is there
	met             chan struct{}
	ready           chan struct{} // closed when offer is there
	fetched         chan struct{} // closed when the decode engine has it
	offer
}

// openSide begins the side channel of a life; nil without transfers. The caller holds ops.
func (e *Engine) openSide() (*side, error) {
	if e.cfg.Transfer == nil {
		return nil, nil //nolint:nilnil // there is none
	}
	s := &side{engine: e, kept: make(map[string]*kept), rooms: make(map[uint64]*room)}
	e.sideServer.Handler, e.sideServer.IdleTimeout = s, keepAlive
	if e.lives == 0 {
		return s, e.sideServer.Start("")
	}
	return s, e.sideServer.Restart()
}

func (s *side) close() {
	if s == nil {
		return
	}
	s.engine.sideServer.Kill()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.kept {
		if k.slot != nil {
			s.engine.transfers.held.Add(-1)
		}
	}
	s.kept = nil
}

// name is that of the engine's only rank. It changes with each start.
func (s *side) name() string { return fmt.Sprintf("%s-%p", s.engine.cfg.Name, s) }

// ServeHTTP answers a decode engine: GET what there is of a request or in a room, POST that it has
// been fetched. At /query it is a bootstrap server of Mooncake.
func (s *side) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/query" {
		_ = json.NewEncoder(w).Encode(object{"0": object{"engine_id": s.name(), "worker_addr": object{}}})
		return
	}
	var o *offer
	if id := r.FormValue("request"); id != "" {
		o = s.ofRequest(id, r.Method == http.MethodPost)
	} else if n, err := strconv.ParseUint(r.FormValue("room"), 10, 64); err == nil {
		o = s.ofRoom(n, r)
	}
	if o == nil {
		w.WriteHeader(http.StatusNotFound)
		return
	}
	_ = json.NewEncoder(w).Encode(o)
}

// keep holds the KV of a request for its lease.
func (s *side) keep(id string, k *kept) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.kept == nil {
		return // the engine is dead
	}
	s.engine.transfers.held.Add(1)
	s.kept[id] = k
	lease := time.Duration(float64(s.engine.cfg.Transfer.Lease) / s.engine.cfg.Speed)
	time.AfterFunc(lease, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.kept[id] == k {
			s.release(k, &s.engine.transfers.expired)
			delete(s.kept, id)
		}
	})
}

// release gives the blocks back, once.
func (s *side) release(k *kept, count *atomic.Int64) {
	if k.slot == nil {
		return
	}
	k.rank.mu.Lock()
	k.slot.Release()
	k.rank.free()
	k.rank.mu.Unlock()
	k.slot = nil
	count.Add(1)
	s.engine.transfers.held.Add(-1)
}

// ofRequest returns what there is of a request. It may be fetched again until its lease ends.
func (s *side) ofRequest(id string, fetched bool) *offer {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.kept[id]
	if k == nil {
		return nil
	}
	if fetched {
		s.release(k, &s.engine.transfers.fetched)
	}
	return &k.offer
}

// enterRoom takes a place in a room, nil if that is taken.
func (s *side) enterRoom(n uint64, place func(*room) *bool) *room {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.rooms[n]
	if r == nil {
		r = &room{met: make(chan struct{}), ready: make(chan struct{}), fetched: make(chan struct{})}
		s.rooms[n] = r
	}
	if taken := place(r); *taken {
		return nil
	} else if *taken = true; r.prefill && r.decode {
		close(r.met)
	}
	return r
}

// leaveRoom forgets a room. The other phase may still wait in it.
func (s *side) leaveRoom(n uint64, r *room) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rooms[n] == r {
		delete(s.rooms, n)
	}
}

// ofRoom waits for the prefill in a room, and then for the decode engine to have it.
func (s *side) ofRoom(n uint64, q *http.Request) *offer {
	if q.Method == http.MethodPost {
		s.mu.Lock()
		r := s.rooms[n]
		s.mu.Unlock()
		if r == nil {
			return nil
		}
		close(r.fetched) // there is one decode phase
		return &r.offer
	}
	r := s.enterRoom(n, func(r *room) *bool { return &r.decode })
	if r == nil {
		return nil
	}
	select {
	case <-r.ready:
		return &r.offer
	case <-q.Context().Done():
		s.leaveRoom(n, r)
		return nil
	}
}

// duration returns how long a transfer takes.
func (t *Transfer) duration(tokens int) time.Duration {
	return time.Duration((t.Fixed + t.PerToken*float64(max(0, tokens))) * float64(time.Millisecond))
}

// SideAddr returns the host:port at which decode engines ask for KV; empty without transfers.
func (e *Engine) SideAddr() string { return e.sideServer.Addr() }

// hostPort cuts an address.
func hostPort(addr string) (host string, port int) {
	host, text, _ := net.SplitHostPort(addr)
	port, _ = strconv.Atoi(text)
	return cmp.Or(host, "127.0.0.1"), port
}
