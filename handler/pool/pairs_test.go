package pool

import (
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

// TestPairs avoids pairs whose transfers fail, and not those of which one was late.
func TestPairs(t *testing.T) {
	p, now := new(Pool), time.Now()
	prefill, decode, other := &worker.Worker{ID: 1}, &worker.Worker{ID: 2}, &worker.Worker{ID: 3}
	for i, silent := range []bool{true, true, true} {
		if p.Avoids(prefill, decode, now) {
			t.Errorf("avoided after %d silent phases", i)
		}
		p.PairFailed(prefill, decode, silent, now, now)
	}
	if !p.Avoids(prefill, decode, now) || p.Avoids(prefill, other, now) || p.Avoids(prefill, decode, now.Add(pairAvoided)) {
		t.Error("three silent phases in a row")
	}
	p.PairWorks(prefill, decode)
	if p.Avoids(prefill, decode, now) || p.PairFailed(prefill, decode, true, now, now) || !p.PairFailed(prefill, decode, false, now, now) {
		t.Error("a failed transfer, after one that went well and a late one")
	}

	p = new(Pool)
	prefill.Restarted()
	if p.PairFailed(prefill, decode, false, now, time.Now()) || p.Avoids(prefill, decode, now) {
		t.Error("a transfer from before the restart")
	}
	if now = time.Now(); !p.PairFailed(prefill, decode, false, now, now) {
		t.Error("a transfer after the restart")
	}
}
