package handler

import (
	"strconv"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// TestResponsesAreBounded keeps many more responses than there is room for: the
// number stays within the bound, and one that is named again and again stays.
func TestResponsesAreBounded(t *testing.T) {
	r := responses{seed: 1}
	used, unused := kvscore.Target{Worker: 1, Rank: 2}, kvscore.Target{Worker: 2}
	r.keep("used", used)
	r.keep("unused", unused)
	for i := range 5 * maxResponses {
		r.keep("resp_"+strconv.Itoa(i), unused)
		if i%1000 == 0 {
			if got, ok := r.find("used", true); !ok || got != used {
				t.Fatalf("after %d others: %v, %v", i, got, ok)
			}
			r.find("unused", false)
		}
	}
	if n := r.count(); n < maxResponses || n > 2*maxResponses {
		t.Errorf("%d are remembered", n)
	}
	if _, ok := r.find("unused", true); ok {
		t.Error("one that nobody named for long is remembered")
	}
	if _, ok := r.find("resp_"+strconv.Itoa(5*maxResponses-1), true); !ok {
		t.Error("the newest is not remembered")
	}
	if _, ok := r.find("never", true); ok {
		t.Error("one is found that never was")
	}
}
