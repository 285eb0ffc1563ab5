package handler

import (
	"testing"

	"go.uber.org/zap"
)

// TestEqualModelListIsNoNews records the same list again, then one with the same models
// and other entries.
func TestEqualModelListIsNoNews(t *testing.T) {
	list := func(raw string) *modelList {
		return &modelList{ids: map[string]bool{"x": true}, entries: []modelEntry{{"x", raw}}}
	}
	w, first, other := new(worker), list("1"), list("2")
	for i, v := range []struct{ own, want *modelList }{{first, first}, {list("1"), first}, {other, other}, {nil, nil}, {first, first}} {
		w.learn(v.own, zap.NewNop())
		if w.models.Load() != v.want {
			t.Errorf("step %d: another list than wanted", i)
		}
	}
}
