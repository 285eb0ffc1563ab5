package snapshot

import (
	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// Part is a part of a snapshot, as read. Its content is right as far as its checksum is.
type Part struct {
	r      reader
	pieces []piece // the chains so far; the first one stands for none

	// scratch of chain
	path   []int
	blocks []uint64
	parts  []cache.Part
}

// Next reads the next record. It returns false at the end, and if the part is damaged: see
// Err.
func (p *Part) Next(to *Record) bool {
	r := &p.r
	if len(r.b) == 0 {
		return false
	}
	to.Kind = Kind(r.b[0])
	r.b = r.b[1:]
	switch to.Kind {
	case KindWorker:
		r.worker(&to.Worker)
	case KindBinding:
		to.Binding = affinity.Saved{}
		to.Target = r.binding(&to.Binding)
	case KindChain:
		to.Target = p.chain(&to.Chain)
	case KindResponse:
		to.Target = r.response(&to.Response)
	case KindLearned:
		to.Learned = kvscore.Learned{}
		r.learned(&to.Learned)
	case KindTarget:
		to.Of = kvscore.LearnedTarget{}
		to.Target = r.learnedTarget(&to.Of)
	case KindRatios:
		r.ratios(&to.Ratios)
	default:
		r.fail()
	}
	return !r.failed
}

// Err returns ErrCorrupt if Next has met something that it cannot read.
func (p *Part) Err() error {
	if p.r.failed {
		return ErrCorrupt
	}
	return nil
}
