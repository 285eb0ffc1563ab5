package kvscore

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// Work returns how many milliseconds of its target's time the request takes on candidate i, as
// predicted. These are its prefill, see [Latency.Service], and for each token of the answer
//
//	Fixed/(1 + others) + Token + Context·(prompt + answer/2)
//
// by the coefficients of [Latency], times the target's slowness. The fixed part of a step is shared with
// the other requests there. What the engine had cached costs no prefill.
func (s *Selection) Work(i int) float64 {
	c := &s.Candidates[i]
	work := s.Latency.decode(s.ExpectedAnswer, float64(s.Tokens), c.Requests)
	if !c.Split {
		work += s.Latency.Service(s.Tokens-c.OverlapTokens, c.OverlapTokens)
	}
	return c.Slowness * work
}

// usualAttention is the time for a million pairs of tokens, relative to that for 1,000 tokens, of models of 8B
// parameters.
const usualAttention = 0.04

// Service returns how many milliseconds of an engine's time n prompt tokens after k cached ones take. Unlike
// [Latency.Prefill], it counts no step: an engine computes several short prompts in one. Samples of such prompts hide
// what attention takes, because each lasts for the whole step. So it counts as in a usual model at least.
func (l Latency) Service(n, k int64) float64 {
	return l.service(workOf(n, k))
}

func (l Latency) service(w work) float64 {
	return l.Token*1e3*w.tokens + max(l.Attention*1e6, usualAttention*l.Token*1e3)*w.pairs
}

func (l Latency) decode(answer, prompt float64, others int) float64 {
	return answer * (l.Fixed/float64(1+others) + l.Token + l.Context*(prompt+answer/2))
}

// Work returns the predicted work of a request on a target without others, by the tokens of its prompt.
func (s *Scheduler) Work(tokens int64) float64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.latency.latency()
	return l.Service(tokens, 0) + l.decode(s.traffic.answer, float64(tokens), 0)
}

// Work is [Selection.Work] by what the request has shown so far: the engine's counts, else what was
// seen of the answer. Without a first token, its prefill counts for as long as it was booked.
func (l *Lease) Work(now time.Time) float64 {
	s := l.scheduler
	s.mu.Lock()
	defer s.mu.Unlock()
	latency, slow := s.latency.latency(), l.load.speed.factor(now)
	prompt, prefill, n := l.tokens, slow*latency.service(l.work), &l.counts
	answer := min(l.answered.Load(), maxAnswer)
	if cache.Believable(n.Prompt, l.estimate) > 0 {
		prompt = n.Prompt
		if n.CachedReported && n.Cached >= 0 && n.Cached <= n.Prompt && prefill > 0 {
			prefill = slow * latency.Service(n.Prompt-n.Cached, n.Cached)
		}
		if n.Answer >= n.Prompt {
			answer = min(n.Answer-n.Prompt+1, maxAnswer)
		}
	}
	if l.shown == showsNothing {
		prefill = min(prefill, milliseconds(now.Sub(l.booked)))
	}
	if l.phase == PhasePrefill {
		answer = 0
	}
	return prefill + slow*latency.decode(float64(answer), float64(prompt), l.others)
}

// Booked returns the predicted work of the request when it was booked.
func (l *Lease) Booked() float64 {
	s := l.scheduler
	s.mu.Lock()
	defer s.mu.Unlock()
	latency := s.latency.latency()
	return l.load.speed.factor(l.booked) * (latency.service(l.work) + latency.decode(s.traffic.answer, float64(l.tokens), l.others))
}

// Journaled returns the request's number in the journal; 0 if it has none.
func (l *Lease) Journaled() uint64 { return l.journaled }
