package tests

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/tidwall/gjson"
)

// modelEngine is an engine that serves some models and refuses others, and
// counts what it should not have been asked for.
type modelEngine struct {
	*fake
	mu     sync.Mutex
	models []string
	served int
	wrong  []string
}

func startModelEngine(t *testing.T, models ...string) *modelEngine {
	e := &modelEngine{models: models}
	e.fake = startFake(t, e.answer)
	return e
}

// set changes the models at run time.
func (e *modelEngine) set(models ...string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.models = models
}

func (e *modelEngine) counts() (served int, wrong []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.served, slices.Clone(e.wrong)
}

func (e *modelEngine) answer(w http.ResponseWriter, r *http.Request) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if r.URL.Path == "/v1/models" {
		lists(e.models...)(w, r)
		return true
	}
	if r.Method == http.MethodGet {
		return false // the router asks what it is
	}
	var body struct{ Model string }
	json.NewDecoder(r.Body).Decode(&body)
	if slices.Contains(e.models, body.Model) {
		e.served++
		return false
	}
	e.wrong = append(e.wrong, body.Model)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusNotFound)
	fmt.Fprintf(w, `{"error":{"message":"The model %s does not exist.","type":"NotFoundError","param":"model","code":404}}`, body.Model)
	return true
}

func askModel(model string, i int) chat {
	c := ask(fmt.Sprintf("question %d", i))
	c.Model = model
	return c
}

// TestRequestsGoToEnginesWithTheirModel has three models on four engines, two
// of them on one, and adds one at run time.
func TestRequestsGoToEnginesWithTheirModel(t *testing.T) {
	engines := []*modelEngine{
		startModelEngine(t, "a"), startModelEngine(t, "b"), startModelEngine(t, "b"), startModelEngine(t, "c", "a-lora"),
	}
	var addrs []string
	for _, e := range engines {
		addrs = append(addrs, e.Addr())
	}
	s := startCaddy(t, "kv_router "+strings.Join(addrs, " ")+" {\npolicy round_robin\n}")
	s.awaitModels(t)
	for i := range 60 { // an odd number of models, for each engine to have its turn
		s.mustChat(t, askModel([]string{"a", "b", "c", "a-lora", "b"}[i%5], i))
	}
	for i, e := range engines {
		served, wrong := e.counts()
		if len(wrong) > 0 || served == 0 {
			t.Errorf("engine %d served %d requests, and was asked for models that it has not: %v", i, served, wrong)
		}
	}

	// what nobody lists goes to an engine, which says so itself
	if a := s.chat(t.Context(), askModel("d", 0)); a.status != http.StatusNotFound || !strings.Contains(string(a.body), "does not exist") {
		t.Errorf("a model that nobody has: status %d, body %s", a.status, a.body)
	}

	engines[0].set("a", "d")
	for i := range 20 { // other engines answer 404, and the router tries the next
		s.mustChat(t, askModel("d", i+1))
	}
	want := []string{"a", "a-lora", "b", "c", "d"}
	eventually(t, fmt.Sprint("the list ", want), func() bool {
		_, list, err := s.get(t.Context(), s.url+"/v1/models")
		var ids []string
		for _, id := range gjson.Get(list, "data.#.id").Array() {
			ids = append(ids, id.Str)
		}
		slices.Sort(ids)
		return err == nil && slices.Equal(ids, want)
	})

	// a worker that is down is no error, and what only it serves is not moved
	engines[3].stop()
	if status, list, err := s.get(t.Context(), s.url+"/v1/models"); status != http.StatusOK || err != nil {
		t.Errorf("GET /v1/models with one worker down: status %d, error %v, body %s", status, err, list)
	}
	if a := s.chat(t.Context(), askModel("c", 1)); a.status != http.StatusServiceUnavailable {
		t.Errorf("a model whose only worker is down: status %d, want 503; body %s", a.status, a.body)
	}
	for i, e := range engines[1:3] {
		if _, wrong := e.counts(); slices.Contains(wrong, "c") {
			t.Errorf("engine %d was asked for c, which it has not", i+1)
		}
	}
}

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
	ln := listen(t)
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
	ln, err := canned.ListenAgain(f.Addr())
	noError(t, err)
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

func (f *fake) Addr() string { return f.srv.Listener.Addr().String() }

// asked returns how often a path was asked for.
func (f *fake) asked(path string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.hits[path]
}

// heard returns the header of the last request for a path.
func (f *fake) heard(path string) http.Header {
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

// someWords returns a text of the given number of words.
func someWords(n int) string { return strings.Repeat("some words ", n/2) }

// TestModelMatcher has two pools in one site, by the model that the body names.
func TestModelMatcher(t *testing.T) {
	a, b := startEngines(t, 1, canned.Pace{}), startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, "@a kv_router_model first*\n"+strings.Replace(route(a, "pool a"), "kv_router", "kv_router @a", 1)+"\n"+route(b))
	for model, want := range map[string]*canned.Engine{"first-8b": a[0], "second": b[0]} {
		before := want.Requests()
		c := ask("hello")
		c.Model = model
		s.mustChat(t, c)
		if n := want.Requests(); n != before+1 {
			t.Errorf("%s: %d requests", model, n-before)
		}
	}
}

