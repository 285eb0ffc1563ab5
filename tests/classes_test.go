package tests

import (
	"fmt"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// TestClassesAndTenants has the operator's matchers choose the class, and placeholders the tenant. What
// clients say of themselves counts only where it is granted.
func TestClassesAndTenants(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	const show = "header >X-Who \"{http.kv_router.class}|{http.kv_router.tenant}\"\n"
	s := startCaddy(t, `@evals {
	method POST
	header X-Job eval*
}
`+show+route(engines, trust("priorities tenants"), `class chat {
	match header X-Class chat
	match {
		path /v1/completions
		header X-Class both
	}
	match `+"expression `{http.kv_router.priority} > 4`"+`
	weight 4
}
class batch {
	match @evals
	background
}
class named {
	match vars {http.kv_router.model} other
}`))
	with := func(header ...string) []string { return header }
	hint := func(priority int) string { return fmt.Sprintf(`{"agent_hints":{"priority":%d}}`, priority) }
	for _, v := range []struct {
		nvext, model string
		header       []string
		want         string
	}{
		{"", "", nil, "default|"},
		{"", "", with("X-Class", "chat"), "chat|"},
		{"", "", with("X-Class", "both"), "default|"},
		{"", "", with("X-Job", "evals-7"), "batch|"},
		{"", "", with("X-Job", "evals-7", "X-Class", "chat"), "chat|"},
		{hint(5), "", nil, "default|"},
		{hint(5), "", trusted, "chat|"},
		{hint(4), "", trusted, "default|"},
		{"", "", append(with("X-Dynamo-Request-Priority", "9"), trusted...), "chat|"},
		{"", "", with("X-Dynamo-Request-Priority", "9"), "default|"},
		{"", "", with("X-Tenant-Id", "acme"), "default|"},
		{"", "", append(with("X-Tenant-Id", "acme"), trusted...), "default|acme"},
		{"", "other", nil, "named|"},
	} {
		c := ask("who am I?")
		if v.nvext != "" {
			c = wishing("who am I?", v.nvext)
		}
		if v.model != "" {
			c.Model = v.model
		}
		a := s.chat(t.Context(), c, v.header...)
		if got := a.header.Get("X-Who"); got != v.want {
			t.Errorf("%s %s %v: %q, want %q; status %d", v.nvext, v.model, v.header, got, v.want, a.status)
		}
	}
	s.mustReload(t, show+route(engines, "tenant {header.X-Org}", trust("tenants"), "class default {\nttft 10s {header.X-Llm-D-Slo-Ttft-Ms}\n}"))
	for _, org := range []string{"", "acme", strings.Repeat("x", 200)} {
		want := org
		if len(org) > 128 {
			want = digest(org)
		}
		a := s.mustChat(t, ask("who am I?"), append(with("X-Org", org, "X-Tenant-Id", "other", "X-Llm-D-Slo-Ttft-Ms", "NaN"), trusted...)...)
		if got := a.header.Get("X-Who"); got != "default|"+want {
			t.Errorf("X-Org %q: %q", org, got)
		}
	}
}
