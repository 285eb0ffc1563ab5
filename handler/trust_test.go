package handler

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// failing is a matcher that cannot tell.
type failing struct{}

// MatchWithError implements caddyhttp.RequestMatcherWithError.
func (failing) MatchWithError(*http.Request) (bool, error) { return true, fmt.Errorf("no idea") }

// TestMatcherThatFailsGrantsNothing has one that says yes with an error, beside
// lines that hold.
func TestMatcherThatFailsGrantsNothing(t *testing.T) {
	p, err := pool.New("trust", new(pool.Settings).WithDefaults(), turn.NewCloser)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Destruct()
	r := httptest.NewRequest(http.MethodPost, "/v1/chat/completions", http.NoBody)
	h := &Handler{pool: p, logger: p.Logger(), Trust: []*Trust{
		{Grants: []string{"pins"}, granted: nvext.Pins, matchers: caddyhttp.MatcherSets{{failing{}}}},
		{Grants: []string{"explain"}, granted: nvext.Explain},
	}}
	if g := h.grants(r); g != nvext.Explain {
		t.Errorf("granted %v", g)
	}
	if n := len(p.Incidents.Open(time.Now())); n != 1 {
		t.Errorf("%d conditions last, want 1", n)
	}
	h.RequirePin = true
	if g := h.grants(r); g != nvext.Explain|nvext.Pins {
		t.Errorf("with require_pin granted %v", g)
	}
}
