package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/sim"
	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

// load is how fast a trace is replayed. A named load has its speed once the
// saturation is known.
type load struct {
	name  string
	speed float64
}

// shares are what the named loads are of the speed at saturation.
var shares = map[string]float64{"low": 0.35, "middle": 0.7, "high": 0.95, overload: overloaded}

// overload is the load beyond saturation; the suite gives it to few traces.
const overload = "overload"

func parseLoads(list string) (loads []load, err error) {
	for item := range strings.SplitSeq(list, ",") {
		l := load{name: item}
		if shares[item] == 0 {
			f, err := factors("-speed", item)
			if err != nil {
				return nil, err
			}
			l.speed = f[0]
		}
		loads = append(loads, l)
	}
	return loads, nil
}

// at returns the loads with their speeds.
func at(loads []load, saturation float64) []load {
	all := make([]load, 0, len(loads))
	for _, l := range loads {
		if l.speed == 0 {
			l.speed = shares[l.name] * saturation
		}
		all = append(all, l)
	}
	return all
}

// setSpeeds finds the saturation, if it is asked for, and sets the speeds of the
// named loads.
func (o *options) setSpeeds(t *trace.Trace, stderr io.Writer) (saturation float64, err error) {
	if o.saturate == "" {
		return 0, nil
	}
	fmt.Fprintf(stderr, "looking for the saturation of %s\n", o.saturate)
	saturation, err = sim.Saturation(sim.Config{Trace: t, Policy: o.saturate, Cluster: o.cluster, Seed: o.seeds[0]})
	if err != nil {
		return 0, fmt.Errorf("looking for the saturation of %s on %s: %w", o.saturate, t.Name, err)
	}
	o.loads = at(o.loads, saturation)
	return saturation, nil
}
