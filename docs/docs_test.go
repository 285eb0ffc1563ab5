package docs

import "testing"

func TestAdvice(t *testing.T) {
	for condition, want := range map[string]string{
		"all workers are full, and requests wait":         "Normal in bursts. Else add workers.",
		"fallback no_prompt":                              "Nothing.",
		"streams cannot go on exactly: an engine refuses": "Start vLLM with --enable-scale-out.",
		"no room in the cache model for some prompts":     "See capacity.md.",
		"a condition that the manual does not know":       "",
	} {
		if got := Advice(condition); got != want {
			t.Errorf("%s: %q, want %q", condition, got, want)
		}
	}
}
