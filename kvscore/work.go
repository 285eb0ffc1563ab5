package kvscore

import (
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// Work returns how many milliseconds of its target's time the request takes on candidate i, as
// predicted. These are the prefill, and for each token of the answer
//
//	Fixed/(1 + others) + Token + Context·(prompt + answer/2)
//
// by the coefficients of [Latency], times the target's slowness. The fixed part of a step is shared with
// the other requests there. What the engine had cached costs no prefill.
func (s *Selection) Work(i int) float64 {
	c := &s.Candidates[i]
	work := c.Slowness * s.Latency.decode(s.ExpectedAnswer, float64(s.Tokens), c.Requests)
	if !c.Split {
		work += c.PrefillTime
	}
	return work
}

func (l Latency) decode(answer, prompt float64, others int) float64 {
	return answer * (l.Fixed/float64(1+others) + l.Token + l.Context*(prompt+answer/2))
}

// Work returns the predicted work of a request on a target without others, by the tokens of its prompt.
func (s *Scheduler) Work(tokens int64) float64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.latency.predict(featuresOf(1, workOf(tokens, 0), 0)) + s.latency.latency().decode(s.traffic.answer, float64(tokens), 0)
}

// Work is [Selection.Work] by what the request has shown so far: the engine's counts, else what was
// seen of the answer. Without a first token, its prefill counts for as long as it was booked.
func (l *Lease) Work(now time.Time) float64 {
	s := l.scheduler
	s.mu.Lock()
	defer s.mu.Unlock()
	prompt, prefill, n := l.tokens, l.added, &l.counts
	answer := min(l.answered.Load(), maxAnswer)
	if cache.Believable(n.Prompt, l.estimate) > 0 {
		prompt = n.Prompt
		if n.CachedReported && n.Cached >= 0 && n.Cached <= n.Prompt {
			booked := s.latency.predict(featuresOf(1, l.work, 0))
			prefill *= s.latency.predict(featuresOf(1, workOf(n.Prompt-n.Cached, n.Cached), 0)) / max(booked, 1e-3)
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
	return prefill + l.load.speed.factor(now)*s.latency.latency().decode(float64(answer), float64(prompt), l.others)
}

// Booked returns the predicted work of the request when it was booked.
func (l *Lease) Booked() float64 {
	s := l.scheduler
	s.mu.Lock()
	defer s.mu.Unlock()
	return l.added + l.load.speed.factor(l.booked)*s.latency.latency().decode(s.traffic.answer, float64(l.tokens), l.others)
}

// Journaled returns the request's number in the journal; 0 if it has none.
func (l *Lease) Journaled() uint64 { return l.journaled }
