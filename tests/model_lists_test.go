package tests

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
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
	s := startCaddy(t, "kv_router "+strings.Join([]string{a.Addr(), b.Addr(), c.Addr(), freeAddr(t)}, " ")+" {\npolicy round_robin\n}")
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
	s := startCaddy(t, fmt.Sprintf(with, a.Addr(), a.Addr(), b.Addr(), b.Addr()))
	s.mustChat(t, askModel("base", 0))
	for key, e := range map[string]*fake{"Bearer sk-first": a, "": b} {
		eventually(t, "each worker to be asked", func() bool { return e.asked("/v1/models") > 0 })
		equal(t, e.heard("/v1/models").Get("Authorization"), key, "the key that a worker was asked with")
	}

	both := "kv_router %s %s {\nworker * {\napi_key sk-second\n}\n}"
	s.mustReload(t, fmt.Sprintf(both, a.Addr(), b.Addr()))
	s.mustChat(t, askModel("base", 1))
	s.mustReload(t, fmt.Sprintf(both, a.Addr(), a.Addr()))
	const chats = "/v1/chat/completions"
	for i, key := range []string{"", "Bearer sk-client"} { // a client's request never has the router's key
		s.post(t.Context(), chats, askModel("base", i).body(), "Authorization", key)
		equal(t, a.heard(chats).Get("Authorization"), key, "the key of a client's request")
	}
	left, gone := a.asked("/v1/models"), b.asked("/v1/models")
	eventually(t, "the worker that is left to be asked", func() bool { return a.asked("/v1/models") > left })
	equal(t, b.asked("/v1/models")-gone, 0, "questions to a worker that was removed, the last with the key %q", b.heard("/v1/models").Get("Authorization"))

	err := s.load("handle /a {\nkv_router a:1 {\nworker a:1 {\napi_key sk-first\n}\n}\n}\nhandle /b {\nkv_router a:1 {\nworker a:1 {\napi_key sk-second\n}\n}\n}")
	if err == nil || strings.Contains(err.Error(), "sk-") || !strings.Contains(err.Error(), "api_key") {
		t.Errorf("two keys for one worker: %v", err)
	}
}

