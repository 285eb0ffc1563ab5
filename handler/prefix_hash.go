package handler

import (
	"fmt"
	"math"

	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// PrefixHash gives prompts of one model that begin alike to one worker, which
// the beginning's hash chooses, as long as that worker's share of the active
// requests is within a bound; else to the next in the prompt's own order of
// the workers. What a worker holds does not count. When a worker goes, only
// its prompts move. Prompts shorter than one block go to the worker with the
// fewest requests.
//
// A conversation keeps its worker from the turn on that fills the beginning.
// Hashes are of one process: after a restart, or at another router, prompts go
// elsewhere.
type PrefixHash struct {
	// How many tokens count as a prompt's beginning, in full blocks; text
	// counts as one token for 4 bytes. Default: `256`.
	PrefixTokens int `json:"prefix_tokens,omitempty"`
	// How many active requests a worker may have in terms of the mean: with
	// the new request at most ceil(load_factor × requests / workers). At least
	// 1; a factor of the number of workers or more bounds nothing.
	// Default: `1.25`.
	LoadFactor *float64 `json:"load_factor,omitempty"`

	*kvscore.PrefixHash `json:"-"`
}

// CaddyModule returns the Caddy module information.
func (PrefixHash) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: policyNamespace + ".prefix_hash", New: func() caddy.Module { return new(PrefixHash) }}
}

// Provision checks the options.
func (p *PrefixHash) Provision(caddy.Context) error {
	p.PrefixHash = &kvscore.PrefixHash{Tokens: p.PrefixTokens, LoadFactor: kvscore.DefaultLoadFactor}
	set(&p.PrefixHash.LoadFactor, p.LoadFactor)
	if p.PrefixTokens < 0 {
		return fmt.Errorf("policy prefix_hash: prefix_tokens must be positive, got %d", p.PrefixTokens)
	}
	if f := p.PrefixHash.LoadFactor; !(f >= 1) || math.IsInf(f, 0) {
		return fmt.Errorf("policy prefix_hash: load_factor must be finite and at least 1, got %v", f)
	}
	return nil
}

// UnmarshalCaddyfile sets up the policy from Caddyfile tokens. Syntax:
//
//	policy prefix_hash {
//		prefix_tokens <tokens>
//		load_factor <number>
//	}
func (p *PrefixHash) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the policy's name
	return readOptions(d, "option of policy prefix_hash", func(name string) error {
		switch name {
		case "prefix_tokens":
			return intArg(d, &p.PrefixTokens)
		case "load_factor":
			p.LoadFactor = new(float64)
			return floatArg(d, p.LoadFactor)
		}
		return errUnknownOption
	})
}

// Interface guards
var (
	_ caddy.Provisioner     = (*PrefixHash)(nil)
	_ kvscore.Policy        = (*PrefixHash)(nil)
	_ caddyfile.Unmarshaler = (*PrefixHash)(nil)
)
