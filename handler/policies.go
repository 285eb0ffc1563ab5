package handler

import (
	"fmt"
	"math"

	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// policyNamespace holds the policies: modules that implement kvscore.Policy.
const policyNamespace = "http.handlers.kv_router.policies"

func init() {
	for _, m := range []caddy.Module{
		new(PredictedLatency), new(Dynamo), new(RoundRobin), new(LeastLoad), new(Random), new(PowerOfTwo), new(PrefixHash),
	} {
		caddy.RegisterModule(m)
	}
}

// loadPolicies loads the policy, and the shadow policy if one is configured.
func (h *Handler) loadPolicies(ctx caddy.Context) (err error) {
	if h.policy = newPredictedLatency(); h.PolicyRaw != nil {
		if h.policy, err = h.policyOf(ctx, "PolicyRaw"); err != nil {
			return err
		}
	}
	if h.ShadowRaw != nil {
		if h.shadow, err = h.policyOf(ctx, "ShadowRaw"); err != nil {
			return fmt.Errorf("shadow: %w", err)
		}
	}
	return nil
}

func (h *Handler) policyOf(ctx caddy.Context, field string) (kvscore.Policy, error) {
	mod, err := ctx.LoadModule(h, field)
	if err != nil {
		return nil, fmt.Errorf("loading policy: %w", err)
	}
	p, ok := mod.(kvscore.Policy)
	if !ok {
		return nil, fmt.Errorf("policy %T does not implement kvscore.Policy", mod)
	}
	return p, nil
}

// policyInfo returns the module information of a policy, whose zero value is ready for use.
func policyInfo[T any, P interface {
	*T
	caddy.Module
}](name string) caddy.ModuleInfo {
	id := policyNamespace + "." + caddy.ModuleID(name)
	return caddy.ModuleInfo{ID: id, New: func() caddy.Module { return P(new(T)) }}
}

// PredictedLatency takes the worker with the lowest cost in milliseconds. Workers of equal
// cost share evenly. The policy learns how fast workers are from the times of their first
// tokens. The cost is what the choice adds to the time to first token and, weighted, to the
// time between tokens, over all requests.
type PredictedLatency struct{ kvscore.PredictedLatency }

func (*PredictedLatency) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: policyNamespace + ".predicted_latency", New: func() caddy.Module { return newPredictedLatency() }}
}

func newPredictedLatency() *PredictedLatency {
	return &PredictedLatency{kvscore.PredictedLatency{Weight: kvscore.DefaultWeight}}
}

func (p *PredictedLatency) Provision(caddy.Context) error {
	if !(p.Weight >= 0 && p.Weight <= 1000) {
		return fmt.Errorf("policy predicted_latency: weight: must be from 0 to 1000, got %v", p.Weight)
	}
	return nil
}

// UnmarshalCaddyfile sets up the policy from Caddyfile tokens. docs/configuration.md has the syntax.
func (p *PredictedLatency) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the policy's name
	return options{"weight": &p.Weight}.readBlock(d, "option of policy predicted_latency")
}

// Dynamo is the cost function of NVIDIA Dynamo's KV router, with its options and its
// defaults. Per candidate the cost is
//
//	prefill_load_scale × max(0, (booked prefill + prompt)/block_size − credit)
//	  + active blocks + new blocks + decode_active_request_weight × requests
//
// The lowest cost wins. Workers of equal cost share evenly. All numbers are finite and not
// negative.
type Dynamo struct{ kvscore.Dynamo }

func (*Dynamo) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: policyNamespace + ".dynamo", New: func() caddy.Module {
		return &Dynamo{*kvscore.NewDynamo()}
	}}
}

func (p *Dynamo) Provision(caddy.Context) error {
	for name, v := range map[string]float64{
		"overlap_score_credit": p.OverlapScoreCredit, "credit_decay": p.CreditDecay,
		"prefill_load_scale": p.PrefillLoadScale, "temperature": p.Temperature,
		"decode_active_request_weight": p.DecodeActiveRequestWeight,
	} {
		if v < 0 || math.IsInf(v, 0) || math.IsNaN(v) {
			return fmt.Errorf("policy dynamo: %s: must be finite and not negative, got %v", name, v)
		}
	}
	return nil
}

