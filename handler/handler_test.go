package handler

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/pool"
	"github.com/caddy-kvrouter/kvrouter/handler/turn"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func matcher(t *testing.T, models ...string) MatchModel {
	m := MatchModel{Models: models}
	if err := m.Provision(caddy.Context{}); err != nil {
		t.Fatal(err)
	}
	return m
}

func TestMatchModel(t *testing.T) {
	long := `{"messages":[{"content":"` + strings.Repeat("x", 1<<20) + `"}],"model":"Qwen/Qwen3-8B"}`
	for name, v := range map[string]struct {
		models, kind, body string
		want               bool
	}{
		"equal":         {"m", "application/json", `{"model":"m"}`, true},
		"other":         {"m", "application/json", `{"model":"mm"}`, false},
		"star":          {"qwen* *8B", "application/json; charset=utf-8", long, true},
		"no pattern":    {"Qwen.*", "application/json", long, false},
		"last counts":   {"m", "application/json", `{"model":"x","model":"m"}`, true},
		"no model":      {"*", "application/json", `{}`, true},
		"not an object": {"*", "application/json", `[{"model":"m"}]`, false},
		"malformed":     {"*", "application/json", `{"model":`, false},
		"no JSON":       {"*", "text/plain", `{"model":"m"}`, false},
		"empty":         {"*", "application/json", ``, false},
	} {
		r := httptest.NewRequest("POST", "/v1/chat/completions", strings.NewReader(v.body))
		r = r.WithContext(context.WithValue(r.Context(), caddyhttp.VarsCtxKey, make(map[string]any)))
		r.Header.Set("Content-Type", v.kind)
		for range 2 {
			got, err := matcher(t, strings.Fields(v.models)...).MatchWithError(r)
			if got != v.want || err != nil {
				t.Errorf("%s: %v, %v", name, got, err)
			}
		}
		if all, err := io.ReadAll(r.Body); string(all) != v.body || err != nil {
			t.Errorf("%s: then the body has %d bytes, %v", name, len(all), err)
		}
		_ = r.Body.Close()
	}
	r := httptest.NewRequest("POST", "/", iotest.ErrReader(errors.New("cut")))
	r = r.WithContext(context.WithValue(r.Context(), caddyhttp.VarsCtxKey, make(map[string]any)))
	r.Header.Set("Content-Type", "application/json")
	if _, err := matcher(t, "m").MatchWithError(r); err == nil || !strings.Contains(err.Error(), "cut") {
		t.Errorf("of a body that breaks off: %v", err)
	}
	if held := matching.Held.Load(); held != 0 {
		t.Errorf("%d bytes are held", held)
	}
}

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
