package engine

import (
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine/batch"
)

// stats is what a rank has done in this life.
type stats struct {
	queries, hits      int // prompt tokens asked for in the cache, and found
	generated          int // tokens
	stopped, cutShort  int // requests that ended with the end token, or without
	aborted            int // requests
	expired            int // sessions
	ttft, itl, e2e     histogram
	queueing, prefills histogram
}

// The buckets are vLLM's, in seconds.
var (
	ttftBuckets = []float64{0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560}
	itlBuckets  = []float64{0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}
	e2eBuckets  = []float64{0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680}
)

func newStats() stats {
	return stats{
		ttft: newHistogram(ttftBuckets), itl: newHistogram(itlBuckets), e2e: newHistogram(e2eBuckets),
		queueing: newHistogram(e2eBuckets), prefills: newHistogram(e2eBuckets),
	}
}

// admit counts a request that leaves the queue.
func (s *stats) admit(ev batch.Event, arrived time.Duration) {
	s.queries += len(ev.Request.Prompt.Tokens)
	s.hits += ev.Cached
	s.queueing.observe(ev.At - arrived)
}

// token counts a token, before the job is told of it.
func (s *stats) token(ev batch.Event, j *job) {
	s.generated++
	if ev.Index == 0 {
		s.ttft.observe(ev.At - j.arrived)
		s.prefills.observe(ev.At - j.admitted)
	} else {
		s.itl.observe(ev.At - j.last)
	}
	if !ev.Last {
		return
	}
	s.e2e.observe(ev.At - j.arrived)
	if j.reason == "stop" {
		s.stopped++
	} else {
		s.cutShort++
	}
}

// histogram counts durations.
type histogram struct {
	bounds []float64 // seconds
	counts []int     // one more than the bounds
	sum    float64   // seconds
}

func newHistogram(bounds []float64) histogram {
	return histogram{bounds: bounds, counts: make([]int, len(bounds)+1)}
}

func (h *histogram) observe(d time.Duration) {
	i, _ := slices.BinarySearch(h.bounds, d.Seconds())
	h.counts[i]++
	h.sum += d.Seconds()
}

func (h histogram) clone() histogram {
	h.counts = slices.Clone(h.counts)
	return h
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
	for _, h := range []*histogram{&s.ttft, &s.itl, &s.e2e, &s.queueing, &s.prefills} {
		*h = h.clone()
	}
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
