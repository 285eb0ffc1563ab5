package tests

import (
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"
)

// lists answers with a list of models.
func lists(models ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		var entries []string
		for _, m := range models {
			entries = append(entries, fmt.Sprintf(`{"id":%q,"object":"model"}`, m))
		}
		fmt.Fprintf(w, `{"object":"list","data":[%s]}`, strings.Join(entries, ","))
	}
}

// startListing starts an engine that serves any model, whatever its list says.
func startListing(t *testing.T, list http.HandlerFunc) *fake {
	t.Helper()
	return startFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		if r.URL.Path == "/v1/models" {
			list(w, r)
		}
		return r.URL.Path == "/v1/models"
	})
}

// models returns the names in the list that clients get.
func (s *server) models(t *testing.T) (ids []string) {
	t.Helper()
	status, list, err := s.get(t.Context(), s.url+"/v1/models")
	if status != http.StatusOK || err != nil || !gjson.Valid(list) {
		t.Fatalf("GET /v1/models: status %d, error %v, body %s", status, err, list)
	}
	for _, id := range gjson.Get(list, "data.#.id").Array() {
		ids = append(ids, id.Str)
	}
	slices.Sort(ids)
	return ids
}

// TestModelsThatNobodyListsGoAnywhere has engines that accept any model name, an address
// without an engine, and an engine without a list of models.
func TestModelsThatNobodyListsGoAnywhere(t *testing.T) {
	a, b := startListing(t, lists("base")), startListing(t, lists("base"))
	c := startListing(t, func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", http.StatusUnauthorized) })
	s := startCaddy(t, "kv_router "+strings.Join([]string{a.addr(), b.addr(), c.addr(), freeAddr(t)}, " "))
	for i := range 30 {
		s.mustChat(t, askModel("alias", i))
	}
	for i, e := range []*fake{a, b, c} {
		if e.asked("/v1/chat/completions") == 0 {
			t.Errorf("engine %d served none of 30 requests", i)
		}
	}
	eventually(t, "a warning that an engine needs a key", func() bool { return s.logged(t, "the worker does not list its models") == 1 })
}

// TestKeysGoToTheirOwnWorkersOnly has two handlers of one pool, one of them with a key. A
// reload removes a worker.
func TestKeysGoToTheirOwnWorkersOnly(t *testing.T) {
	a, b := startListing(t, lists("base")), startListing(t, lists("base"))
	t.Setenv("KVROUTER_TEST_KEY", "sk-first")
	with := "handle /a/* {\nkv_router %s {\nworker %s {\napi_key {env.KVROUTER_TEST_KEY}\n}\n}\n}\nhandle /v1/* {\nkv_router %s %s\n}"
	s := startCaddy(t, fmt.Sprintf(with, a.addr(), a.addr(), b.addr(), b.addr()))
	s.mustChat(t, askModel("base", 0))
	for key, e := range map[string]*fake{"Bearer sk-first": a, "": b} {
		eventually(t, "each worker to be asked", func() bool { return e.asked("/v1/models") > 0 })
		if got := e.heard("/v1/models").Get("Authorization"); got != key {
			t.Errorf("a worker whose key is %q was asked with %q", key, got)
		}
	}

	both := "kv_router %s %s {\nworker * {\napi_key sk-second\n}\n}"
	s.mustReload(t, fmt.Sprintf(both, a.addr(), b.addr()))
	s.mustChat(t, askModel("base", 1))
	s.mustReload(t, fmt.Sprintf(both, a.addr(), a.addr()))
	const chats = "/v1/chat/completions"
	for i, key := range []string{"", "Bearer sk-client"} { // a client's request never has the router's key
		s.post(t.Context(), chats, askModel("base", i).body(), "Authorization", key)
		if got := a.heard(chats).Get("Authorization"); got != key {
			t.Errorf("a client's request with the key %q came with %q", key, got)
		}
	}
	left, gone := a.asked("/v1/models"), b.asked("/v1/models")
	eventually(t, "the worker that is left to be asked", func() bool { return a.asked("/v1/models") > left })
	if n := b.asked("/v1/models") - gone; n != 0 {
		t.Errorf("a worker that was removed is asked %d times, with the key %q", n, b.heard("/v1/models").Get("Authorization"))
	}

	err := s.load("handle /a {\nkv_router a:1 {\nworker a:1 {\napi_key sk-first\n}\n}\n}\nhandle /b {\nkv_router a:1 {\nworker a:1 {\napi_key sk-second\n}\n}\n}")
	if err == nil || strings.Contains(err.Error(), "sk-") || !strings.Contains(err.Error(), "api_key") {
		t.Errorf("two keys for one worker: %v", err)
	}
}

// TestListsAreCompleted checks the list of models that clients get.
func TestListsAreCompleted(t *testing.T) {
	t.Run("FirstRequest", func(t *testing.T) {
		s := startCaddy(t, "kv_router "+startListing(t, lists("a")).addr()+" "+startListing(t, lists("b")).addr())
		if got := s.models(t); !slices.Equal(got, []string{"a", "b"}) {
			t.Errorf("the first list has %v", got)
		}
	})
	t.Run("Configured", func(t *testing.T) {
		a, b := startListing(t, lists("a")), startListing(t, lists("b", "x"))
		s := startCaddy(t, fmt.Sprintf("kv_router %s %s {\nworker %s {\nmodels a alias\n}\nworker %s {\nmodels a alias b\n}\n}", a.addr(), b.addr(), a.addr(), b.addr()))
		for range 8 {
			if got := s.models(t); !slices.Contains(got, "alias") || !slices.Contains(got, "b") {
				t.Errorf("the list has %v, without what is configured", got)
			}
		}
		before := s.scrape(t)
		if a := s.chat(t.Context(), askModel("x", 0)); a.status != http.StatusNotFound {
			t.Errorf("a model that is not configured: status %d", a.status)
		}
		if n := s.scrape(t).value(requestsTotal, `outcome="rejected"`) - before.value(requestsTotal, `outcome="rejected"`); n != 1 {
			t.Errorf("%v requests were rejected, want 1", n)
		}
	})
	t.Run("Keys", func(t *testing.T) {
		a := startListing(t, lists("public"))
		b := startListing(t, func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") != "Bearer sk-x" {
				http.Error(w, "no", http.StatusUnauthorized)
				return
			}
			lists("secret")(w, r)
		})
		s := startCaddy(t, fmt.Sprintf("kv_router %s %s {\nworker %s {\napi_key sk-x\n}\n}", a.addr(), b.addr(), b.addr()))
		s.mustChat(t, askModel("public", 0))
		for range 8 {
			if status, list, _ := s.get(t.Context(), s.url+"/v1/models"); status == http.StatusOK && strings.Contains(list, "secret") {
				t.Fatalf("a client without a key sees %s", list)
			}
		}
	})
	t.Run("Compressed", func(t *testing.T) {
		zip := func(w http.ResponseWriter, r *http.Request) {
			if !strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
				lists("a")(w, r)
				return
			}
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(w)
			_, _ = io.WriteString(z, `{"data":[{"id":"a"}]}`)
			_ = z.Close()
		}
		s := startCaddy(t, "kv_router "+startListing(t, zip).addr()+" "+startListing(t, lists("b")).addr())
		for range 6 {
			req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, s.url+"/v1/models", nil)
			req.Header.Set("Accept-Encoding", "gzip, deflate")
			if a := s.do(req); !strings.Contains(string(a.body), `"a"`) || !strings.Contains(string(a.body), `"b"`) {
				t.Errorf("the list is %q", a.body)
			}
		}
	})
	t.Run("NoLists", func(t *testing.T) {
		for _, odd := range []string{`{"data":[{"id":"a"}`, `<html>"data":[]</html>`, `{"data":{"id":"a"}}`, `{"object":"list","data":[]}x`, `[]`} {
			a := startListing(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, odd) })
			s := startCaddy(t, fmt.Sprintf("kv_router {\nreverse_proxy %s\n}", a.addr()))
			if _, got, _ := s.get(t.Context(), s.url+"/v1/models"); got != odd {
				t.Errorf("%q became %q", odd, got)
			}
		}
	})
}