// TestListsAreCompleted checks the list of models that clients get.
func TestListsAreCompleted(t *testing.T) {
	t.Run("FirstRequest", func(t *testing.T) {
		s := startCaddy(t, "kv_router "+startListing(t, lists("a")).Addr()+" "+startListing(t, lists("b")).Addr())
		if got := s.models(t); !slices.Equal(got, []string{"a", "b"}) {
			t.Errorf("the first list has %v", got)
		}
	})
	t.Run("Configured", func(t *testing.T) {
		a, b := startListing(t, lists("a")), startListing(t, lists("b", "x"))
		s := startCaddy(t, fmt.Sprintf("kv_router %s %s {\nworker %s {\nmodels a alias\n}\nworker %s {\nmodels a alias b\n}\n}", a.Addr(), b.Addr(), a.Addr(), b.Addr()))
		for range 8 {
			if got := s.models(t); !slices.Contains(got, "alias") || !slices.Contains(got, "b") {
				t.Errorf("the list has %v, without what is configured", got)
			}
		}
		before := s.scrape(t)
		if a := s.chat(t.Context(), askModel("x", 0)); a.status != http.StatusNotFound {
			t.Errorf("a model that is not configured: status %d", a.status)
		}
		equal(t, s.scrape(t).value(requestsTotal, `outcome="rejected"`)-before.value(requestsTotal, `outcome="rejected"`), 1, "rejected requests")
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
		s := startCaddy(t, fmt.Sprintf("kv_router %s %s {\nworker %s {\napi_key sk-x\n}\n}", a.Addr(), b.Addr(), b.Addr()))
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
		s := startCaddy(t, "kv_router "+startListing(t, zip).Addr()+" "+startListing(t, lists("b")).Addr())
		for range 6 {
			if a := s.sendBy(t, http.MethodGet, "/v1/models", "", "Accept-Encoding", "gzip, deflate"); !strings.Contains(string(a.body), `"a"`) || !strings.Contains(string(a.body), `"b"`) {
				t.Errorf("the list is %q", a.body)
			}
		}
	})
	t.Run("NoLists", func(t *testing.T) {
		for _, odd := range []string{`{"data":[{"id":"a"}`, `<html>"data":[]</html>`, `{"data":{"id":"a"}}`, `{"object":"list","data":[]}x`, `[]`} {
			a := startListing(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, odd) })
			s := startCaddy(t, fmt.Sprintf("kv_router {\nreverse_proxy %s\n}", a.Addr()))
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
	addr := startListing(t, func(http.ResponseWriter, *http.Request) { <-over }).Addr()
	t.Cleanup(func() { close(over) })
	other := startListing(t, lists("a")).Addr()
	for _, site := range []string{
		"kv_router " + addr,
		"kv_router " + addr + " " + other + " {\nworker * {\nmodels a\n}\n}",
	} {
		s := startCaddy(t, site)
		s.mustChat(t, askModel("a", 1))
	}
}

// TestOtherRequestsGoToEnginesWithTheirModel sends requests of unknown APIs that name
// their model.
func TestOtherRequestsGoToEnginesWithTheirModel(t *testing.T) {
	engines := []*modelEngine{startModelEngine(t, "a"), startModelEngine(t, "b:x"), startModelEngine(t, "c")}
	s := startCaddy(t, "kv_router "+engines[0].Addr()+" "+engines[1].Addr()+" "+engines[2].Addr())
	s.awaitModels(t)
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
	s := startCaddy(t, "kv_router "+one.Addr()+" "+two.Addr())
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

// mustPutOff checks that a request for a model is told to come back.
func mustPutOff(t *testing.T, s *server, path string, body string) {
	t.Helper()
	a := s.post(t.Context(), path, []byte(body))
	if a.status != http.StatusServiceUnavailable || a.header.Get("Retry-After") == "" || gjson.GetBytes(a.body, "error.code").Str != "no_worker" {
		t.Errorf("%s: status %d, Retry-After %q, body %s", path, a.status, a.header.Get("Retry-After"), a.body)
	}
}

// TestModelOfAWorkerThatWasNotSeen asks for a model that only a worker could have whose list is
// unknown: it is away, or it loads.
func TestModelOfAWorkerThatWasNotSeen(t *testing.T) {
	chat := `{"model":"qwen-b","messages":[{"role":"user","content":"hi"}]}`
	for name, loads := range map[string]bool{"away": false, "loading": true} {
		t.Run(name, func(t *testing.T) {
			known := startModelEngine(t, "qwen-a")
			b := startFake(t, func(w http.ResponseWriter, _ *http.Request) bool {
				http.Error(w, `{"error":{"message":"Loading model"}}`, http.StatusServiceUnavailable)
				return true
			})
			if !loads {
				b.stop()
			}
			s := startCaddy(t, "kv_router "+known.Addr()+" "+b.Addr())
			for range 6 {
				mustPutOff(t, s, "/v1/chat/completions", chat)
			}
			mustPutOff(t, s, "/v1/embeddings", `{"model":"qwen-b","input":"hi"}`)
			mustPutOff(t, s, "/v1/chat/completions", strings.Replace(chat, "qwen-b", "qwen-a:adapter", 1))
			s.mustChat(t, askModel("qwen-a", 0))
			if s.logged(t, "requests name an unknown model, and the models of a worker are unknown") != 1 {
				t.Error("no condition says so")
			}
			if n := s.logged(t, `"upstream":"`+known.Addr()+`","why"`); n > 0 {
				t.Errorf("the worker that lacks the model is marked down %d times", n)
			}
		})
	}
}

// TestModelThatNoWorkerHas has every worker list its models, or answer that it lacks this one. The
// client gets the engine's 404, also while one of them is away.
func TestModelThatNoWorkerHas(t *testing.T) {
	a, b := startModelEngine(t, "qwen-a"), startModelEngine(t, "qwen-b")
	unlisted := startFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method == http.MethodPost {
			http.Error(w, `{"error":{"message":"The model does not exist"}}`, http.StatusNotFound)
		}
		return r.Method == http.MethodPost
	})
	s := startCaddy(t, "kv_router "+strings.Join([]string{a.Addr(), b.Addr(), unlisted.Addr()}, " "))
	wrong := func() {
		t.Helper()
		for i := range 4 {
			if a := s.chat(t.Context(), askModel("qwen-c", i)); a.status != http.StatusNotFound {
				t.Errorf("status %d, body %s", a.status, a.body)
			}
		}
	}
	wrong()
	b.stop()
	eventually(t, "the mark", func() bool { return s.logged(t, "worker is marked down") > 0 })
	wrong()
	if a := s.chat(t.Context(), askModel("qwen-b", 0)); a.status != http.StatusServiceUnavailable {
		t.Errorf("the model of a worker that is down: status %d, body %s", a.status, a.body)
	}
}

