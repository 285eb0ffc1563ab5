package plan

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/queue"
)

func TestClientsTargets(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"250": 250 * time.Millisecond, "1.5": 1500 * time.Microsecond, "2s": 2 * time.Second, "1h": time.Hour,
		"": 0, "0": 0, "-250": 0, "-2s": 0, "NaN": 0, "inf": 0, "-Inf": 0, "1e300": 0, "3600001": 0, "2h": 0, "0.1": 0, "1us": 0,
		"soon": 0, "9223372036854775807": 0, "250ms, 10ms": 0,
	} {
		if got := parseTarget(text); got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
}

func FuzzTarget(f *testing.F) {
	for _, text := range []string{"250", "2s", "-1", "NaN", "1e999", "0x1p-2", "1h1h"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if got := parseTarget(text); got != 0 && (got < time.Millisecond || got > time.Hour) {
			t.Errorf("%q: %v", text, got)
		}
	})
}

func TestTenantsNames(t *testing.T) {
	long := strings.Repeat("x", 129)
	switch a, b := TenantOf("acme"), TenantOf("acmf"); {
	case TenantOf("") != Tenant{}, a != TenantOf("acme"), a.Name != "acme", a.Hash == 0, a.Hash == b.Hash:
		t.Errorf("tenants %v and %v", a, b)
	}
	if n := TenantOf(long).Name; n != "sha256:"+nvext.Digest([]byte(long)) {
		t.Errorf("a long name is kept as %q", n)
	}
	if n := TenantOf(long[1:]).Name; n != long[1:] {
		t.Errorf("the longest name is kept as %q", n)
	}
}

// TestTenantIsWhatTheOperatorTrusts has the client's header name the tenant if that is granted. Salts in
// bodies name none: a client can invent as many as it likes.
func TestTenantIsWhatTheOperatorTrusts(t *testing.T) {
	for _, v := range []struct {
		grants nvext.Grants
		want   string
	}{{0, ""}, {nvext.Tenants, "acme"}} {
		rd, r := testReader(v.grants), ordinary()
		r.Header.Set(nvext.HeaderTenant, "acme")
		p, err := rd.Read(r)
		if err != nil || p.Tenant != TenantOf(v.want) {
			t.Errorf("grants %v: tenant %v, want %q; error %v", v.grants, p.Tenant, v.want, err)
		}
	}
	rd, r := testReader(0), ordinary()
	rd.Class = func(*http.Request) (*queue.Class, string) { return &queue.Class{TTFT: time.Second}, "" }
	if p, err := rd.Read(r); err != nil || p.Tenant != (Tenant{}) || p.TTFT != time.Second {
		t.Errorf("tenant %v, target %v, error %v", p.Tenant, p.TTFT, err)
	}
}