// named starts an engine that serves one model under two names.
func named(t *testing.T, owner, first, second string) *fake {
	t.Helper()
	return startFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		switch r.URL.Path {
		case "/v1/models":
			const entry = `{"id":%q,"object":"model","owned_by":%q,"root":"Qwen/Qwen3-8B","parent":null}`
			fmt.Fprintf(w, `{"object":"list","data":[`+entry+","+entry+`,{"id":"ad","root":"Qwen/Qwen3-8B","parent":%q}]}`, first, owner, second, owner, first)
		case "/version":
			fmt.Fprint(w, `{"version":"0.31.0"}`)
		case "/metrics":
			fmt.Fprint(w, "# HELP vllm:x y\n")
		default:
			return false
		}
		return true
	})
}

// TestNamesOfOneModel has two vLLMs serve one model under two names. Prompts and sessions of both names
// are one. The names of an adapter, or of an engine that loads models on demand, are not.
func TestNamesOfOneModel(t *testing.T) {
	// at returns which workers serve a prompt in turn under some names.
	at := func(t *testing.T, s *server, text string, header []string, names ...string) (workers, states []string) {
		for i := range 8 {
			c := simChat(text)
			c.Model = names[i%len(names)]
			a := s.mustChat(t, c, header...)
			workers = append(workers, a.header.Get("X-Kv-Worker"))
			states = append(states, a.header.Get("X-Kv-Session-State"))
		}
		return workers, states
	}
	different := func(list []string) (n int) {
		seen := make(map[string]bool)
		for _, one := range list {
			seen[one] = true
		}
		return len(seen)
	}
	site := func(engines ...*fake) string {
		return "kv_router " + engines[0].Addr() + " " + engines[1].Addr() + " {\nresponse_headers X-KV-\npolicy warmest\n" + affinity("hard") + "\n}"
	}
	vllms := []*fake{named(t, "vllm", "qwen-a", "gpt-4o"), named(t, "vllm", "gpt-4o", "qwen-a")}
	s := startCaddy(t, site(vllms...))
	for _, e := range vllms {
		s.awaitType(t, e.Addr(), "vllm")
	}
	for i := range 6 {
		if workers, _ := at(t, s, fmt.Sprint(i, someWords(2000)), nil, "qwen-a", "gpt-4o"); different(workers) != 1 {
			t.Errorf("prompt %d is at %v", i, workers)
		}
		workers, states := at(t, s, "hi", []string{"X-Session-Id", fmt.Sprint("s", i)}, "gpt-4o", "qwen-a")
		if different(workers) != 1 || states[0] != "new" || states[1] != "bound" {
			t.Errorf("session %d is at %v: %v", i, workers, states)
		}
		if _, states := at(t, s, "hi", []string{"X-Session-Id", fmt.Sprint("s", i)}, "ad"); states[0] != "new" {
			t.Errorf("the adapter's session is %s", states[0])
		}
		var found adminSession
		s.api(t, http.MethodGet, defaultPool+fmt.Sprintf("/sessions/s%d?model=qwen-a", i), nil, &found)
		if !found.Bound {
			t.Errorf("the admin API does not find session %d", i)
		}
	}
	public := []*modelEngine{startNamed(t, "org/qwen-1"), startNamed(t, "org/qwen-1")}
	s = startCaddy(t, route(public, "response_headers X-KV-", toQwen, "model fast {\nto org/qwen-1\n}"))
	s.awaitModels(t)
	for i := range 5 {
		workers, states := at(t, s, fmt.Sprint(i, someWords(1000)), []string{"X-Session-Id", fmt.Sprint(i)}, "qwen", "fast", "org/qwen-1")
		if different(workers) != 1 || states[0] != "new" || states[1] != "bound" || states[2] != "bound" {
			t.Errorf("prompt %d went to %q, its session is %q", i, workers, states)
		}
	}
	other := startCaddy(t, site(named(t, "somebody", "qwen-a", "gpt-4o"), named(t, "somebody", "gpt-4o", "qwen-a")))
	if _, states := at(t, other, "hi", []string{"X-Session-Id", "s"}, "gpt-4o", "qwen-a"); states[1] != "new" {
		t.Errorf("names of an unknown engine have one session: %v", states)
	}
}

// TestModelsStayLoaded has two engines that load one model at a time, on demand. Each keeps the model that it has.
func TestModelsStayLoaded(t *testing.T) {
	var mu sync.Mutex
	var swaps [2][]string // the models that each has loaded, in order
	start := func(i int) *fake {
		return startFake(t, func(w http.ResponseWriter, r *http.Request) bool {
			if r.URL.Path == "/v1/models" {
				lists("x", "y")(w, r)
				return true
			}
			mu.Lock()
			defer mu.Unlock()
			if n := len(swaps[i]); r.Method == http.MethodPost && (n == 0 || swaps[i][n-1] != r.Header.Get("X-Model")) {
				swaps[i] = append(swaps[i], r.Header.Get("X-Model"))
			}
			return false
		})
	}
	s := startCaddy(t, route([]*fake{start(0), start(1)}))
	for i := range 24 {
		model := []string{"x", "y", "x"}[i%3]
		s.mustChat(t, askModel(model, i), "X-Model", model)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(swaps[0]) != 1 || len(swaps[1]) != 1 || swaps[0][0] == swaps[1][0] {
		t.Errorf("the engines have loaded %v", swaps)
	}
}
