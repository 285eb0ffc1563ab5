package kvscore

import (
	"math"
	"slices"
	"time"
)

// transfer predicts the time to transfer the KV cache of a prompt from a prefill worker to a decode
// worker. It is an assumed time, multiplied by a factor that recent transfers in the pool have had.
// Without transfers the factor returns to 1. Else nothing would be transferred again where it was
// once slow.
type transfer struct {
	factor   float64 // logarithm, at the last transfer
	samples  uint64
	outliers int // in a row
	at       time.Time
}

const (
	// assumedFixed is about one step of the decode engine, in milliseconds. assumedToken is the time
	// for 1,000 tokens of 128 KiB each (a model of 8B parameters) at 25 GB/s.
	assumedFixed, assumedToken = 10, 5
	// transferWeight is the weight of one transfer. The first ones weigh more.
	transferWeight = 0.2
	// maxMet bounds the prefill targets that a decode target has met.
	maxMet = 64
)

func assumedTransfer(tokens int64) float64 {
	return assumedFixed + assumedToken*float64(max(0, tokens))/1e3
}

// factorAt returns the factor at a time.
func (t *transfer) factorAt(now time.Time) float64 {
	return math.Exp(t.factor * decay(now.Sub(t.at).Truncate(time.Second)))
}

func (t *transfer) learn(now time.Time, tokens int64, ms float64) {
	ratio, factor := max(ms, 1)/assumedTransfer(tokens), t.factorAt(now)
	if ratio <= maxOutlier*max(1, factor) {
		t.outliers = 0
	} else if t.outliers++; t.outliers < 3 {
		ratio = maxOutlier * max(1, factor)
	}
	t.samples++
	t.factor = math.Log(factor)
	t.factor += (math.Log(ratio) - t.factor) * max(transferWeight, 1/float64(t.samples+1))
	t.at = now
}

// IsSplit returns whether the lease is the decode phase of a split request.
func (l *Lease) IsSplit() bool { return l.split }

// HandedOver records that the prefill phase of this decode phase has answered. The scheduler learns
// from the time until the first token.
func (l *Lease) HandedOver(now time.Time) {
	l.Alive(now)
	l.scheduler.mu.Lock()
	defer l.scheduler.mu.Unlock()
	l.handed = now
}

// observeTransfer learns from the first token of a decode phase. The lock is held.
func (s *Scheduler) observeTransfer(l *Lease, now time.Time) {
	ld := l.load
	if l.handed.IsZero() || l.lacks <= 0 || ld.context(s.settings.BlockSize) > fullMemory*float64(ld.capacity) {
		return // a full memory delays it, too
	}
	if !ld.meet(l.ahead) {
		return // the first transfer of two engines includes their handshake, of seconds
	}
	s.transfer.learn(now, l.lacks, max(0, milliseconds(now.Sub(l.handed))))
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
