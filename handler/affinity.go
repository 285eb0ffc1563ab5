package handler

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/plan"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// The values of Affinity.Mode.
const (
	affinitySoft = "soft"
	affinityHard = "hard"
	affinityOff  = "off"
)

// sessionMode returns the configured mode, or the default.
func (h *Handler) sessionMode() string {
	if h.Affinity == nil {
		return affinitySoft
	}
	return cmp.Or(h.Affinity.Mode, affinitySoft)
}

// checkAffinity checks the mode and the places of keys.
func (h *Handler) checkAffinity() error {
	switch mode := h.sessionMode(); mode {
	case affinitySoft, affinityHard, affinityOff:
	default:
		return fmt.Errorf("affinity mode: must be soft, hard or off, got %q", mode)
	}
	names := []string{"nvext", "header:X-Session-Id"}
	if h.Affinity != nil && len(h.Affinity.Key) > 0 {
		names = h.Affinity.Key
	}
	for _, name := range names {
		source, err := plan.ParseKeySource(name)
		if err != nil {
			return err
		}
		if header, ok := strings.CutPrefix(name, "header:"); ok && strings.ContainsAny(header, "_.") {
			h.logger.Warn("Caddy drops request headers with such a name unless the server's expected_underscore_headers lists it: " + header)
		}
		h.keys = append(h.keys, source)
	}
	return nil
}

// priceLeaving records whether the policy may send a session's turns elsewhere: only a
// policy whose costs are times knows the price.
func (h *Handler) priceLeaving() {
	h.dispatcher.Soft = h.sessionMode() == affinitySoft && kvscore.CostUnit(h.policy) == kvscore.UnitMilliseconds
}
