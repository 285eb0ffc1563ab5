package handler

import (
	"context"
	"errors"
	"io"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/iotest"

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
