package worker

import (
	"testing"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// TestEventsAreDoubted has an engine report other cached tokens than its KV events say.
func TestEventsAreDoubted(t *testing.T) {
	for _, c := range []struct {
		name                string
		predicted, reported int64
		prompts, reports    int
		doubted             bool
	}{
		{"as predicted", 5000, 4900, 100, 100, false},
		{"far less, again and again", 5000, 0, 100, manyMissed, true},
		{"far less, not often enough", 5000, 0, 100, manyMissed - 1, false},
		{"far less of few prompts", 5000, 0, manyMissed - 1, 100, false},
		{"cached, and no event says so", 0, 640, 100, manyUnmatched, true},
		{"not often enough", 0, 640, 100, manyUnmatched - 1, false},
	} {
		w := New("test", Settings{Dial: "a:1"})
		for i := range c.reports {
			w.Verify(&Prediction{Prompt: uint64(i % c.prompts), Tokens: c.predicted, Knowledge: kvscore.Exact}, c.reported, 16)
		}
		if got := w.DoubtsEvents(); got != c.doubted {
			t.Errorf("%s: doubted is %v, want %v", c.name, got, c.doubted)
		}
		w.Restarted()
		if w.DoubtsEvents() {
			t.Errorf("%s: doubted after a restart", c.name)
		}
	}
}

// TestReportsAreOfTheirKind has one kind of answer report what was cached.
func TestReportsAreOfTheirKind(t *testing.T) {
	var d reports
	plain, stream := ReportKind{"chat", false}, ReportKind{"chat", true}
	if d.reported(plain, false) {
		t.Error("something is said to be reported before it was")
	}
	if !d.reported(plain, true) || !d.reported(plain, false) || d.reported(stream, false) || d.reported(ReportKind{"messages", false}, false) {
		t.Error("what one kind reports is said of others, or not of itself")
	}
	if d.reset(); d.reported(plain, false) {
		t.Error("what another life reported counts")
	}
}