// TestHangingListsDelayLittle has engines that never answer the request for their models.
// The first request waits for the first probes, but not for their answers.
func TestHangingListsDelayLittle(t *testing.T) {
	over := make(chan struct{})
	addr := startListing(t, func(http.ResponseWriter, *http.Request) { <-over }).addr()
	t.Cleanup(func() { close(over) })
	other := startListing(t, lists("a")).addr()
	for _, site := range []string{
		"kv_router " + addr,
		"kv_router " + addr + " " + other + " {\nworker * {\nmodels a\n}\n}",
	} {
		s := startCaddy(t, site)
		s.mustChat(t, askModel("a", 1))
	}
}

// TestSessionsOfSeveralModels has a session whose turns alternate between two models. Two
// workers serve one of them, and a third worker serves the other.
func TestSessionsOfSeveralModels(t *testing.T) {
	engines := []*modelEngine{startModelEngine(t, "a"), startModelEngine(t, "a"), startModelEngine(t, "b"), startModelEngine(t, "b")}
	site := "kv_router"
	for _, e := range engines {
		site += " " + e.addr()
	}
	s := startCaddy(t, site+" {\nresponse_headers X-KV-\n"+affinity("hard")+"\n}")
	homes := map[string]string{}
	for i := range 12 {
		model := []string{"a", "b"}[i%2]
		a := s.mustChat(t, askModel(model, i), "X-Session-Id", "s1")
		worker, reason := a.header.Get("X-KV-Worker"), a.header.Get("X-KV-Reason")
		if home, ok := homes[model]; ok && (worker != home || reason != "session") {
			t.Errorf("turn %d, model %s: worker %s by %s, want %s by session", i, model, worker, reason, home)
		}
		homes[model] = worker
	}
}

