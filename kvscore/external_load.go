package kvscore

import "time"

// EngineLoad is the load that an engine reports of a target.
type EngineLoad struct {
	// Running is the number of requests that the engine computes, Waiting the number of those
	// in its queue.
	Running int `json:"running_requests"`
	Waiting int `json:"waiting_requests"`
	// WaitingTokens are the prompt tokens that the engine has yet to compute for waiting
	// requests; -1 is unknown.
	WaitingTokens int64 `json:"-"`
}

// externalTime is how long a report counts. After that, the load of other clients is unknown,
// and there is no correction.
const externalTime = 3 * time.Second

// external is the load that other clients cause on a target: a second router, or users who ask
// the engine directly.
//
// A lease is the only way to add load of the router's own, and that stays so. external is what
// is left of an engine's report after the leases. It changes no lease and no sum of leases.
// Each report replaces it, and without reports it ends by itself.
type external struct {
	reported   EngineLoad
	at         time.Time
	last, rest remainder // of the last report, and the smaller of the last two
}

// remainder is a report less the router's own requests.
type remainder struct {
	requests, waiting int
	tokens            int64 // of waiting; -1 is unknown
}

// ReportLoad records the load that a target's engine has just reported. What exceeds the load
// of the router's own leases is the load of other clients. It adds to the requests of the
// target as a candidate, to its prefill and to its wait, until it is too old. The scheduler
// ignores reports of unknown targets.
//
// A report may be a moment old and still include a request that has ended. Therefore the
// smaller of two consecutive reports counts.
func (s *Scheduler) ReportLoad(now time.Time, t Target, l EngineLoad) {
	s.with(t, func(ld *load) {
		ld.endDue(now)
		r := remainder{requests: max(0, l.Running+l.Waiting-ld.requests), tokens: -1}
		r.waiting = min(r.requests, max(0, l.Waiting-len(ld.awaiting.leases)))
		if l.WaitingTokens >= 0 {
			r.tokens = max(0, l.WaitingTokens-ld.prefill)
		}
		before := ld.external
		ld.external = &external{reported: l, at: now, last: r, rest: r}
		if before.counts(now) {
			o := &before.last
			ld.external.rest = remainder{min(r.requests, o.requests), min(r.waiting, o.waiting), min(r.tokens, o.tokens)}
		}
	})
}

// counts returns whether there is a report that is not too old.
func (f *external) counts(now time.Time) bool { return f != nil && now.Sub(f.at) <= externalTime }

// isQueued returns whether requests of other clients wait in the engine's queue, as far as known.
func (f *external) isQueued(now time.Time) bool { return f.counts(now) && f.rest.waiting > 0 }

// addExternal adds the load of other clients to a candidate. Where the engine does not report
// the tokens of waiting requests, each has as many as the mean of recent requests. The lock is
// held.
func (s *Scheduler) addExternal(now time.Time, ld *load, c *Candidate) {
	if !ld.external.counts(now) {
		return
	}
	r := &ld.external.rest
	c.External = r.requests
	c.Requests += r.requests
	c.Awaiting += r.waiting
	if r.waiting == 0 {
		return
	}
	n := float64(r.waiting)
	tokens := r.tokens
	if tokens < 0 {
		tokens = int64(s.traffic.prefill * n)
	}
	c.PrefillTokens += tokens
	one := workOf(tokens/int64(r.waiting), 0)
	context := ld.reads(s.settings.BlockSize)
	c.WaitTime += c.Slowness * s.latency.predict(featuresOf(0, work{n * one.tokens, n * one.pairs}, context))
}
