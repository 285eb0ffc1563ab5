package handler

import (
	"fmt"
	"net/http"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Trust grants wishes to clients: in `nvext`, a member of a request's body, and in routing
// headers. The router drops other wishes before the engine sees them, and counts them. A
// body that the router cannot read passes unchanged. The router refuses it if the request
// is a tenant's or `enforce_cache_salt` is on.
type Trust struct {
	// The grants, one or more of:
	//
	// - `pins`: which worker and rank serves the request.
	// - `priorities`: the request's place in the queues, here and in the engine, and how
	//   long its cache is kept.
	// - `overrides`: the policy's options, allowed workers, taints.
	// - `tenants`: the header `X-Tenant-Id`, which keeps caches and sessions apart.
	// - `uploads`: the engine sends data to the client's URL.
	// - `explain`: where a request would go, and what shows topology.
	//
	// At least one is required.
	Grants []string `json:"grants,omitempty"`

	// The matchers of the requests that get the grants. Default: all requests.
	MatcherSetsRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`

	granted  nvext.Grants
	matchers caddyhttp.MatcherSets
}

func (h *Handler) checkTrust() error {
	for _, t := range h.Trust {
		if t == nil || len(t.Grants) == 0 {
			return fmt.Errorf("trust: grants are missing, must be one or more of %s", strings.Join(nvext.GrantNames(), ", "))
		}
		for _, name := range t.Grants {
			g, ok := nvext.ParseGrant(name)
			if !ok {
				return fmt.Errorf("trust: must be one or more of %s, got %q", strings.Join(nvext.GrantNames(), ", "), name)
			}
			t.granted |= g
		}
	}
	return nil
}

// grants returns what the client of a request is granted. A matcher that fails grants
// nothing.
func (h *Handler) grants(r *http.Request) (g nvext.Grants) {
	if h.RequirePin {
		g = nvext.Pins
	}
	for _, t := range h.Trust {
		if t.granted&^g == 0 {
			continue
		}
		if h.meets(r, t.matchers, "a matcher of trust fails, and grants nothing") {
			g |= t.granted
		}
	}
	return g
}

func (h *Handler) unmarshalTrust(d *caddyfile.Dispenser) error {
	t := &Trust{Grants: d.RemainingArgs()}
	if len(t.Grants) == 0 {
		return d.ArgErr()
	}
	set, err := caddyhttp.ParseCaddyfileNestedMatcherSet(d)
	if err != nil {
		return err
	}
	if len(set) > 0 {
		t.MatcherSetsRaw = caddyhttp.RawMatcherSets{set}
	} else if d.Val() == "}" {
		return d.Err("trust: the block has no matchers; remove it to trust all clients")
	}
	h.Trust = append(h.Trust, t)
	return nil
}