// TestOtherRequestsGoToEnginesWithTheirModel sends requests of unknown APIs that name
// their model.
func TestOtherRequestsGoToEnginesWithTheirModel(t *testing.T) {
	engines := []*modelEngine{startModelEngine(t, "a"), startModelEngine(t, "b:x"), startModelEngine(t, "c")}
	s := startCaddy(t, "kv_router "+engines[0].addr()+" "+engines[1].addr()+" "+engines[2].addr())
	for i := range 30 {
		model := []string{"a", "b:x", "c", "c:adapter"}[i%4]
		body := fmt.Sprintf(`{"prompt":%q,"model":%q}`, strings.Repeat("x", i*100), model)
		if a := s.post(t.Context(), "/tokenize", []byte(body)); a.status != http.StatusOK && model != "c:adapter" {
			t.Errorf("model %s: status %d, body %s", model, a.status, a.body)
		}
	}
	for i, e := range engines {
		if _, wrong := e.counts(); i < 2 && len(wrong) > 0 {
			t.Errorf("engine %d was asked for %v", i, wrong)
		}
	}
}

// TestChangedModelsAreServedElsewhere swaps the models of two engines under load. Requests
// follow their model.
func TestChangedModelsAreServedElsewhere(t *testing.T) {
	one, two := startModelEngine(t, "a", "b"), startModelEngine(t, "a")
	s := startCaddy(t, "kv_router "+one.addr()+" "+two.addr())
	s.mustChat(t, askModel("a", 0))
	one.set("b")
	eventually(t, "the engine to be asked for its list", func() bool {
		time.Sleep(25 * time.Millisecond) // the budget for retries is not to be spent
		_, before := one.counts()
		for i := range 6 {
			s.mustChat(t, askModel("a", i))
		}
		_, after := one.counts()
		return len(after) == len(before)
	})
	// what nobody serves is not asked of all
	before, _ := two.counts()
	if a := s.chat(t.Context(), askModel("nobody's", 0)); a.status != http.StatusNotFound {
		t.Errorf("a model that nobody serves: status %d", a.status)
	}
	_, wrongOne := one.counts()
	_, wrongTwo := two.counts()
	if n := slices.Index(wrongOne, "nobody's") + slices.Index(wrongTwo, "nobody's"); n < -1 || len(wrongTwo) > 1 {
		t.Errorf("asked for it: %v, %v; served %d before", wrongOne, wrongTwo, before)
	}
}
