package tests

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// TestBadAPISettingsAreRefused has what is well-formed and yet cannot be.
func TestBadAPISettingsAreRefused(t *testing.T) {
	s := startCaddy(t, "respond 204")
	for _, v := range []struct{ name, site, want string }{
		{"UsageOfOddKind", "kv_router a:1 {\ninject_usage always\n}", "always"},
		{"KeyFromAnyMember", "kv_router a:1 {\naffinity {\nkey body:user\n}\n}", "body:user"},
		{"KeyFromNoMember", "kv_router a:1 {\naffinity {\nkey body:\n}\n}", "body:"},
		{"OneWorkerTwoModels", "handle /a {\nkv_router a:1 {\nworker a:1 {\nmodels x\n}\n}\n}\nhandle /b {\nkv_router a:1 {\nworker a:1 {\nmodels y\n}\n}\n}", "models"},
		{"OneWorkerTwoKeys", "handle /a {\nkv_router a:1 {\nworker a:1 {\napi_key x\n}\n}\n}\nhandle /b {\nkv_router a:1 {\nworker a:1 {\napi_key y\n}\n}\n}", "api_key"},
	} {
		t.Run(v.name, func(t *testing.T) {
			err := s.load(v.site)
			if err == nil {
				if err := s.reload("respond 204"); err != nil {
					t.Error(err)
				}
				t.Fatal("accepted")
			}
			if !strings.Contains(err.Error(), v.want) {
				t.Errorf("got the error %q, want %q in it", err, v.want)
			}
		})
	}
}

// TestSessionKeysOfBodies has turns of sessions that share no text, with the
// members that clients of each API send.
func TestSessionKeysOfBodies(t *testing.T) {
	engines := startEngines(t, 4, canned.Pace{})
	s := startCaddy(t, route(engines, "affinity {\nmode hard\nkey body:prompt_cache_key body:session_id body:metadata.user_id\n}", "response_headers X-KV-"))
	for _, v := range []struct{ name, member string }{
		{"Chat", `"prompt_cache_key":"%s"`},
		{"Responses", `"prompt_cache_key":"%s"`},
		{"Messages", `"metadata":{"user_id":"user_x_account_y_session_%s"}`},
		{"Completions", `"session_id":"%s"`},
	} {
		d := dialectOf(v.name)
		for session := range 8 {
			home := ""
			for turn := range 4 {
				history := []message{{"user", fmt.Sprintf("%s, session %d, turn %d", v.name, session, turn)}}
				key := fmt.Sprintf(v.member, fmt.Sprintf("%s-%d", v.name, session))
				body := "{" + key + "," + string(mustJSON(d.body(history, turn%2 == 1))[1:])
				a := s.post(t.Context(), d.path, []byte(body))
				switch {
				case a.status != http.StatusOK || a.err != nil:
					t.Fatalf("%s: status %d, error %v: %s", v.name, a.status, a.err, a.body)
				case turn == 0:
					home = a.engine()
				case a.engine() != home || a.header.Get("X-KV-Reason") != "session":
					t.Errorf("%s: turn %d went to %s by %s, the first one to %s", v.name, turn+1, a.engine(), a.header.Get("X-KV-Reason"), home)
				}
			}
		}
	}
	s.booksAtZero(t)
}

// TestAPIKeyIsForOurOwnRequestsOnly has an engine that lists its models only for
// its key. It notes which requests have the key.
func TestAPIKeyIsForOurOwnRequestsOnly(t *testing.T) {
	t.Setenv("KVROUTER_TEST_KEY", "sk-engine")
	var known, leaked atomic.Int64
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		key := r.Header.Get("Authorization")
		switch {
		case r.URL.Path != "/v1/models" && r.Method == http.MethodGet: // the router asks what it is
			w.WriteHeader(http.StatusNotFound)
			return
		case r.URL.Path != "/v1/models" && key == "Bearer sk-engine":
			leaked.Add(1)
		case r.URL.Path != "/v1/models" && key != "Bearer sk-client":
			w.WriteHeader(http.StatusUnauthorized)
		case key == "Bearer sk-engine":
			known.Add(1)
			fmt.Fprint(w, `{"object":"list","data":[{"id":"canned","object":"model"}]}`)
			return
		case r.URL.Path == "/v1/models":
			w.WriteHeader(http.StatusUnauthorized)
		}
		fmt.Fprint(w, `{}`)
	}))
	defer engine.Close()
	s := startCaddy(t, "kv_router "+strings.TrimPrefix(engine.URL, "http://")+" {\nworker * {\napi_key {env.KVROUTER_TEST_KEY}\n}\n}")
	for _, v := range []struct {
		key    string
		status int
	}{{"Bearer sk-client", http.StatusOK}, {"", http.StatusUnauthorized}} {
		header := []string{"Authorization", v.key}
		if v.key == "" {
			header = nil
		}
		if a := s.post(t.Context(), "/v1/responses", []byte(`{"model":"canned","input":"hi"}`), header...); a.status != v.status {
			t.Errorf("with the key %q: status %d, want %d", v.key, a.status, v.status)
		}
	}
	eventually(t, 5*time.Second, "the router to ask for the models", func() bool { return known.Load() > 0 })
	if leaked.Load() > 0 {
		t.Error("a client's request came with the router's key")
	}
	s.booksAtZero(t)
}
