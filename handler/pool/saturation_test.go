package pool

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/handler/worker"
)

// TestSaturation has the workers of two roles fill up. It is there before any request, and without any worker.
func TestSaturation(t *testing.T) {
	want := func(p *Pool, of Saturated, value float64) {
		t.Helper()
		if v, there := p.Saturations(time.Now())[of]; !there || v != value {
			t.Errorf("%+v: %v, %v, want %v", of, v, there, value)
		}
	}
	want(testPool(t, wanted()), Saturated{Role: engine.RoleBoth}, 0)
	p := testPool(t, wanted(
		worker.Settings{Dial: "a:1", MaxRunning: 2, Models: []string{"m"}}, worker.Settings{Dial: "b:1", MaxRunning: 2, Models: []string{"m", "n"}},
		worker.Settings{Dial: "c:1", MaxRunning: 1, Role: "prefill"}, worker.Settings{Dial: "d:1", MaxRunning: 1, Role: "backup", Models: []string{"m"}},
	))
	want(p, Saturated{engine.RoleBoth, "m"}, 0)
	want(p, Saturated{engine.RolePrefill, ""}, 0)
	p.Worker("a:1").TakeSlot()
	p.Worker("c:1").TakeSlot()
	p.Worker("d:1").TakeSlot()
	want(p, Saturated{engine.RoleBoth, "m"}, 0.25)
	want(p, Saturated{engine.RoleBoth, "n"}, 0)
	want(p, Saturated{engine.RoleBoth, ""}, 0.25)
	want(p, Saturated{engine.RolePrefill, ""}, 1)
	p.Drain(p.Worker("b:1"), true)
	want(p, Saturated{engine.RoleBoth, "m"}, 0.5)

	var many []string
	for i := range 2 * mostModels {
		many = append(many, fmt.Sprintf("model-%03d", i))
	}
	p = testPool(t, wanted(worker.Settings{Dial: "a:1", Models: append(many, strings.Repeat("m", 1000), "\xff")}))
	if n := len(p.Saturations(time.Now())); n != mostModels {
		t.Errorf("%d saturations", n)
	}
	want(p, Saturated{engine.RoleBoth, "model-254"}, 0)
	want(p, Saturated{engine.RoleBoth, ""}, 0)
	p = testPool(t, wanted(worker.Settings{Dial: "a:1", Models: []string{strings.Repeat("m", 1000), "\xff"}}))
	if all := p.Saturations(time.Now()); len(all) != 1 {
		t.Errorf("saturations %v", all)
	}
}

// TestExpectedFirstTokens has the ratio of a class begin with 0, follow predictions, and go back to 0. It ends with the
// class.
func TestExpectedFirstTokens(t *testing.T) {
	var p Promises
	now := time.Now()
	want := func(at time.Time, value float64) {
		t.Helper()
		if v, there := p.Expected(at)["chat"]; !there || v != value {
			t.Errorf("%v, %v, want %v", v, there, value)
		}
	}
	p.Keep(map[string]bool{"chat": false})
	want(now, 0)
	p.expect("chat", 2, now)
	want(now, 2)
	want(now.Add(time.Hour), 0)
	if gone := p.Keep(map[string]bool{"other": false}); !slices.Equal(gone, []string{"chat"}) {
		t.Errorf("%q are gone", gone)
	}
	if _, there := p.Expected(now)["chat"]; there || p.of["chat"] != nil {
		t.Error("a class that is gone is still known")
	}
}
