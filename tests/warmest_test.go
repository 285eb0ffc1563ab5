package tests

import (
	"strconv"

	"github.com/caddy-kvrouter/kvrouter/kvscore"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

func init() { caddy.RegisterModule(new(warmest)) }

// warmest is a policy for canned engines, which take no longer for a long prompt than
// for a short one. It follows what they hold although that saves no time. So a
// request that goes elsewhere shows a prompt that was not recognized.
type warmest struct {
	// Besides is how many blocks of text all prompts have in common: these do not
	// count.
	Besides int `json:"besides"`

	ties kvscore.Ties
}

func (*warmest) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.kv_router.policies.warmest", New: func() caddy.Module { return new(warmest) }}
}

func (w *warmest) UnmarshalCaddyfile(d *caddyfile.Dispenser) (err error) {
	d.Next()
	if d.NextArg() {
		w.Besides, err = strconv.Atoi(d.Val())
	}
	return err
}

func (w *warmest) Choose(s *kvscore.Selection) int {
	var best []int
	most := -1
	for i := range s.Candidates {
		held := max(0, s.Candidates[i].HeldBlocks-w.Besides)
		if held > most {
			most, best = held, best[:0]
		}
		if held == most {
			best = append(best, i)
		}
	}
	return w.ties.Pick(s, best)
}
