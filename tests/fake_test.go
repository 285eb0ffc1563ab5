package tests

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// fake is a server whose answers for some paths a test sets. It answers POST requests with
// one plain answer, and all else with 404.
type fake struct {
	answers func(w http.ResponseWriter, r *http.Request) bool // whether it did
	srv     *httptest.Server

	mu   sync.Mutex
	hits map[string]int // by path
	last map[string]http.Header
}

// startFake starts a server. With nil it answers POST requests only.
func startFake(t testing.TB, answers func(w http.ResponseWriter, r *http.Request) bool) *fake {
	t.Helper()
	f := &fake{answers: answers, hits: make(map[string]int), last: make(map[string]http.Header)}
	ln, err := canned.Listen()
	if err != nil {
		t.Fatal(err)
	}
	f.listen(ln)
	t.Cleanup(func() { f.stop() })
	return f
}

func (f *fake) listen(ln net.Listener) {
	f.srv = &httptest.Server{Listener: ln, Config: &http.Server{Handler: http.HandlerFunc(f.serve)}}
	f.srv.Start()
}

// stop closes the listener.
func (f *fake) stop() {
	f.srv.CloseClientConnections()
	f.srv.Close()
}

// again listens at the same address.
func (f *fake) again(t testing.TB) {
	t.Helper()
	ln, err := new(net.ListenConfig).Listen(t.Context(), "tcp", f.addr())
	if err != nil {
		t.Fatal(err)
	}
	f.listen(ln)
}

func (f *fake) serve(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	f.hits[r.URL.Path]++
	f.last[r.URL.Path] = r.Header.Clone()
	f.mu.Unlock()
	switch {
	case f.answers != nil && f.answers(w, r):
	case r.Method == http.MethodPost:
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, fakeChat(""))
	default:
		http.NotFound(w, r)
	}
}

// fakeChat is an answer with 2000 prompt tokens and additions to its usage.
func fakeChat(usage string) string {
	return `{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}],` +
		`"usage":{"prompt_tokens":2000,"completion_tokens":1` + usage + `}}`
}

func (f *fake) addr() string { return f.srv.Listener.Addr().String() }

// asked returns how often a path was asked for.
func (f *fake) asked(path string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.hits[path]
}

// header returns the header of the last request for a path.
func (f *fake) header(path string) http.Header {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.last[path]
}

// fakeModels is a list of one model.
func fakeModels(owner string) string {
	return `{"object":"list","data":[{"id":"sim-8b","object":"model","created":1,"owned_by":"` + owner + `"}]}`
}

// fakeVLLM answers a vLLM's probes. metrics are its metrics beside its process's start
// time.
func fakeVLLM(version string, metrics func() string) func(w http.ResponseWriter, r *http.Request) bool {
	return func(w http.ResponseWriter, r *http.Request) bool {
		switch r.URL.Path {
		case "/v1/models":
			fmt.Fprint(w, fakeModels("vllm"))
		case "/version":
			fmt.Fprintf(w, `{"version":%q}`, version)
		case "/metrics":
			fmt.Fprint(w, "# HELP vllm:x y\n", metrics())
		default:
			return false
		}
		return true
	}
}

// fakeSGLang answers an SGLang's probes.
func fakeSGLang(info string) func(w http.ResponseWriter, r *http.Request) bool {
	return func(w http.ResponseWriter, r *http.Request) bool {
		switch r.URL.Path {
		case "/v1/models":
			fmt.Fprint(w, fakeModels("sglang"))
		case "/server_info":
			fmt.Fprint(w, `{"max_total_num_tokens":1000000,"random_seed":1,"internal_states":[{}],`+info+`}`)
		default:
			return false
		}
		return true
	}
}

// fakeWorker is what the tests with fakes read of a worker.
type fakeWorker struct {
	Drained bool `json:"drained"`
	Engine  struct {
		Type           string   `json:"type"`
		Version        string   `json:"version"`
		Contradictions []string `json:"contradictions"`
	} `json:"engine"`
	Cache struct {
		Capacity int64 `json:"capacity_tokens"`
		Cached   int64 `json:"cached_tokens"`
	} `json:"cache"`
	Models struct {
		Told []string `json:"listed"`
	} `json:"models"`
	Health struct {
		Refusing bool `json:"refuses_connections"`
		LetBack  *int `json:"let_back_requests"`
	} `json:"health"`
	Ranks []struct {
		Rank int `json:"dp_rank"`
	} `json:"dp_ranks"`
}

func (s *server) fakeWorker(t testing.TB, dial string) (w fakeWorker) {
	t.Helper()
	s.api(t, http.MethodGet, defaultPool+"/workers/"+dial, nil, &w)
	return w
}

// someWords returns a text of the given number of words.
func someWords(n int) string { return strings.Repeat("some words ", n/2) }
