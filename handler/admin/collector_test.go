package admin

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// TestInvalidLabelCostsOnlyItsFigure collects a figure whose label is no UTF-8.
func TestInvalidLabelCostsOnlyItsFigure(t *testing.T) {
	to := sink{make(chan prometheus.Metric, 2), []string{"pool"}}
	to.gauge(descAvailable, 1, "127.0.0.1:9\xff")
	to.gauge(descAvailable, 1, "127.0.0.1:9")
	if n := len(to.ch); n != 1 {
		t.Errorf("%d figures", n)
	}
}
