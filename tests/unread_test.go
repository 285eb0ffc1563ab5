package tests

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// TestTrustDoesNotEndWhereBodiesAreNotRead has a tenant that would have a body
// passed unread, in which it asks for what it is not trusted with.
func TestTrustDoesNotEndWhereBodiesAreNotRead(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	const wishes = `"cache_salt":"victim","nvext":{"metadata_upload":{"url":"http://169.254.169.254/"},"backend_instance_id":7,"agent_hints":{"strict_priority":9}}`
	body := `{"model":"m","messages":[{"role":"user","content":"hi"}],` + wishes + `}`
	deep := strings.Replace(body, `"model"`, `"x":`+strings.Repeat("[", 300)+strings.Repeat("]", 300)+`,"model"`, 1)
	long := strings.Replace(body, `"hi"`, `"`+strings.Repeat("long ", 2000)+`"`, 1)
	many := strings.Replace(body, `"model"`, strings.Repeat(`"a":1,`, 5000)+`"model"`, 1)
	for _, kind := range []string{"dynamo", "vllm"} {
		s := startCaddy(t, route(engines, fmt.Sprintf("worker %s {\nengine %s\n}", engines[0].Addr(), kind), "max_body 8KiB", trust("tenants")))
		for _, v := range []struct {
			name, body, coding string
			status             int
		}{
			{"plain", body, "", 200},
			{"said to be gzip", body, "gzip", 200},
			{"said to be something", body, "foo", 200},
			{"with a byte order mark", "\xef\xbb\xbf" + body, "", 400},
			{"nested deeply", deep, "", 400},
			{"too long", long, "", 413},
			{"of many members", many[:8000], "", 400},
		} {
			header := append([]string{"X-Tenant-Id", "mine", "Connection", "close, X-Tenant-Id"}, trusted...)
			if v.coding != "" {
				header = append(header, "Content-Encoding", v.coding)
			}
			received := len(engines[0].Journal())
			a := s.post(t.Context(), "/v1/chat/completions", []byte(v.body), header...)
			if a.status != v.status {
				t.Errorf("%s, %s: status %d, want %d; body %.200s", kind, v.name, a.status, v.status, a.body)
			}
			if len(engines[0].Journal()) == received {
				continue
			}
			got := lastOf(engines[0])
			for _, wish := range []string{"169.254", "backend_instance_id", "strict_priority"} {
				if strings.Contains(string(got.Body), wish) {
					t.Errorf("%s, %s: the engine got %s", kind, v.name, got.Body)
				}
			}
			if kind == "vllm" && strings.Contains(string(got.Body), "victim") {
				t.Errorf("%s, %s: the engine got another tenant's salt: %s", kind, v.name, got.Body)
			}
			if kind == "dynamo" && got.Header.Get("X-Tenant-Id") != "mine" {
				t.Errorf("%s, %s: the engine got the tenant %q", kind, v.name, got.Header.Get("X-Tenant-Id"))
			}
		}
		s.booksAtZero(t)
	}
	// without a tenant the engine judges
	s := startCaddy(t, route(engines, "max_body 8KiB"))
	for _, b := range []string{deep, long} {
		if a := s.post(t.Context(), "/v1/chat/completions", []byte(b)); a.status != http.StatusOK {
			t.Errorf("status %d of %.40s", a.status, b)
		}
	}
}

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

// TestTokensInPlaceOfThePrompt has prompts that say one thing to the router and
// another to the engine.
func TestTokensInPlaceOfThePrompt(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines, "response_headers X-KV-", "pool tokendata"))
	text := strings.Repeat("a prompt that is long enough for blocks ", 50)
	body := func(nvext string) []byte { return []byte(fmt.Sprintf(`{"model":"m","prompt":%q%s}`, text, nvext)) }
	for range 3 {
		s.post(t.Context(), "/v1/completions", body(`,"nvext":{"token_data":[1,2,3]}`))
	}
	a := s.post(t.Context(), "/v1/completions", body(""))
	if got := a.header.Get("X-KV-Overlap-Blocks"); a.status != http.StatusOK || got != "0" {
		t.Errorf("status %d, %s blocks are thought to be there that were never computed", a.status, got)
	}
}

// TestWorkerIDsThatJSONRounds are refused.
func TestWorkerIDsThatJSONRounds(t *testing.T) {
	s := startCaddy(t, "respond 204")
	if err := s.load("kv_router a:1 {\nworker a:1 {\nid 9007199254740993\n}\n}"); err == nil || !strings.Contains(err.Error(), "id: must be at most 9007199254740991") {
		t.Errorf("got the error %v", err)
	}
}
