package kvscore

import (
	"math"
	"slices"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// timing is one sample: the time of uninterrupted work on a target. Consecutive prefills
// share a timing, because an engine starts the next prompt in the step that ends the
// previous one.
type timing struct {
	x      features
	ms     float64
	until  time.Time
	open   int  // leases that have not ended
	spoilt bool // one of them failed
}

const (
	// together is the greatest distance between first tokens of one engine step.
	together = 4 * time.Millisecond
	// fullMemory is the share of the capacity above which a request may wait for memory. The scheduler
	// ignores the times of its prefill and its transfer.
	fullMemory = 0.9
	// longTiming is the time in milliseconds after which a new timing begins.
	longTiming = 400
)

// observe records the time from the earliest start of a lease's prefill to its first
// token. It ignores the time of a prefill that may have waited: for memory, or for requests of
// other clients. A first token that comes after that of a later prefill was late: its prefill
// belongs to the later one's time. The lock is held.
func (s *Scheduler) observe(l *Lease, now time.Time) {
	ld := l.load
	if l.work.tokens == 0 {
		return
	}
	ld.errors.add(l.predicted, milliseconds(now.Sub(l.booked)))
	first, since := l, l.began // of a prefill that endDue has ended
	if q := &ld.awaiting; l.isAwaiting {
		if first, since = q.leases[0], q.since; q.guessed || first != l && !first.streamed {
			since = time.Time{} // the start of this prefill is unknown
		}
	}
	last := ld.timing
	follows := last != nil && last.until.Equal(since)
	if since.IsZero() || s.lackedMemory(l) || ld.external.isQueued(now) || l.passed && !follows {
		ld.timing = nil
		return
	}
	if follows && (last.ms < longTiming || l.passed || now.Sub(since) < together) {
		l.timing = last
	} else {
		l.own, l.timing = timing{}, &l.own
		if since.Equal(first.booked) {
			l.own.x = featuresOf(1, work{}, ld.reads(s.settings.BlockSize)) // a step's fixed part
		}
	}
	m := l.timing
	m.ms += milliseconds(now.Sub(since))
	l.context = ld.reads(s.settings.BlockSize)
	m.add(l.work, l.context, 1)
	m.until = now
	m.open++
	ld.timing = m
}

// add adds a work without its fixed cost, or subtracts it if sign is -1.
func (m *timing) add(w work, context, sign float64) {
	f := featuresOf(0, w, context)
	m.x.tokens += sign * f.tokens
	m.x.pairs += sign * f.pairs
	m.x.context += sign * f.context
}

// context returns the tokens of context of a target's active requests.
func (ld *load) context(blockSize int) float64 {
	return (ld.promptBlocks(blockSize) + float64(ld.output)) * float64(blockSize)
}

// reads returns the tokens of context that each step of a target reads: those of all requests
// whose answers it generates. Requests that share a prefix each read it.
func (ld *load) reads(blockSize int) float64 {
	return float64(ld.decoding) + float64(ld.output)*float64(blockSize)
}

// learn updates the averages, the capacity and the timing from a lease that ends. The lock is held.
func (s *Scheduler) learn(l *Lease, computed bool) {
	c := &l.counts
	counted := computed && cache.Believable(c.Prompt, l.estimate) > 0 && c.Cached >= 0 && c.Cached <= c.Prompt
	answer := l.answered.Load()
	if counted && c.Answer >= c.Prompt {
		answer = c.Answer - c.Prompt + 1
	}
	if answer > 0 && computed && l.shown != showsTooSoon && l.phase != PhasePrefill {
		s.traffic.answeredWith(min(answer, maxAnswer))
	}
	if counted && c.CachedReported {
		if m := l.timing; m != nil {
			m.add(l.work, l.context, -1)
			m.add(workOf(c.Prompt-c.Cached, c.Cached), l.context, 1)
		}
		s.learnCapacity(l)
	}
	if l.timing != nil {
		s.learnTiming(l, computed)
	}
}

// learnTiming takes the lease out of its timing. If it was the last one, the scheduler
// learns from the timing. The lock is held.
func (s *Scheduler) learnTiming(l *Lease, computed bool) {
	m := l.timing
	l.timing = nil
	m.spoilt = m.spoilt || !computed
	if m.open--; m.open > 0 {
		return
	}
	ld := l.load
	if ld.timing == m {
		ld.timing = nil
	}
	if m.spoilt {
		return
	}
	predicted := s.latency.predict(m.x)
	factor := ld.speed.factor(m.until)
	ld.answers.paced(m.x, m.ms)
	ld.timings++
	ld.lastTiming = m.until
	if s.latency.samples >= trusting {
		ld.speed.learn(m.until, predicted*factor, m.ms, factorWeight)
	}
	s.latency.learn(m.x, m.ms/math.Pow(factor, 0.8))
}

// errorRing keeps the last ratios of observed to predicted times to the first token.
type errorRing struct {
	ratios [64]float32
	n      uint64
}

func (r *errorRing) add(predicted, ms float64) {
	if predicted <= 0 || ms <= 0 {
		return
	}
	r.ratios[r.n%uint64(len(r.ratios))] = float32(ms / predicted)
	r.n++
}

// quantiles returns the median and the 90th percentile of |observed/predicted - 1|, and
// the number of ratios.
func (r *errorRing) quantiles() (median, p90 float64, n int) {
	errors := r.ratios
	if n = int(min(r.n, uint64(len(errors)))); n == 0 {
		return 0, 0, 0
	}
	for i := range errors[:n] {
		errors[i] = float32(math.Abs(float64(errors[i]) - 1))
	}
	slices.Sort(errors[:n])
	return float64(errors[(n-1)/2]), float64(errors[(n-1)*9/10]), n
}

// describe sets the terms that all candidates share. The lock is held.
func (s *Scheduler) describe(now time.Time, r *Request, sel *Selection) {
	sel.Latency = s.latency.latency()
	sel.ArrivalRate = s.traffic.arrivals.value(now) / milliseconds(decayTime) / float64(max(1, len(s.targets)))
	sel.ExpectedAnswer, sel.MeanAnswer = s.traffic.answer, s.traffic.answer
	sel.Met = min(1, s.routers.meanUnseen)
	if r.ExpectedTokens > 0 {
		sel.ExpectedAnswer = float64(r.ExpectedTokens)
	}
}

// predict sets the times of a candidate. The lock is held.
func (s *Scheduler) predict(now time.Time, ld *load, c *Candidate, sel *Selection) {
	context := ld.reads(s.settings.BlockSize)
	c.Slowness = ld.speed.factor(now)
	c.WaitTime = s.wait(ld, now, sel.Dry, c.Slowness, context)
	n := max(0, sel.Tokens-c.OverlapTokens) + int64(c.loading())
	c.PrefillTime = c.Slowness * s.latency.predict(featuresOf(1, workOf(n, c.OverlapTokens), context))
	c.Awaiting = len(ld.awaiting.leases)
	c.RecentWork = ld.recent.value(now)
	c.rested = now.Sub(ld.recent.at)
	block, capacity, active := float64(s.settings.BlockSize), float64(ld.capacity), float64(c.Requests)
	c.step = sel.Latency.Fixed + sel.Latency.Token*active + sel.Latency.Context*context
	c.MemoryUse = (c.PromptBlocks + c.OutputBlocks) * block / capacity
	needs := max(0, float64(sel.Tokens)-c.SharedBlocks*block) / capacity
	c.crowded = c.MemoryUse+needs > fullMemory
	// On average, what is left of an active answer is as long as any answer.
	c.full = c.MemoryUse + needs + (active*sel.MeanAnswer+sel.ExpectedAnswer)/capacity
	if c.full > fullMemory { // memory that stays free costs nobody
		c.memory = needs * sel.ExpectedAnswer * c.step
	}
}

// lackedMemory returns whether the lease may have waited for memory. The lock is held.
func (s *Scheduler) lackedMemory(l *Lease) bool {
	return l.crowded || l.load.context(s.settings.BlockSize) > fullMemory*float64(l.load.capacity)
}
