package pool

import (
	"iter"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/queue"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// Wants is what a request needs of a worker, and its place in the queue. It is immutable.
type Wants struct {
	Model    string             // the worker must serve it, if any worker is known to
	Only     *worker.Worker     // the one worker that may serve the request; nil = any
	Rank     int64              // the data-parallel rank, or AnyRank
	Workers  []uint64           // ids of the workers that the client allows; nil = all
	Taints   []string           // the worker must have all of these
	Isolated bool               // the engine must keep the caches of different salts apart, in this API
	Session  bool               // the engine must be able to hold a session, in this API
	API      string             // of the request
	Tried    []*worker.Worker   // the worker must be none of these
	Prompt   int64              // tokens, about; 0 is unknown. Workers with room for Prompt and Answer come first
	Answer   int64              // most tokens of the answer; 0 is unknown
	Beyond   int64              // a worker with room for so many tokens has refused the prompt; 0: none has
	Part     worker.Part        // of a request that the worker must serve
	Backups  []uint64           // ids of the backups that may serve the request
	Over     bool               // none but these may
	Declared Backups            // those that its configuration declares
	NoTrial  bool               // its answer does not show whether the engine computes
	Kind     worker.AttemptKind // all but KindOther take one of the worker's slots
	Tier     int                // lower tiers leave the queue first
	Arrival  time.Time          // orders a tier, earliest first; includes the priority's head start
	Patience time.Duration      // how long the request may wait in the queue
	Rest     bool               // it is the rest of a stream
	Again    bool               // a worker has had it before
	ID       string             // of the request

	Class        *queue.Class // nil: the zero class
	Tenant       uint64       // a hash of the tenant's name; 0: all others together
	TenantName   string       // as the admin API shows it
	TenantWeight float64      // the tenant's share beside others of its class; 0 stands for 1
	Deadline     time.Time    // of the first token; zero: none
	Demoted      bool         // it has another class than it came with, as it would have been late
}

// Backups are the backups that a configuration declares, by address: the matchers of the requests that may go there.
type Backups map[string]caddyhttp.MatcherSets

// AnyRank is the Rank of a request that any rank may serve.
const AnyRank = -1

// Verdict says whether a request may use an offered worker, and if not, why.
type Verdict uint8

// The verdicts, from the best to the worst. A request may use a worker below Tried, if there is no
// better one.
const (
	Fits           Verdict = iota
	Full                   // it would fit, but no slot is free
	Backup                 // it is a backup, and well
	MarkedDown             // it is marked down or hung
	Draining               // a drain is the operator's wish, and a mark ends soon
	DrainingMarked         // both
	Fallback               // it is for prefills, but can serve a whole request
	Asleep                 // its engine sleeps, and can be woken
	Short                  // added to one of the above: its context is probably too short
)

// Further verdicts: a request must not use the worker.
const (
	Tried       = 2*Short + iota // the request has tried it, or its context is too short for certain
	Unavailable                  // Caddy has it not available
	OtherModels                  // it does not serve the model
	OtherRole                    // it does not serve this part of requests
	NotAllowed                   // the request's constraints, or its wish for a session, exclude it
	NoRank                       // it lacks the rank
	SharesCache                  // its engine does not keep caches of salts apart
	NotNamed                     // the request names another worker
)

// String returns the verdict as the admin API shows it.
func (v Verdict) String() string {
	if v >= Short && v.Possible() {
		return "too_short"
	}
	if v >= Tried {
		v -= Short
	}
	return [...]string{
		"fits", "full", "backup", "marked_down", "draining", "draining", "other_role", "asleep", "tried", "proxy_unavailable", "other_models",
		"other_role", "not_allowed", "not_allowed", "shares_cache", "not_named",
	}[v]
}

func (v Verdict) MarshalText() ([]byte, error) { return []byte(v.String()), nil }

// Possible returns whether the worker may serve the request now or once it is free.
func (v Verdict) Possible() bool { return v < Tried }

// State returns a verdict up to Fallback apart from the length of the request.
func (v Verdict) State() Verdict {
	if v.Possible() {
		return v % Short
	}
	return v
}

// tier returns what a full worker would be if it were not full. A request waits for a full
// worker if there is no free one of its tier.
func (v Verdict) tier() Verdict {
	if v.State() == Full {
		return v - Full
	}
	return v
}

// Judge yields the verdict on each offered worker, by its position.
func (r *registry) Judge(want *Wants, o Offers, t time.Time) iter.Seq2[int, Verdict] {
	j := r.judgment(want, o, t)
	return func(yield func(int, Verdict) bool) {
		for i, up := range o.Ups {
			if !yield(i, j.of(up, &o.Table.Rows[i])) {
				return
			}
		}
	}
}

// Some returns whether an offered worker, with the verdict on it, is one that is returns true for.
func (r *registry) Some(want *Wants, o Offers, is func(*worker.Worker, Verdict) bool) bool {
	for i, v := range r.Judge(want, o, time.Now()) {
		if is(o.Table.Rows[i].Worker, v) {
			return true
		}
	}
	return false
}

// Meets judges a worker by what the request needs, beside the model. Its verdicts are Fits,
// NotAllowed, NoRank, SharesCache and NotNamed. A worker that the request names always fits.
func (r *registry) Meets(want *Wants, w *worker.Worker) Verdict {
	switch {
	case !want.allows(w):
		return NotAllowed
	case want.Only == w:
		return Fits
	case want.Only != nil:
		return NotNamed
	case !r.Isolates(want, w):
		return SharesCache
	case want.Rank >= int64(w.Ranks()):
		return NoRank
	case want.Workers != nil && !slices.Contains(want.Workers, w.ID), want.Session && !w.Engine().HoldsSessions(want.API):
		return NotAllowed
	}
	for _, taint := range want.Taints {
		if !slices.Contains(w.Tainted(), taint) {
			return NotAllowed
		}
	}
	return Fits
}

// allows returns whether the request may go to a worker, as far as backups matter. A background request
// has time. While the pool has the settings of another configuration, after a reload or before it, a declared
// backup may be an engine there.
func (w *Wants) allows(to *worker.Worker) bool {
	if !to.IsBackup() {
		_, declared := w.Declared[to.Dial]
		return !w.Over && !declared
	}
	return !w.isBackground() && slices.Contains(w.Backups, to.ID)
}

// Isolates returns whether the worker's engine keeps the request's cache apart, if it must.
func (r *registry) Isolates(want *Wants, w *worker.Worker) bool {
	return !want.Isolated || w.Engine().IsolatesCaches(want.API)
}

// judgment is what Judge needs for each offer of a list.
type judgment struct {
	registry *registry
	want     *Wants
	model    string // the worker must be known to serve it; empty if any may be chosen
	more     bool   // the request needs more of its worker than the model
	at       time.Time
}

func (r *registry) judgment(want *Wants, o Offers, t time.Time) judgment {
	j := judgment{registry: r, want: want, at: t}
	if want.Only == nil {
		j.model = o.served(want.Model)
	}
	j.more = want.Only != nil || want.Isolated || want.Session || want.Rank != AnyRank ||
		want.Workers != nil || len(want.Taints) > 0 || want.Over || want.Declared != nil
	return j
}

// of returns the verdict on a worker behind an upstream.
func (j *judgment) of(up *reverseproxy.Upstream, row *TableRow) Verdict {
	w := row.Worker
	backup := w.IsBackup()
	if j.more || backup {
		if v := j.registry.Meets(j.want, w); v != Fits {
			return v
		}
	}
	role := judgeRole(row, j.want)
	switch {
	case role > Fallback:
		return role
	case backup && !w.KnownToServe(j.want.Model), !backup && j.model != "" && !w.KnownToServe(j.model):
		return OtherModels
	case !Available(up), w.Asleep() && !w.Wakes() && j.want.Kind != worker.KindOther, backup && (w.Draining() || w.Health.Rests(j.at)):
		return Unavailable
	case slices.Contains(j.want.Tried, w) || j.want.Beyond > 0 && !w.IsLonger(j.want.Beyond):
		return Tried
	case w.IsShort(j.want.Prompt, j.want.Answer):
		return Short + j.state(w, role)
	}
	return j.state(w, role)
}

// state returns the verdict on a worker of a role that could serve the request: Fits to Asleep.
func (j *judgment) state(w *worker.Worker, role Verdict) Verdict {
	switch {
	case w.Asleep():
		return Asleep
	case role == Fallback:
		return role
	}
	if w.TakesRequests(j.at) {
		switch {
		case w.IsBackup(): // full or not, as beyond Full
			return Backup
		case j.isFull(w):
			return Full
		}
		return Fits
	}
	switch well := w.Health.Available(j.at); {
	case !w.Draining():
		return MarkedDown
	case well:
		return Draining
	}
	return DrainingMarked
}

// isFull returns whether the request needs a slot of the worker, and none is free.
func (j *judgment) isFull(w *worker.Worker) bool {
	return j.want.Kind != worker.KindOther && w.IsFull()
}

// Available returns whether Caddy has an upstream available. An upstream of a dynamic
// source that Caddy has not seen yet has no host, and counts as available.
func Available(up *reverseproxy.Upstream) bool {
	return up.Host == nil || up.Available()
}

// judgeRole returns whether the worker serves the part of a request: Fits, Fallback or
// OtherRole.
func judgeRole(row *TableRow, want *Wants) Verdict {
	w := row.Worker
	switch yes, fallback := w.ServesPart(want.Part); {
	case !yes, row.Alone && (want.Part == worker.Prefill || want.Part == worker.Answer && !w.ServesWhole()):
		return OtherRole
	case fallback && want.Only == nil:
		return Fallback
	}
	return Fits
}
