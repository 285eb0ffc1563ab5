package tests

import (
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// TestTenantsOfTwoNames has a gateway that adds the tenant to the client's own.
func TestTenantsOfTwoNames(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, "request_header +X-Tenant-Id mine\n"+route(engines, "worker "+engines[0].Addr()+" {\nengine vllm\n}", "trust tenants"))
	s.mustChat(t, ask("hello"), "X-Tenant-Id", "victim")
	got := lastOf(engines[0])
	if values := got.Header["X-Tenant-Id"]; len(values) != 1 || values[0] == "victim" || values[0] == "mine" {
		t.Errorf("the engine got the tenants %q", values)
	}
	if !strings.Contains(string(got.Body), `"cache_salt":"victim, mine"`) {
		t.Errorf("the engine got %s", got.Body)
	}
	s.mustChat(t, ask("hello"), "X-Tenant-Id", "mine")
	if got := lastOf(engines[0]); !strings.Contains(string(got.Body), `"cache_salt":"mine"`) {
		t.Errorf("the engine got %s", got.Body)
	}
}