// UnmarshalCaddyfile sets up the policy from Caddyfile tokens. docs/configuration.md has the syntax.
func (p *Dynamo) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the policy's name
	return options{
		"overlap_score_credit": &p.OverlapScoreCredit, "credit_decay": &p.CreditDecay,
		"prefill_load_scale": &p.PrefillLoadScale, "decode_active_request_weight": &p.DecodeActiveRequestWeight,
		"temperature": &p.Temperature, "track_prefill_tokens": &p.TrackPrefillTokens,
		"track_active_blocks": &p.TrackActiveBlocks, "track_output_blocks": &p.TrackOutputBlocks,
		"assume_kv_reuse": &p.AssumeKVReuse,
	}.readBlock(d, "option of policy dynamo")
}

// RoundRobin takes the workers in turn, whatever their caches hold. It has no options.
type RoundRobin struct {
	noOptions
	kvscore.RoundRobin `json:"-"`
}

func (*RoundRobin) CaddyModule() caddy.ModuleInfo { return policyInfo[RoundRobin]("round_robin") }

// LeastLoad takes the worker with the fewest active requests. Among several, it takes the
// one with the fewest prompt tokens still to be computed. It has no options.
type LeastLoad struct {
	noOptions
	kvscore.LeastLoad `json:"-"`
}

func (*LeastLoad) CaddyModule() caddy.ModuleInfo { return policyInfo[LeastLoad]("least_load") }

// Random takes any worker, each as likely as the others. It has no options.
type Random struct {
	noOptions
	kvscore.Random `json:"-"`
}

func (*Random) CaddyModule() caddy.ModuleInfo { return policyInfo[Random]("random") }

// PowerOfTwo draws two workers and takes the one with fewer active requests. If both have
// the same number, it takes the one with fewer prompt tokens still to be computed. It has
// no options.
type PowerOfTwo struct {
	noOptions
	kvscore.PowerOfTwo `json:"-"`
}

func (*PowerOfTwo) CaddyModule() caddy.ModuleInfo { return policyInfo[PowerOfTwo]("power_of_two") }

// noOptions is embedded in policies without options.
type noOptions struct{}

// UnmarshalCaddyfile returns an error if there are options.
func (noOptions) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the policy's name
	if d.NextArg() || d.NextBlock(0) {
		return d.ArgErr()
	}
	return nil
}

// PrefixHash sends prompts of one model with the same beginning to one worker, which the
// hash of the beginning chooses. If that worker's share of the active requests exceeds a
// bound, the next worker in the prompt's own order gets the request. What a worker's cache
// holds does not count. If a worker goes, only its prompts move. Prompts shorter than one
// block go to the worker with the fewest requests.
//
// A conversation keeps its worker from the turn that fills the beginning. Hashes differ
// by process: after a restart, or at another router, prompts go elsewhere.
type PrefixHash struct{ kvscore.PrefixHash }

func (*PrefixHash) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: policyNamespace + ".prefix_hash", New: func() caddy.Module {
		return &PrefixHash{kvscore.PrefixHash{LoadFactor: kvscore.DefaultLoadFactor}}
	}}
}

func (p *PrefixHash) Provision(caddy.Context) error {
	if p.PrefixTokens < 0 {
		return fmt.Errorf("policy prefix_hash: prefix_tokens: must be positive, got %d", p.PrefixTokens)
	}
	if !(p.LoadFactor >= 1) || math.IsInf(p.LoadFactor, 0) {
		return fmt.Errorf("policy prefix_hash: load_factor: must be finite and at least 1, got %v", p.LoadFactor)
	}
	return nil
}

// UnmarshalCaddyfile sets up the policy from Caddyfile tokens. docs/configuration.md has the syntax.
func (p *PrefixHash) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the policy's name
	return options{
		"prefix_tokens": &p.PrefixTokens, "load_factor": &p.LoadFactor,
	}.readBlock(d, "option of policy prefix_hash")
}

// Interface guards
var (
	_ = []interface {
		kvscore.Policy
		caddyfile.Unmarshaler
	}{
		(*PredictedLatency)(nil), (*Dynamo)(nil), (*RoundRobin)(nil), (*LeastLoad)(nil),
		(*Random)(nil), (*PowerOfTwo)(nil), (*PrefixHash)(nil),
	}
	_ = []caddy.Provisioner{(*Dynamo)(nil), (*PrefixHash)(nil)}
)
