package handler_test

import (
	"fmt"
	"strconv"

	_ "github.com/caddy-kvrouter/kvrouter/handler" // the directive
	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

func init() {
	caddy.RegisterModule(new(Warmest))
}

// Warmest takes the worker that holds most of the prompt among those that are not busy. A
// worker is busy if it has `busy_at` active requests or more. If all are busy, it takes the one
// with the fewest requests.
type Warmest struct {
	// The number of active requests from which a worker is busy. Default: `8`.
	BusyAt int `json:"busy_at,omitempty"`
}

// CaddyModule returns the Caddy module information.
func (*Warmest) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.kv_router.policies.warmest",
		New: func() caddy.Module { return new(Warmest) },
	}
}

// Provision checks the options.
func (p *Warmest) Provision(caddy.Context) error {
	if p.BusyAt < 0 {
		return fmt.Errorf("policy warmest: busy_at: must be positive, got %d", p.BusyAt)
	}
	if p.BusyAt == 0 {
		p.BusyAt = 8
	}
	return nil
}

// UnmarshalCaddyfile sets up the policy from Caddyfile tokens. Syntax:
//
//	policy warmest {
//		busy_at <requests>
//	}
func (p *Warmest) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the policy's name
	for d.NextBlock(0) {
		var value string
		if d.Val() != "busy_at" {
			return d.Errf("unrecognized option of policy warmest '%s'", d.Val())
		}
		if !d.AllArgs(&value) {
			return d.ArgErr()
		}
		n, err := strconv.Atoi(value)
		if err != nil {
			return d.Errf("busy_at: must be a whole number, got '%s'", value)
		}
		p.BusyAt = n
	}
	return nil
}

// Choose implements kvscore.Policy. The cost is in blocks: those that the worker lacks.
func (p *Warmest) Choose(s *kvscore.Selection) int {
	for i := range s.Candidates {
		c := &s.Candidates[i]
		c.Cost = c.RequestBlocks - c.OverlapBlocks
		if c.Requests >= p.BusyAt {
			c.Cost += 1e9 * float64(c.Requests) // behind all that are not busy
		}
	}
	return s.Cheapest()
}

// CostUnit names the unit of the costs in explanations.
func (*Warmest) CostUnit() string { return kvscore.UnitBlocks }

// Interface guards
var (
	_ kvscore.Policy        = (*Warmest)(nil)
	_ caddy.Provisioner     = (*Warmest)(nil)
	_ caddyfile.Unmarshaler = (*Warmest)(nil)
)

// A policy is a Caddy module. It can be tested with selections that are made by hand.
func Example_policy() {
	policy := &Warmest{BusyAt: 8}
	s := &kvscore.Selection{Candidates: []kvscore.Candidate{
		{Target: kvscore.Target{Worker: 1}, RequestBlocks: 50, Overlap: kvscore.Overlap{OverlapBlocks: 40}, Requests: 9},
		{Target: kvscore.Target{Worker: 2}, RequestBlocks: 50, Overlap: kvscore.Overlap{OverlapBlocks: 30}, Requests: 2},
		{Target: kvscore.Target{Worker: 3}, RequestBlocks: 50},
	}}
	i := policy.Choose(s)
	fmt.Printf("worker %d lacks %g blocks\n", s.Candidates[i].Target.Worker, s.Candidates[i].Cost)
	// Output: worker 2 lacks 20 blocks
}
