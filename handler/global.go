package handler

import (
	"cmp"

	"github.com/caddy-kvrouter/kvrouter/handler/pool"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
)

func init() {
	httpcaddyfile.RegisterGlobalOption("kv_router", parseGlobal)
}

// globalBlocks are the global kv_router blocks of a Caddyfile, by the names of their pools. Each directive
// of a pool reads the block of its pool as if it stood in the directive. So a block may use what only a
// site has, such as named matchers, and the configuration in JSON needs no second place for options.
type globalBlocks map[string]caddyfile.Segment

// parseGlobal keeps a global block for the directives.
func parseGlobal(d *caddyfile.Dispenser, before any) (any, error) {
	d.Next()
	block := d.NextSegment()
	httpcaddyfile.NewShorthandReplacer().ApplyToSegment(&block)
	blocks, ok := before.(globalBlocks)
	if !ok {
		blocks = make(globalBlocks)
	}
	d = caddyfile.NewDispenser(block)
	name, err := poolOfBlock(d)
	if err != nil {
		return nil, err
	}
	if blocks[name] != nil {
		return nil, d.Errf("pool %s: already has a global block", name)
	}
	blocks[name] = block
	return blocks, nil
}

func poolOfBlock(d *caddyfile.Dispenser) (string, error) {
	d.Next()
	args := d.RemainingArgs()
	if len(args) > 1 {
		return "", d.ArgErr()
	}
	return append(args, pool.DefaultName)[0], nil
}

// inherit reads the global block of the handler's pool. own are the options of its directive: none may
// stand in both, so directives of a pool cannot contradict the block.
func (h *Handler) inherit(at httpcaddyfile.Helper, blocks globalBlocks, own map[string]bool) error {
	block := blocks[cmp.Or(h.Pool, pool.DefaultName)]
	if block == nil {
		return at.Errf("pool %s: has no global kv_router block, but other pools have", cmp.Or(h.Pool, pool.DefaultName))
	}
	d := caddyfile.NewDispenser(block)
	if _, err := poolOfBlock(d); err != nil {
		return err
	}
	h.named = at.WithDispenser(d).MatcherToken
	o := h.options()
	delete(o, "pool")
	for name := range own {
		if o[name] != nil {
			o[name] = func(*caddyfile.Dispenser) error {
				return at.Errf("%s: the global kv_router block of the pool sets it, too", name)
			}
		}
	}
	_, err := o.readAll(d, 0, "option of a global kv_router block")
	return err
}
