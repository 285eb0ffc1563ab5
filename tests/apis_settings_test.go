package tests

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

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
