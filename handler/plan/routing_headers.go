package plan

import (
	"maps"
	"net/http"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
)

// headersNeed returns the grants that a request's routing headers need, 0 if it has
// none.
func headersNeed(h http.Header) (needs nvext.Grants) {
	for name := range h {
		needs |= nvext.HeaderNeeds(name)
	}
	return needs
}

// oneValue returns a header's value. If a gateway has added another value, neither
// wins: together they are not a number, and name a tenant of their own (RFC 9110, 5.3).
func oneValue(values []string) string {
	for _, v := range values[1:] {
		if v != values[0] {
			return strings.Join(values, ", ")
		}
	}
	return values[0]
}

// WithoutRouting returns a request's header without the routing headers that the engine
// must not see: those that are not granted, and those that choose a worker or a rank.
func (p *Plan) WithoutRouting(h http.Header) http.Header {
	if p.headers == 0 {
		return h
	}
	kept := maps.Clone(h) // the server's own is shared
	for name, values := range kept {
		switch needs := nvext.HeaderNeeds(name); {
		case needs == 0:
		case needs&nvext.Pins != 0 || needs&^p.Grants != 0:
			delete(kept, name)
		case len(values) > 1:
			kept[name] = []string{oneValue(values)}
		}
	}
	return kept
}
