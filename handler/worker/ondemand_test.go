package worker

import (
	"testing"
)

// TestLoadFactor shows what it costs to send a request to a worker that loads models on demand.
func TestLoadFactor(t *testing.T) {
	two := map[string]bool{"x": true, "y": true}
	entries := []ModelEntry{{ID: "x"}, {ID: "y"}}
	for name, v := range map[string]struct {
		kind string
		list *ModelList
		last string
		want float64
	}{
		"nothing loaded":           {"other", &ModelList{IDs: two, Entries: entries}, "", mustLoad},
		"the model loaded":         {"other", &ModelList{IDs: two, Entries: entries}, "x", 1},
		"another model loaded":     {"other", &ModelList{IDs: two, Entries: entries}, "y", mustSwap},
		"listed as loaded":         {"llamacpp", &ModelList{IDs: two, Entries: entries, Loaded: map[string]bool{"x": true}}, "", 1},
		"another listed as loaded": {"llamacpp", &ModelList{IDs: two, Entries: entries, Loaded: map[string]bool{"y": true}}, "", mustSwap},
		"one model":                {"other", &ModelList{IDs: map[string]bool{"x": true}, Entries: entries[:1]}, "", 1},
		"a model and an adapter":   {"other", &ModelList{IDs: two, Entries: entries, Adapters: map[string]bool{"y": true}}, "", 1},
		"names of one model":       {"vllm", &ModelList{IDs: two, Entries: entries}, "", 1},
		"no list":                  {"other", nil, "", 1},
	} {
		w := New("test", Settings{Dial: "a:1", Engine: v.kind})
		w.SetList(v.list)
		if v.last != "" {
			w.Requested(v.last)
		}
		if got := w.LoadFactor("x"); got != v.want {
			t.Errorf("%s: %v, want %v", name, got, v.want)
		}
	}
}
