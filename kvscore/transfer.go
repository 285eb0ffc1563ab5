package kvscore

import (
	"slices"
	"time"
)

// transfer predicts the time to hand the KV cache of a prompt from a prefill worker to a decode
// worker:
//
//	fixed + token·n
//
// milliseconds for n thousand tokens that the decode worker lacks. The fixed part includes the step
// that makes the first token. transfer minimises the sum of squared errors, weighted with
// 1/(time + 5 ms). A weak prior decides what the samples do not show. Without samples, the times
// decay to the prior: else nothing would be transferred again where transfers were once slow.
type transfer struct {
	fixed, token    float64
	w, x, xx, y, xy float64 // weighted sums
	outliers        int     // in a row
	at              time.Time
}

const (
	// priorFixed is about one step of the decode engine, in milliseconds. priorToken is the time
	// for 1,000 tokens of 128 KiB each (a model of 8B parameters) at 25 GB/s.
	priorFixed, priorToken = 10, 5
	// keptTransfer is the factor on the weight of older samples with each new one.
	keptTransfer = 0.95
	// maxPairs bounds the pairs of groups, maxMet the prefill targets that a decode target has met.
	maxPairs, maxMet = 1024, 64
)

var priorTransfer = transfer{fixed: priorFixed, token: priorToken}

func (t *transfer) predict(tokens int64) float64 {
	return t.fixed + t.token*float64(max(0, tokens))/1e3
}

// faded returns the times at a later time.
func (t *transfer) faded(now time.Time) transfer {
	left := decay(now.Sub(t.at).Truncate(time.Second))
	return transfer{fixed: priorFixed + (t.fixed-priorFixed)*left, token: priorToken + (t.token-priorToken)*left}
}

// learn adds a sample. prior is what decides without samples.
func (t *transfer) learn(now time.Time, tokens int64, ms float64, prior transfer) {
	t.at = now
	if most := maxOutlier * max(t.predict(tokens), priorFixed); ms <= most {
		t.outliers = 0
	} else if t.outliers++; t.outliers < 3 {
		ms = most
	}
	x, weight := float64(tokens)/1e3, 1/(ms+shortTime)
	for _, sum := range []*float64{&t.w, &t.x, &t.xx, &t.y, &t.xy} {
		*sum *= keptTransfer
	}
	t.w += weight
	t.x += weight * x
	t.xx += weight * x * x
	t.y += weight * ms
	t.xy += weight * x * ms
	a, b := t.w+priorWeight[0], t.xx+priorWeight[1]
	y, xy := t.y+priorWeight[0]*prior.fixed, t.xy+priorWeight[1]*prior.token
	t.token = max(0, (a*xy-t.x*y)/(a*b-t.x*t.x))
	if t.fixed = (y - t.x*t.token) / a; t.fixed < 0 {
		t.fixed, t.token = 0, xy/b
	}
}

// transfers are the transfers of a pool: over all, and by the groups of the two workers.
type transfers struct {
	all   transfer
	pairs map[[2]uint32]*transfer
}

func (t *transfers) between(now time.Time, from, to uint32) transfer {
	if one := t.pairs[[2]uint32{from, to}]; one != nil {
		return one.faded(now)
	}
	return t.all.faded(now)
}

func (t *transfers) learn(now time.Time, from, to uint32, tokens int64, ms float64) {
	pair := [2]uint32{from, to}
	one := t.pairs[pair]
	if one == nil {
		for other := range t.pairs {
			if len(t.pairs) < maxPairs {
				break
			}
			delete(t.pairs, other)
		}
		one = &transfer{fixed: t.all.fixed, token: t.all.token}
		t.pairs[pair] = one
	}
	one.learn(now, tokens, ms, t.all)
	t.all.learn(now, tokens, ms, priorTransfer)
}

// SetGroup sets the group of a target, for example by its host. Between targets of two groups, the
// KV cache is transferred at one speed. All targets are in group 0 at first.
func (s *Scheduler) SetGroup(t Target, group uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ld := s.targets[t]; ld != nil {
		ld.group = group
	}
}

// Parted says that the lease is the decode leg of a parted request.
func (l *Lease) Parted() bool { return l.parted }

// HandedOver records that the prefill leg of this decode leg has answered. The scheduler learns
// from the time until the first token.
func (l *Lease) HandedOver(now time.Time) {
	l.Alive(now)
	l.scheduler.mu.Lock()
	defer l.scheduler.mu.Unlock()
	l.handed = now
}

// observeTransfer learns from the first token of a decode leg. The lock is held.
func (s *Scheduler) observeTransfer(l *Lease, now time.Time) {
	ld := l.load
	if l.handed.IsZero() || l.lacks <= 0 || ld.context(s.settings.BlockSize) > fullMemory*float64(ld.capacity) {
		return // a full memory delays it, too
	}
	if !ld.meet(l.ahead) {
		return // the first transfer of two engines includes their handshake, of seconds
	}
	s.transfers.learn(now, l.from, ld.group, l.lacks, max(0, milliseconds(now.Sub(l.handed))))
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
