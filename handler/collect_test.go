package handler

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// TestLabelThatIsNoneSpoilsNothing hands in a figure that cannot be shown.
func TestLabelThatIsNoneSpoilsNothing(t *testing.T) {
	ch := make(chan prometheus.Metric, 2)
	collect(ch, descAvailable, prometheus.GaugeValue, 1, "pool", "127.0.0.1:9\xff")
	collect(ch, descAvailable, prometheus.GaugeValue, 1, "pool", "127.0.0.1:9")
	if len(ch) != 1 {
		t.Errorf("%d figures", len(ch))
	}
}
