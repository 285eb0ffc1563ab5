package pool

import (
	"slices"
	"strconv"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/affinity"
	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// TestResponsesAreBounded keeps many more responses than there is room for: the
// number stays within the bound, and one that is named again and again stays.
func TestResponsesAreBounded(t *testing.T) {
	r := responses{journal: new(journal.Journal)}
	used, unused := kvscore.Target{Worker: 1, Rank: 2}, kvscore.Target{Worker: 2}
	r.Keep("used", used, affinity.Identity{7})
	r.Keep("unused", unused, affinity.Identity{})
	for i := range 5 * maxResponses {
		r.Keep("resp_"+strconv.Itoa(i), unused, affinity.Identity{})
		if i%1000 == 0 {
			if got, _, ok := r.Find("used", true); !ok || got != used {
				t.Fatalf("after %d others: %v, %v", i, got, ok)
			}
			r.Find("unused", false)
		}
	}
	if session, ok := r.Session("used"); !ok || session != (affinity.Identity{7}) {
		t.Errorf("the session is %x, %v", session, ok)
	}
	if n := r.Count(); n != maxResponses {
		t.Errorf("%d are remembered", n)
	}
	if _, _, ok := r.Find("unused", true); ok {
		t.Error("one that nobody named for long is remembered")
	}
	if _, _, ok := r.Find("resp_"+strconv.Itoa(5*maxResponses-1), true); !ok {
		t.Error("the newest is not remembered")
	}
	if _, _, ok := r.Find("never", true); ok {
		t.Error("one is found that never was")
	}
	var again responses
	for _, one := range r.dump() {
		again.follow(one)
	}
	if !slices.Equal(again.dump(), r.dump()) {
		t.Error("what is dumped and restored is in another order")
	}
}
