package dispatch

import (
	"fmt"
	"testing"
)

// TestPreference follows Dynamo's rule and its range.
func TestPreference(t *testing.T) {
	for sum, want := range map[float64]string{0: "1.000", 1: "0.467", -1: "2.142", 1e9: "0.368", -1e9: "2.718"} {
		if got := fmt.Sprintf("%.3f", preference(sum)); got != want {
			t.Errorf("taints that weigh %v: %s, want %s", sum, got, want)
		}
	}
}
