package engine

import (
	"github.com/caddy-kvrouter/kvrouter/tests/engine/batch"
)

// stats is what a rank has done in this life.
type stats struct {
	queries, hits     int // prompt tokens asked for in the cache, and found
	generated         int // tokens
	stopped, cutShort int // requests that ended with the end token, or without
	aborted           int // requests
	expired           int // sessions
}

// admit counts a request that leaves the queue.
func (s *stats) admit(ev batch.Event) {
	s.queries += len(ev.Request.Prompt.Tokens)
	s.hits += ev.Cached
}

// token counts a token, before the job is told of it.
func (s *stats) token(ev batch.Event, j *job) {
	s.generated++
	switch {
	case !ev.Last:
	case j.reason == "stop":
		s.stopped++
	default:
		s.cutShort++
	}
}

// State is how an engine is at one moment.
type State struct {
	Name string `json:"name"`
	// Up says that it is not killed.
	Up bool `json:"up"`
	// Life counts the starts from 1.
	Life int `json:"life"`
	// Fault is the fault that is set, with the requests that are left to it.
	Fault Fault `json:"fault"`
	// PathFaults are those of single paths.
	PathFaults map[string]Fault `json:"path_faults,omitempty"`
	// NowMS is the virtual time, in milliseconds since the first start.
	NowMS float64 `json:"now_ms"`
	// Ranks is empty while the engine is killed.
	Ranks []RankState `json:"ranks"`
}

// RankState is how one data-parallel rank is. Counters begin again with each life.
type RankState struct {
	Running int `json:"running"`
	Waiting int `json:"waiting"`
	// The blocks that hold nothing, those that requests hold, and those that
	// nobody holds but that can be hit. They add up to the capacity.
	EmptyBlocks  int `json:"empty_blocks"`
	UsedBlocks   int `json:"used_blocks"`
	CachedBlocks int `json:"cached_blocks"`
	// FindableBlocks is how many different blocks can be hit, used ones included.
	FindableBlocks int `json:"findable_blocks"`
	// Sessions are open, and SessionBlocks are the used blocks that sessions hold
	// between their turns. Expired sessions were closed for their idle timeout.
	Sessions      int `json:"sessions"`
	SessionBlocks int `json:"session_blocks"`
	Expired       int `json:"expired"`
	// QueryTokens are the prompt tokens of admitted requests, HitTokens those of
	// them that were cached.
	QueryTokens     int `json:"query_tokens"`
	HitTokens       int `json:"hit_tokens"`
	GeneratedTokens int `json:"generated_tokens"`
	// Finished and Aborted are requests that came to an end.
	Finished int `json:"finished"`
	Aborted  int `json:"aborted"`
	// LagMS is the most virtual milliseconds that a step came too late, for want of
	// real time. Step times much below it cannot be believed.
	LagMS float64 `json:"lag_ms"`
}

// State returns how the engine is.
func (e *Engine) State() State {
	e.mu.Lock()
	l := e.life
	e.mu.Unlock()
	fault, paths := e.faults.get()
	s := State{Name: e.cfg.Name, Up: l != nil, Fault: fault, PathFaults: paths, NowMS: ms(e.clock.now()), Ranks: []RankState{}}
	if l == nil {
		return s
	}
	s.Life = l.number
	for _, k := range l.ranks {
		st, _ := k.snapshot()
		s.Ranks = append(s.Ranks, st)
	}
	return s
}

// snapshot returns how a rank is and what it has done.
func (k *rank) snapshot() (RankState, stats) {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := k.stats
	n := k.cache.Counts()
	blocks := 0
	for _, h := range k.held {
		blocks += h.slot.Blocks()
	}
	return RankState{
		Sessions: len(k.held), SessionBlocks: blocks, Expired: s.expired,
		Running: k.batch.Running(), Waiting: k.batch.Waiting() + len(k.inbox),
		EmptyBlocks: n.Empty, UsedBlocks: n.Used, CachedBlocks: n.Cached, FindableBlocks: k.cache.Findable(),
		QueryTokens: s.queries, HitTokens: s.hits, GeneratedTokens: s.generated,
		Finished: s.stopped + s.cutShort, Aborted: s.aborted, LagMS: ms(k.lag),
	}, s
}
