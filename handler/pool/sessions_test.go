package pool

import (
	"strings"
	"testing"
)

// TestSessionKeys makes keys of names: equal names have equal keys in one pool only.
func TestSessionKeys(t *testing.T) {
	var pools [2]sessions
	for i := range pools {
		var err error
		if pools[i], err = newSessions(10); err != nil {
			t.Fatal(err)
		}
		defer pools[i].Close()
	}
	if pools[0].Key("a") != pools[0].Key("a") {
		t.Error("one name has two keys")
	}
	if pools[0].Key("a") == pools[0].Key("b") || pools[0].Key("a") == pools[1].Key("a") {
		t.Error("two names, or two pools, have one key")
	}
	name := strings.Repeat("k", 300)
	if n := testing.AllocsPerRun(1000, func() { pools[0].Key(name) }); n != 0 {
		t.Errorf("a key costs %v allocations", n)
	}
}
