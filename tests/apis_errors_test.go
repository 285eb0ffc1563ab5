package tests

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/tidwall/gjson"
)

// refusals are the router's own errors and their causes.
var refusals = []struct {
	code   string
	status int
	openAI string // the type that OpenAI's clients know
	claude string // and Anthropic's
	site   func(engines []*canned.Engine) string
	fault  canned.Fault
	killed bool
	nvext  string // added to the body
	// Caddy's request_body refuses by the Content-Length, if there is one, and
	// says so in its own way.
	chunked bool
}{
	{
		code: "no_worker", status: 503, openAI: "server_error", claude: "overloaded_error", killed: true,
		site: func(e []*canned.Engine) string { return route(e) },
	},
	{
		code: "invalid_nvext", status: 400, openAI: "invalid_request_error", claude: "invalid_request_error", nvext: `"nvext":5,`,
		site: func(e []*canned.Engine) string { return route(e) },
	},
	{
		code: "invalid_session_key", status: 400, openAI: "invalid_request_error", claude: "invalid_request_error",
		nvext: `"prompt_cache_key":"` + strings.Repeat("k", 1025) + `",`,
		site:  func(e []*canned.Engine) string { return route(e) },
	},
	{
		code: "model_not_found", status: 404, openAI: "invalid_request_error", claude: "not_found_error",
		site: func(e []*canned.Engine) string { return route(e, "worker * {\nmodels other\n}") },
	},
	{
		code: "body_too_large", status: 413, openAI: "invalid_request_error", claude: "request_too_large", chunked: true,
		site: func(e []*canned.Engine) string { return "request_body {\nmax_size 10\n}\n" + route(e) },
	},
	{
		code: "worker_failed", status: 502, openAI: "server_error", claude: "api_error",
		fault: canned.Fault{Kind: canned.CloseAfterRead},
		site:  func(e []*canned.Engine) string { return route(e) },
	},
	{
		code: "worker_timeout", status: 504, openAI: "server_error", claude: "timeout_error",
		fault: canned.Fault{Kind: canned.HangBeforeHeader},
		site: func(e []*canned.Engine) string {
			return "kv_router {\n" + strings.Replace(route(e), "kv_router", "reverse_proxy", 1) + " {\ntransport http {\nresponse_header_timeout 50ms\n}\n}\n}"
		},
	},
}

// TestOwnErrorsHaveTheAPIsShape causes each refusal in each API, in servers with and
// without error routes.
func TestOwnErrorsHaveTheAPIsShape(t *testing.T) {
	for _, v := range refusals {
		for _, routes := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/ErrorRoutes=%v", v.code, routes), func(t *testing.T) {
				engines := startEngines(t, 2, canned.Pace{})
				site := v.site(engines)
				if routes {
					site += "\nhandle_errors {\nrespond \"ours: {err.status_code}\"\n}"
				}
				for _, e := range engines {
					e.SetFault(v.fault)
					if v.killed {
						e.Kill()
					}
				}
				s := startCaddy(t, site)
				eachRequest(t, func(t *testing.T, d dialect, _ bool, body []byte) {
					if v.code == "model_not_found" && d.name == "Generate" {
						return // its requests name no model
					}
					var sent io.Reader = strings.NewReader("{" + v.nvext + string(body[1:]))
					if v.chunked {
						sent = io.MultiReader(sent) // hides its length
					}
					req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.url+d.path, sent)
					if err != nil {
						t.Fatal(err)
					}
					a := s.do(req)
					if a.status != v.status || a.err != nil {
						t.Fatalf("status %d, error %v, want %d; body %s", a.status, a.err, v.status, a.body)
					}
					if wait := a.header.Get("Retry-After"); (wait != "") != (v.status == http.StatusServiceUnavailable) {
						t.Errorf("Retry-After %q", wait)
					}
					if routes {
						if want := fmt.Sprintf("ours: %d", v.status); string(a.body) != want {
							t.Errorf("body %q, want that of the error route, %q", a.body, want)
						}
						return
					}
					kind, outer := v.openAI, ""
					if strings.HasPrefix(d.path, "/v1/messages") {
						kind, outer = v.claude, "error"
					}
					fault := gjson.GetBytes(a.body, "error")
					if fault.Get("code").Str != v.code || fault.Get("type").Str != kind || fault.Get("message").Str == "" || gjson.GetBytes(a.body, "type").Str != outer {
						t.Errorf("body %s, want the code %s and the type %s", a.body, v.code, kind)
					}
					if got := a.header.Get("Content-Type"); got != "application/json" {
						t.Errorf("Content-Type %q", got)
					}
				})
				s.booksAtZero(t)
			})
		}
	}
}
