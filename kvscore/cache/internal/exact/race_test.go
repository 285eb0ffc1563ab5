package exact

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
)

// TestReadersBesideWriter has two readers look up chains that a writer stores, removes and clears meanwhile.
// The race detector checks what they share. One chain stays: each look-up finds all of it.
func TestReadersBesideWriter(t *testing.T) {
	for _, targets := range []int{4, 100} {
		w := newWorld(worldSize{targets: targets, tiers: 2, alpha: 2, long: 60, seeds: 2, spread: 1}, rand.New(rand.NewPCG(9, 1)).IntN)
		stays := chainOf(7, 700)
		feed(w.x, targets, stays, namesOf(7, stays), 64) // on a target that the writer leaves alone
		var stop atomic.Bool
		var readers sync.WaitGroup
		for seed := range uint64(2) {
			readers.Go(func() {
				rnd := rand.New(rand.NewPCG(9, seed))
				var m Match
				for !stop.Load() {
					n := 1 + rnd.IntN(len(stays))
					if w.x.Match(1, &m, stays[:n]); int(m.Depth[Device][targets]) != n {
						t.Errorf("%d of %d blocks are found", m.Depth[Device][targets], n)
						return
					}
				}
			})
		}
		for range 500 {
			w.step(t)
		}
		stop.Store(true)
		readers.Wait()
		w.x.check(t)
	}
}
