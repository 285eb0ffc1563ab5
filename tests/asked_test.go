package tests

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestUnknownServerIsNotAskedForItsHealth has a server that makes requests of its
// models when it is asked for its health. It does not answer other questions. The
// router finds out its type all the same. Its models are configured, so it is not
// asked for these again and again.
func TestUnknownServerIsNotAskedForItsHealth(t *testing.T) {
	f := startFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		switch r.URL.Path {
		case "/v1/models":
			fmt.Fprint(w, fakeModels("openai"))
		case "/props":
			<-r.Context().Done()
		default:
			return false
		}
		return true
	})
	s := startCaddy(t, "kv_router "+f.addr()+" {\nworker * {\napi_key sk-x\nmodels sim-8b\n}\n}")
	s.mustChat(t, simChat("hello"))
	eventually(t, 10*time.Second, "it to be settled as other", func() bool { return s.fakeWorker(t, f.addr()).Engine.Type == "other" })
	time.Sleep(6 * time.Second)
	if n := f.asked("/health"); n > 0 {
		t.Errorf("asked %d times for its health", n)
	}
	if n := f.asked("/v1/models"); n > 3 {
		t.Errorf("asked %d times for the models that are configured", n)
	}
	other := startFake(t, nil)
	if err := s.reload("kv_router " + other.addr() + " {\nengine other\nworker * {\nmodels sim-8b\n}\n}"); err != nil {
		t.Fatal(err)
	}
	s.mustChat(t, simChat("hello"))
	time.Sleep(2 * time.Second)
	for _, path := range []string{"/v1/models", "/metrics", "/version", "/props", "/server_info"} {
		if n := other.asked(path); n > 0 {
			t.Errorf("a worker of which all is configured was asked %d times for %s", n, path)
		}
	}
}

// TestWorkerThatWantsAKeyIsNoIncident has a worker that tells its models to
// clients with a key only.
func TestWorkerThatWantsAKeyIsNoIncident(t *testing.T) {
	f := startFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method == http.MethodGet && r.URL.Path == "/v1/models" {
			w.WriteHeader(http.StatusUnauthorized)
			return true
		}
		return false
	})
	s := startCaddy(t, "kv_router "+f.addr())
	s.mustChat(t, simChat("hello"), "Authorization", "Bearer clients-own")
	const line = "worker lists its models only with its api_key; the router asks it less and less often"
	eventually(t, 5*time.Second, "the log to say so", func() bool { return len(s.entries(t, line)) == 1 })
	time.Sleep(11 * time.Second)
	if n := f.asked("/v1/models"); n > 2 {
		t.Errorf("asked %d times in 11 s", n)
	}
	if n := len(s.entries(t, line)); n != 1 {
		t.Errorf("the log says it %d times", n)
	}
	if _, found := s.scrape(t).sum("caddy_kv_router_incidents"); found {
		t.Error("there is an incident")
	}
}

// TestQuestionsAreRewrittenAsRequests has the engine behind a path.
func TestQuestionsAreRewrittenAsRequests(t *testing.T) {
	tells := fakeVLLM("0.20.0", func() string { return "" })
	f := startFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		path, behind := strings.CutPrefix(r.URL.Path, "/llm")
		r.URL.Path = path
		return behind && tells(w, r)
	})
	s := startCaddy(t, "kv_router {\nreverse_proxy "+f.addr()+" {\nrewrite /llm{uri}\n}\n}")
	s.mustChat(t, simChat("hello"))
	eventually(t, 10*time.Second, "the engine to be found out", func() bool {
		w := s.fakeWorker(t, f.addr())
		return w.Engine.Type == "vllm" && w.Engine.Version == "0.20.0" && len(w.Models.Told) == 1
	})
	if n := f.asked("/v1/models") + f.asked("/metrics"); n > 0 {
		t.Errorf("asked %d times outside of the path", n)
	}
}

// TestRanksAreToldInEveryWay looks at what an old SGLang with four ranks is
// sent. It also looks at engines that have one rank or ignore the requested
// one.
func TestRanksAreToldInEveryWay(t *testing.T) {
	var mu sync.Mutex
	bodies := map[string]string{}
	keep := func(tells func(http.ResponseWriter, *http.Request) bool) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			if r.Method == http.MethodPost {
				body, _ := io.ReadAll(r.Body)
				mu.Lock()
				bodies[r.URL.Path] = string(body)
				mu.Unlock()
			}
			return tells(w, r)
		}
	}
	for _, c := range []struct {
		name    string
		tells   func(http.ResponseWriter, *http.Request) bool
		ranks   int
		members []string // that tell the rank
		header  bool     // tells it, too
	}{
		{"old SGLang", fakeSGLang(`"version":"0.4.9","page_size":1,"dp_size":4`), 4, []string{"data_parallel_rank", "routed_dp_rank"}, true},
		{"new SGLang", fakeSGLang(`"version":"0.5.19","page_size":1,"dp_size":4`), 4, []string{"routed_dp_rank"}, true},
		{"old vLLM", fakeVLLM("0.8.5", func() string { return vllmRanks(8) }), 1, nil, false},
		{"new vLLM", fakeVLLM("0.20.0", func() string { return vllmRanks(2) }), 2, nil, true},
		{"vLLM with one rank", fakeVLLM("0.20.0", func() string { return vllmRanks(1) }), 1, nil, false},
		{"vLLM that tells no ranks", fakeVLLM("0.20.0", func() string { return "" }), 1, nil, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := startFake(t, keep(c.tells))
			s := startCaddy(t, "kv_router "+f.addr()+" {\nresponse_headers X-KV-\n}")
			s.mustChat(t, simChat("hello"))
			eventually(t, 10*time.Second, "the ranks to be known", func() bool {
				w := s.fakeWorker(t, f.addr())
				return w.Engine.Version != "" && len(w.Ranks) == c.ranks
			})
			const path = "/v1/messages"
			body := `{"model":"sim-8b","max_tokens":5,"data_parallel_rank":9,"routed_dp_rank":9,"messages":[{"role":"user","content":"hi"}]}`
			a := s.post(t.Context(), path, []byte(body), "X-Data-Parallel-Rank", "9")
			rank := a.header.Get("X-KV-Dp-Rank")
			wantHeader := ""
			if c.header {
				wantHeader = rank
			}
			if got := f.header(path).Get("X-Data-Parallel-Rank"); got != wantHeader {
				t.Errorf("header %q, want %q", got, wantHeader)
			}
			mu.Lock()
			sent := bodies[path]
			mu.Unlock()
			var got map[string]any
			if err := json.Unmarshal([]byte(sent), &got); err != nil {
				t.Fatalf("sent %q: %v", sent, err)
			}
			if c.members == nil {
				if sent != body {
					t.Errorf("sent %q", sent)
				}
				return
			}
			told := 0
			for _, name := range []string{"data_parallel_rank", "routed_dp_rank"} {
				switch v := got[name]; {
				case v == nil:
				case fmt.Sprint(v) != rank:
					t.Errorf("%s is %v, want %s", name, v, rank)
				default:
					told++
				}
			}
			if told != len(c.members) {
				t.Errorf("the rank is told %d times in %q, want %v", told, sent, c.members)
			}
		})
	}
}

// vllmRanks are the metrics of a vLLM with so many ranks.
func vllmRanks(n int) (page string) {
	for i := range n {
		page += fmt.Sprintf("vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"10000\",engine=\"%d\"} 1.0\n", i)
	}
	return page
}
