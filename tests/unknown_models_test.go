package tests

import (
	"bytes"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/tidwall/gjson"
)

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
			s := startCaddy(t, "kv_router "+known.addr()+" "+b.addr())
			for range 6 {
				mustPutOff(t, s, "/v1/chat/completions", chat)
			}
			mustPutOff(t, s, "/v1/embeddings", `{"model":"qwen-b","input":"hi"}`)
			mustPutOff(t, s, "/v1/chat/completions", strings.Replace(chat, "qwen-b", "qwen-a:adapter", 1))
			s.mustChat(t, askModel("qwen-a", 0))
			if s.logged(t, "requests name an unknown model, and the models of a worker are unknown") != 1 {
				t.Error("no condition says so")
			}
			if n := s.logged(t, `"upstream":"`+known.addr()+`","why"`); n > 0 {
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
	s := startCaddy(t, "kv_router "+strings.Join([]string{a.addr(), b.addr(), unlisted.addr()}, " "))
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
	site, c := "kv_router "+a.addr()+" "+b.addr(), newChild(t)
	c.start(t, site)
	c.mustChat(t, askModel("qwen-b", 0))
	b.stop()
	for i, how := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM, syscall.SIGKILL} {
		eventually(t, "the journal to have the lists", func() bool {
			written, err := os.ReadFile(filepath.Join(c.dir, "caddy", "kv_router", "default.journal"))
			return err == nil && bytes.Contains(written, []byte("qwen-b-adapter"))
		})
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
	s := startCaddy(t, "kv_router "+a.addr()+" "+b.addr())
	for i := range 8 {
		s.mustChat(t, askModel("qwen-b", i))
	}
	if a.asked("/v1/chat/completions") == 0 {
		t.Error("the engine that lacks the model was not asked")
	}
	b.stop()
	mustPutOff(t, s, "/v1/chat/completions", string(askModel("qwen-b", 0).body()))
}
