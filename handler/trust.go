package handler

import (
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Trust grants clients wishes in `nvext`, the member of a request's body, and in routing
// headers. The router drops other wishes before the engine sees them, and counts them. A
// body that the router cannot read passes unchanged; it is refused if the request is a
// tenant's or `cache_salt` is enforced.
type Trust struct {
	// What is granted, one or more of: `pins` (which worker and rank serves the
	// request), `priorities` (its place in the queues, here and in the engine, and how
	// long its cache is kept), `overrides` (the policy's options, allowed workers,
	// taints), `tenants` (the header `X-Tenant-Id`, which keeps caches and sessions
	// apart), `uploads` (the engine sends data to the client's URL), `explain` (where a
	// request would go, and what shows topology).
	What []string `json:"what,omitempty"`

	// Matchers of the requests that get the grants. Default: all.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`

	grants   nvext.Grants
	matchers caddyhttp.MatcherSets
}

func (h *Handler) checkTrust() error {
	for _, t := range h.Trust {
		if t == nil || len(t.What) == 0 {
			return fmt.Errorf("trust: what is granted is missing, one or more of %s", strings.Join(nvext.GrantNames(), ", "))
		}
		for _, name := range t.What {
			g, ok := nvext.ParseGrant(name)
			if !ok {
				return fmt.Errorf("trust: must be one or more of %s, got %q", strings.Join(nvext.GrantNames(), ", "), name)
			}
			t.grants |= g
		}
	}
	return nil
}

func (h *Handler) loadTrust(ctx caddy.Context) error {
	for _, t := range h.Trust {
		if t.MatcherSetsRaw == nil {
			continue
		}
		mods, err := ctx.LoadModule(t, "MatcherSetsRaw")
		if err != nil {
			return fmt.Errorf("trust: loading matchers: %w", err)
		}
		if err := t.matchers.FromInterface(mods); err != nil {
			return fmt.Errorf("trust: %w", err)
		}
	}
	return nil
}

// grants returns what the client of a request is granted. A matcher that fails grants
// nothing.
func (h *Handler) grants(r *http.Request) (g nvext.Grants) {
	if h.Mode == modeDirect {
		g = nvext.Pins
	}
	for _, t := range h.Trust {
		if t.grants&^g == 0 {
			continue
		}
		match, err := t.matchers.AnyMatchWithError(r)
		switch {
		case err != nil:
			h.pool.Incidents.Raise(time.Now(), "a matcher of trust fails, and grants nothing", h.pool.Logger)
			if c := h.logger.Check(zap.DebugLevel, "matcher of trust failed"); c != nil {
				c.Write(zap.Strings("trust", t.What), zap.Error(err))
			}
		case match:
			g |= t.grants
		}
	}
	return g
}

func (h *Handler) unmarshalTrust(d *caddyfile.Dispenser) error {
	t := &Trust{What: d.RemainingArgs()}
	if len(t.What) == 0 {
		return d.ArgErr()
	}
	set, err := caddyhttp.ParseCaddyfileNestedMatcherSet(d)
	if err != nil {
		return err
	}
	if len(set) > 0 {
		t.MatcherSetsRaw = caddyhttp.RawMatcherSets{set}
	} else if d.Val() == "}" {
		return d.Err("trust: the block has no matchers; without a block, everyone is trusted")
	}
	h.Trust = append(h.Trust, t)
	return nil
}
