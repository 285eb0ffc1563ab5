package pool

import (
	"testing"

	"go.uber.org/zap"
)

// TestEqualModelListIsNoNews records the same list again, then one with the same models
// and other entries.
func TestEqualModelListIsNoNews(t *testing.T) {
	list := func(raw string) *ModelList {
		return &ModelList{IDs: map[string]bool{"x": true}, Entries: []ModelEntry{{"x", raw}}}
	}
	w, first, other := new(Worker), list("1"), list("2")
	for i, v := range []struct{ own, want *ModelList }{{first, first}, {list("1"), first}, {other, other}, {nil, nil}, {first, first}} {
		w.Learn(v.own, zap.NewNop())
		if w.list.Load() != v.want {
			t.Errorf("step %d: another list than wanted", i)
		}
	}
}
