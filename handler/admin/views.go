package admin

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/docs"
	"github.com/caddy-kvrouter/kvrouter/handler/body"
	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/handler/observe"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/quota"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// poolView is a pool, as the admin API shows it. What is not known is absent.
type poolView struct {
	Name            string `json:"name"`
	Workers         int    `json:"workers"`
	DrainingWorkers int    `json:"draining_workers"`
	kvscore.Stats
	Waiting int `json:"waiting_requests"`
	queuedView
	Sessions     int                `json:"sessions"`
	SessionBytes int64              `json:"session_bytes"`
	Responses    int                `json:"responses"`
	BodyBytes    int64              `json:"request_body_bytes"`
	Speculative  int                `json:"speculative_prefills"`
	Latency      latencyView        `json:"latency"`
	Settings     settingsView       `json:"settings"`
	Incidents    []observe.Incident `json:"incidents"`
	Journal      *journalView       `json:"journal,omitzero"`
	Share        *shareView         `json:"share,omitzero"`
	Limits       *quota.Standing    `json:"limits,omitzero"`
}

// shownTenants is how many tenants are shown, those that have used most of a limit.
const shownTenants = 20

type shareView struct {
	journal.ShareStatus
	Peers []peerView `json:"routers"`
}

type peerView struct {
	journal.Peer
	State string  `json:"state"`
	Seen  float64 `json:"seen_seconds_ago"`
}

func viewShare(p *pool.Pool, t time.Time) *shareView {
	s, on := p.ShareState()
	if !on {
		return nil
	}
	v := &shareView{ShareStatus: s, Peers: make([]peerView, 0, len(s.Peers))}
	for _, one := range s.Peers {
		v.Peers = append(v.Peers, peerView{one, one.State(), t.Sub(one.Seen).Seconds()})
	}
	return v
}

// journalView is how a pool's journal fares. Written is absent if the router has written nothing.
type journalView struct {
	Written float64 `json:"written_seconds_ago,omitzero"`
	pool.JournalState
}

// viewJournal returns nil if there is no journal.
func viewJournal(s pool.JournalState, t time.Time) *journalView {
	if !s.On {
		return nil
	}
	v := &journalView{JournalState: s}
	if !s.Written.IsZero() {
		v.Written = t.Sub(s.Written).Seconds()
	}
	return v
}

type settingsView struct {
	IndexMemory int64   `json:"index_memory_bytes"`
	BodyMemory  int64   `json:"request_bodies_memory_bytes"`
	BlockSize   int     `json:"block_size_tokens"`
	BlockSource string  `json:"block_size_from"`
	TextBlock   int     `json:"text_block_bytes"`
	TTL         float64 `json:"session_ttl_seconds"`
	MaxSessions int     `json:"max_sessions"`
	MaxWaiting  int     `json:"queue_max_waiting_requests"`
	MaxWait     float64 `json:"queue_max_wait_seconds"`
	Hold        string  `json:"queue_hold"`
}

type queuedView struct {
	Classes []pool.Queued `json:"queued_classes"`
	Tenants []pool.Queued `json:"queued_tenants"` // those with the most
}

// openIncidents returns the conditions that last, with what the manual says to do.
func openIncidents(p *pool.Pool, t time.Time) []observe.Incident {
	list := p.Incidents.Open(t)
	for i := range list {
		list[i].Advice = docs.Advice(list[i].What)
	}
	return list
}

func viewPool(p *pool.Pool, t time.Time) poolView {
	s, set := p.Scheduler.Stats(), p.Settings.Load()
	v := poolView{
		Name: p.Name, Stats: s, Waiting: p.Waiting(), Sessions: p.Sessions.Len(), SessionBytes: p.Sessions.Bytes(),
		Responses: p.Responses.Count(), BodyBytes: p.Memory.Held.Load(),
		Limits:  p.Quota.Standing(t, shownTenants),
		Latency: viewLatency(&s), Incidents: openIncidents(p, t), Journal: viewJournal(p.JournalState(), t), Share: viewShare(p, t),
		Settings: settingsView{
			IndexMemory: set.Memory, BodyMemory: body.MaxBytes(), BlockSize: set.BlockSize, BlockSource: blockSource(p, set), TextBlock: set.TextBlock,
			TTL: time.Duration(set.TTL).Seconds(), MaxSessions: set.MaxSessions,
			MaxWaiting: set.MaxWaiting, MaxWait: time.Duration(set.MaxWait).Seconds(), Hold: set.Hold,
		},
	}
	v.Classes, v.Tenants = p.Queued(t)
	for _, w := range p.All() {
		v.Workers++
		v.Speculative += w.Speculating()
		if w.Draining() {
			v.DrainingWorkers++
		}
	}
	return v
}

// sessionView is a session without its key, which is a secret to somebody.
type sessionView struct {
	KeyHash string  `json:"key_hash"`
	Bound   bool    `json:"bound"`
	Worker  uint64  `json:"worker,omitempty"`
	Dial    string  `json:"dial,omitempty"`
	Rank    uint32  `json:"dp_rank"`
	Kind    string  `json:"kind,omitempty"`
	TTL     float64 `json:"ttl_seconds,omitempty"`
	Expires float64 `json:"expires_in_seconds,omitempty"`
}

func dials(p *pool.Pool) map[kvscore.Target]string {
	list := make(map[kvscore.Target]string)
	for _, w := range p.All() {
		for rank := range w.Ranks() {
			list[w.Target(rank)] = w.Dial
		}
	}
	return list
}

func viewSession(key affinity.Key, b *affinity.Binding, dials map[kvscore.Target]string, t time.Time) sessionView {
	return sessionView{
		KeyHash: key.String(), Bound: true, Worker: b.Target.Worker, Dial: dials[b.Target], Rank: b.Target.Rank,
		Kind: b.Kind.String(), TTL: b.TTL.Seconds(), Expires: b.Expires.Sub(t).Seconds(),
	}
}

func blockSource(p *pool.Pool, set *pool.Settings) string {
	switch {
	case !set.BlockSizeUnset:
		return fromConfig
	case p.KnowsBlockSize():
		return fromEngine
	}
	return "default"
}

// latencyView is what the pool has learned of prefill times and of its traffic. The
// coefficients begin with assumptions, which hold while Timings is 0.
type latencyView struct {
	Fixed     float64 `json:"step_ms"`
	Tokens    float64 `json:"per_1000_tokens_ms"`
	Attention float64 `json:"per_million_token_pairs_ms"`
	Context   float64 `json:"per_1000_context_tokens_ms"`
	Timings   uint64  `json:"timings"`
	Answer    float64 `json:"expected_answer_tokens,omitzero"`
}

func viewLatency(s *kvscore.Stats) latencyView {
	l := &s.Latency
	return latencyView{
		Fixed: l.Fixed, Tokens: l.Token * 1e3, Attention: l.Attention * 1e6, Context: l.Context * 1e3,
		Timings: s.Timings, Answer: s.ExpectedAnswer,
	}
}