// TestRestartKeepsTheListsOfModels restarts Caddy while one of two workers is away. The router still
// knows which models that has.
func TestRestartKeepsTheListsOfModels(t *testing.T) {
	a, b := startModelEngine(t, "qwen-a"), startModelEngine(t, "qwen-b", "qwen-b-adapter")
	site, c := "kv_router "+a.Addr()+" "+b.Addr(), newChild(t)
	c.start(t, site)
	c.mustChat(t, askModel("qwen-a", 0)) // begins to ask for the lists
	awaitLists := func() {
		t.Helper()
		eventually(t, "the journal to have the lists", func() bool {
			written, err := os.ReadFile(filepath.Join(c.dir, "caddy", "kv_router", "default.journal"))
			return err == nil && bytes.Contains(written, []byte("qwen-b-adapter"))
		})
	}
	awaitLists()
	b.stop()
	for i, how := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM, syscall.SIGKILL} {
		awaitLists()
		c.end(how)
		restored := c.logged(t, "the journal is restored")
		c.start(t, site)
		eventually(t, "the journal to be restored", func() bool { return c.logged(t, "the journal is restored") > restored })
		for _, model := range []string{"qwen-b", "qwen-b-adapter"} {
			mustPutOff(t, c.server, "/v1/chat/completions", string(askModel(model, i).body()))
		}
		if got := c.models(t); !slices.Equal(got, []string{"qwen-a", "qwen-b", "qwen-b-adapter"}) {
			t.Errorf("run %d: clients see the models %v", i, got)
		}
		if a := c.chat(t.Context(), askModel("qwen-c", i)); a.status != http.StatusNotFound {
			t.Errorf("run %d: a model that nobody has: status %d, body %s", i, a.status, a.body)
		}
	}
	if _, wrong := a.counts(); slices.Contains(wrong, "qwen-b") {
		t.Error("a worker was asked for a model that it lacks")
	}
}

// TestModelRefusedWith400 has an engine say that it lacks a model as llama.cpp's router does.
func TestModelRefusedWith400(t *testing.T) {
	a := startFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		if r.URL.Path == "/v1/models" {
			lists("qwen-a")(w, r)
			return true
		}
		if r.Method == http.MethodPost {
			http.Error(w, `{"error":{"code":400,"message":"model 'qwen-b' not found","type":"invalid_request_error"}}`, http.StatusBadRequest)
		}
		return r.Method == http.MethodPost
	})
	b := startFake(t, nil)
	s := startCaddy(t, "kv_router "+a.Addr()+" "+b.Addr()+" {\npolicy round_robin\n}")
	for i := range 8 {
		s.mustChat(t, askModel("qwen-b", i))
	}
	if a.asked("/v1/chat/completions") == 0 {
		t.Error("the engine that lacks the model was not asked")
	}
	b.stop()
	mustPutOff(t, s, "/v1/chat/completions", string(askModel("qwen-b", 0).body()))
}
