package kvscore

import (
	"slices"
	"time"
)

const (
	// assumedFixed is about one step of the decode engine, in milliseconds. assumedToken is the time
	// for 1,000 tokens of 128 KiB each (a model of 8B parameters) at 25 GB/s.
	assumedFixed, assumedToken = 10, 5
	// transferWeight is the weight of one transfer. The first ones weigh more.
	transferWeight = 0.2
	// maxMet bounds the prefill targets that a decode target has met.
	maxMet = 64
)

// assumedTransfer returns the time to transfer the KV cache of a prompt from a prefill worker to a
// decode worker, in milliseconds. Recent transfers in the pool show by what that is off.
func assumedTransfer(tokens int64) float64 {
	return assumedFixed + assumedToken*float64(max(0, tokens))/1e3
}

// IsSplit returns whether the lease is the decode phase of a split request.
func (l *Lease) IsSplit() bool { return l.split }

// PrefillAnswered records that the prefill phase of this decode phase has answered. The scheduler learns
// from the time until the first token.
func (l *Lease) PrefillAnswered(now time.Time) {
	l.Alive(now)
	l.scheduler.mu.Lock()
	defer l.scheduler.mu.Unlock()
	l.prefilled = now
}

// observeTransfer learns from the first token of a decode phase. The lock is held.
func (s *Scheduler) observeTransfer(l *Lease, now time.Time) {
	if l.prefilled.IsZero() || l.lacks <= 0 || s.lackedMemory(l) {
		return
	}
	if !l.load.meet(l.ahead) {
		return // the first transfer of two engines includes their handshake, of seconds
	}
	expected := s.transfer.factor(now) * assumedTransfer(l.lacks)
	s.transfer.learn(now, expected, milliseconds(now.Sub(l.prefilled)), transferWeight)
}

// meet returns whether the target has had KV from a prefill target before, and notes that it has.
func (ld *load) meet(t Target) bool {
	if slices.Contains(ld.met, t) {
		return true
	}
	if len(ld.met) == maxMet {
		ld.met = ld.met[:0]
	}
	ld.met = append(ld.met, t)
	return false
}
