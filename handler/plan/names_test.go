package plan

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
)

// responseIn returns the response that a request's path names.
func responseIn(r *http.Request) string {
	p := new(Plan)
	p.namePath(r, false)
	return p.Response
}

// FuzzResponseNamed has paths: an id is a part of its path, without a slash.
func FuzzResponseNamed(f *testing.F) {
	for _, path := range []string{"/v1/responses/resp_1", "/v1/responses/resp_1/cancel", "/responses/", "/v1/responses", "/x/responses/y", "/openai/v1/responses/%2F/responses/z"} {
		f.Add(path)
	}
	f.Fuzz(func(t *testing.T, path string) {
		r := httptest.NewRequest("GET", "/", nil)
		r.URL.Path = path
		if id := responseIn(r); id != "" && (strings.Contains(id, "/") || !strings.Contains(path, "responses/"+id)) {
			t.Fatalf("%q names %q", path, id)
		}
	})
}

func TestResponseNamed(t *testing.T) {
	for path, want := range map[string]string{
		"/v1/responses/resp_1": "resp_1", "/v1/responses/resp_1/input_items": "resp_1", "/openai/deployments/x/responses/r": "r", "/responses/r": "r",
		"/v1/responses": "", "/v1/responses/": "", "/v1/threads/responses/r": "", "/v1/chat/completions": "",
	} {
		if got := responseIn(httptest.NewRequest("GET", path, nil)); got != want {
			t.Errorf("%s names %q, want %q", path, got, want)
		}
	}
	if got := responseIn(httptest.NewRequest("PUT", "/v1/responses/r", nil)); got != "" {
		t.Errorf("PUT names %q", got)
	}
}

// TestLongNamesAreKeptAsDigests sends model, salt and other names as long as a body. The
// router stores short digests of them, which still differ.
func TestLongNamesAreKeptAsDigests(t *testing.T) {
	long := strings.Repeat("x", 1<<20)
	a, b, c := &api.Request{Model: long, Salt: long}, &api.Request{Model: long + "y", Salt: long + "y"}, &api.Request{Model: "m", Salt: "s"}
	for _, r := range []*api.Request{a, b, c} {
		detach(r)
	}
	if len(a.Model) > 100 || len(a.Salt) > 100 || a.Model == b.Model || a.Salt == b.Salt || c.Model != "m" || c.Salt != "s" {
		t.Errorf("%.100s, %.100s, %+v", a.Model, b.Model, c)
	}
}
