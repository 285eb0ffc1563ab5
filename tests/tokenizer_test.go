package tests

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
	"github.com/tidwall/gjson"
)

const (
	fallbacks   = "caddy_kv_router_fallbacks_total"
	untokenized = `reason="untokenized"`
	queries     = `"nvext":{"annotations":["query_instance_id"]}`
)

// tokenizers are the engines that return a prompt's token ids.
var tokenizers = map[string]engine.Config{
	"vllm": {}, "vllm-scale-out": {ScaleOut: true}, "sglang": {Flavour: engine.SGLang}, "llamacpp": {Flavour: engine.LlamaCpp}, "dynamo": {Flavour: engine.Dynamo},
}

// tokenized are requests with text prompts.
var tokenized = []struct{ name, path, body string }{
	{"chat", "/v1/chat/completions", `{"model":"sim-8b","messages":[{"role":"system","content":"Be \"brief\"."},{"role":"user","content":[{"type":"text","text":"Grüße"}]}],"max_tokens":1,"temperature":0@}`},
	{"chat, streamed", "/v1/chat/completions", `{"stream":true,"stream_options":{"include_usage":true},"messages":[{"role":"user","content":"hi"}],"max_tokens":1@}`},
	{"tools", "/v1/chat/completions", `{"model":"sim-8b","messages":[{"role":"user","content":"hi"}],"tools":[{"type":"function","function":{"name":"f","parameters":{}}}],"tool_choice":"auto","max_tokens":1@}`},
	{"completions", "/v1/completions", `{"model":"sim-8b","prompt":"Once upon a time,\nin","max_tokens":1,"n":1@}`},
}

// ownPosts returns the router's own POST requests to an engine.
func ownPosts(e *engine.Engine) (list []engine.Record) {
	for _, r := range e.Journal() {
		if r.Header.Get("User-Agent") == "kv_router" && r.Method == http.MethodPost {
			list = append(list, r)
		}
	}
	return list
}

// TestQueryTellsTheEnginesTokens queries text prompts. The answers have the ids that the
// engine computes. testdata/tokenized has the router's requests to the engine.
func TestQueryTellsTheEnginesTokens(t *testing.T) {
	for name, cfg := range tokenizers {
		t.Run(name, func(t *testing.T) {
			cfg.KeepBodies = true
			e := startSimulated(t, cfg)
			s := startCaddy(t, simulated([]*engine.Engine{e}, "trust explain", "worker "+e.Addr()+" {\napi_key secret\n}"))
			s.mustChat(t, simChat("hello"))
			kind, _, _ := strings.Cut(name, "-")
			eventually(t, 10*time.Second, "the engine to be found out", func() bool { return s.told(t, e).Engine.Type == kind })
			before := s.scrape(t)
			golden(t, filepath.Join("testdata", "tokenized", name+".txt"), func() []byte {
				var b bytes.Buffer
				for _, c := range tokenized {
					met := len(ownPosts(e))
					a := s.post(t.Context(), c.path, []byte(strings.Replace(c.body, "@", ","+queries, 1)))
					q := queried(t, a, strings.Contains(c.body, `"stream":true`))
					fmt.Fprintf(&b, "# %s\n", c.name)
					for _, r := range ownPosts(e)[met:] {
						fmt.Fprintf(&b, "POST %s\nAuthorization: %s\nContent-Type: %s\n%s\n", r.Path, r.Header.Get("Authorization"), r.Header.Get("Content-Type"), r.Body)
					}
					b.WriteByte('\n')
					real := s.post(t.Context(), c.path, []byte(strings.Replace(strings.Replace(c.body, `"stream":true,"stream_options":{"include_usage":true},`, "", 1), "@", `,"return_token_ids":true`, 1)))
					want := gjson.GetBytes(real.body, "prompt_token_ids|@ugly").Raw
					if want == "" {
						want = gjson.GetBytes(real.body, "choices.0.prompt_token_ids|@ugly").Raw
					}
					if got, _ := json.Marshal(q.NVExt.TokenIDs); string(got) != want || len(q.NVExt.TokenIDs) < 2 {
						t.Errorf("%s: told %s, the engine computes %s", c.name, got, want)
					}
				}
				return b.Bytes()
			})
			s.booksAtZero(t)
			s.wantFigures(t, before, []figure{
				{fallbacks, []string{untokenized}, 0}, {requestsTotal, []string{`outcome="query"`}, float64(len(tokenized))}, {requestsTotal, nil, 2 * float64(len(tokenized))},
			})
		})
	}
}

// TestTwoStages has clients that first query, then send the request with the worker and
// the token ids of the answer. Each turn finds the whole turn before in its engine's
// cache, as its query predicts.
func TestTwoStages(t *testing.T) {
	for _, v := range []struct {
		flavour engine.Flavour
		path    string
		field   string
	}{
		{engine.VLLM, "/v1/completions", "prompt"},
		{engine.VLLM, "/v1/chat/completions", "messages"},
		{engine.SGLang, "/v1/chat/completions", "messages"},
		{engine.SGLang, "/v1/completions", "prompt"},
		{engine.LlamaCpp, "/v1/completions", "prompt"},
	} {
		t.Run(string(v.flavour)+" "+v.field, func(t *testing.T) {
			var engines []*engine.Engine
			var ids strings.Builder
			for i := range 3 {
				e := startSimulated(t, engine.Config{Name: "e" + strconv.Itoa(i+1), Flavour: v.flavour})
				engines = append(engines, e)
				fmt.Fprintf(&ids, "worker %s {\nid %d\n}\n", e.Addr(), i+1)
			}
			s := startCaddy(t, simulated(engines, "engine "+string(v.flavour), "trust explain pins", "policy dynamo", ids.String()))
			for c := range 4 {
				text, held, home := "", int64(0), uint64(0)
				for turn := range 4 {
					text += strings.Repeat(fmt.Sprintf("In turn %d of conversation %d much is said. ", turn, c), 20)
					prompt, _ := json.Marshal(text)
					if v.field == "messages" {
						prompt, _ = json.Marshal([]message{{"user", text}})
					}
					body := func(nvext string) []byte {
						return fmt.Appendf(nil, `{"model":"sim-8b",%q:%s,"max_tokens":2,"nvext":%s}`, v.field, prompt, nvext)
					}
					q := queried(t, s.post(t.Context(), v.path, body(`{"annotations":["query_instance_id"]}`)), false)
					w := q.NVExt.WorkerID
					if turn > 0 && w["decode_worker_id"] != home {
						t.Errorf("conversation %d, turn %d: told %v, and worker %d has computed its beginning", c, turn, w, home)
					}
					if home = w["decode_worker_id"]; turn == 0 { // of what nobody has computed
						home = uint64(c%3 + 1)
						w = map[string]uint64{"decode_worker_id": home, "prefill_worker_id": home}
					}
					told, _ := json.Marshal(q.NVExt.TokenIDs)
					a := s.post(t.Context(), v.path, body(fmt.Sprintf(
						`{"token_data":%s,"decode_worker_id":%d,"dp_rank":%d,"prefill_worker_id":%d,"prefill_dp_rank":%d}`,
						told, w["decode_worker_id"], w["decode_dp_rank"], w["prefill_worker_id"], w["prefill_dp_rank"])))
					if !a.ok() || a.engine() != fmt.Sprint("e", home) {
						t.Fatalf("status %d, from %s, told %v: %s", a.status, a.engine(), w, a.body)
					}
					n, cached := gjson.GetBytes(a.body, "usage.prompt_tokens").Int(), gjson.GetBytes(a.body, "usage.prompt_tokens_details.cached_tokens").Int()
					if n != int64(len(q.NVExt.TokenIDs)) || cached < held-64 {
						t.Errorf("conversation %d, turn %d: %d tokens, told %d; %d were cached of the %d before", c, turn, n, len(q.NVExt.TokenIDs), cached, held)
					}
					held = n
				}
			}
			s.booksAtZero(t)
		})
	}
}

// TestQueryWithoutATokenizer has engines that return no token ids, each in its own way.
// The answer lacks them, the router counts that, and no worker is marked down.
func TestQueryWithoutATokenizer(t *testing.T) {
	long := `{"tokens":[` + strings.Repeat("1,", 1<<20) + `1]}`
	for name, v := range map[string]struct {
		engine  string
		status  int
		answer  string
		waits   bool
		asked   int
		request string
	}{
		"none":                {"trtllm", 200, `{"tokens":[1]}`, false, 0, ""},
		"unknown":             {"auto", 200, `{"tokens":[1]}`, false, 0, ""},
		"not there":           {"sglang", 404, `{"detail":"Not Found"}`, false, 1, ""},
		"not there in either": {"vllm", 404, `{"detail":"Not Found"}`, false, 2, ""},
		"refused":             {"llamacpp", 401, `{"error":{}}`, false, 1, ""},
		"ill":                 {"vllm", 503, `{"token_ids":[1]}`, false, 1, ""},
		"no JSON":             {"sglang", 200, `{"tokens":[1]`, false, 1, ""},
		"no ids":              {"sglang", 200, `{"tokens":["1"]}`, false, 1, ""},
		"too large ids":       {"sglang", 200, `{"tokens":[4294967296]}`, false, 1, ""},
		"no tokens":           {"sglang", 200, `{"tokens":[]}`, false, 1, ""},
		"of two prompts":      {"vllm", 200, `[{"token_ids":[1]},{"token_ids":[2]}]`, false, 1, ""},
		"too many":            {"sglang", 200, long, false, 1, ""},
		"no text":             {"llamacpp", 200, `{"prompt":7}`, false, 1, ""},
		"broken":              {"sglang", 0, "", false, 1, ""},
		"late":                {"dynamo", 200, `{"tokens":[1]}`, true, 1, ""},
		"image": {
			"vllm", 200, `{"token_ids":[1]}`, false, 0,
			`{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://x/y"}}]}],` + queries + `}`,
		},
		"not taken in": {
			"vllm", 403, `{"tokens":[1]}`, false, 1,
			`{"model":"m","messages":[{"role":"user","content":"hi"}],"reasoning_effort":"low",` + queries + `}`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			var mu sync.Mutex
			var paths []string
			addr := serveRaw(t, func(w http.ResponseWriter, r *http.Request) {
				body, _ := io.ReadAll(r.Body)
				if r.Method != http.MethodPost || r.UserAgent() != "kv_router" {
					http.NotFound(w, r)
					return
				}
				mu.Lock()
				paths = append(paths, r.URL.Path)
				mu.Unlock()
				if strings.Contains(string(body), "nvext") || strings.Contains(string(body), "stream") {
					t.Errorf("the engine was asked for %s", body)
				}
				if v.waits {
					<-r.Context().Done()
					return
				}
				if v.status == 0 {
					panic(http.ErrAbortHandler)
				}
				w.WriteHeader(v.status)
				io.WriteString(w, v.answer)
			})
			pool := strings.ReplaceAll(name, " ", "")
			s := startCaddy(t, "kv_router "+addr+" {\npool "+pool+"\ntrust explain\nengine "+v.engine+"\n}")
			before := s.scrape(t)
			request := v.request
			if request == "" {
				request = `{"model":"m","stream":false,"messages":[{"role":"user","content":"hi"}],` + queries + `}`
			}
			start := time.Now()
			a := s.post(t.Context(), "/v1/chat/completions", []byte(request))
			if q := queried(t, a, false); len(q.NVExt.TokenIDs) > 0 || q.NVExt.WorkerID["decode_worker_id"] == 0 || gjson.GetBytes(a.body, "nvext.token_ids").Exists() {
				t.Errorf("told %.200s", a.body)
			}
			if took := time.Since(start); v.waits && took < time.Second {
				t.Errorf("the engine was waited for %v", took)
			}
			mu.Lock()
			if len(paths) != v.asked {
				t.Errorf("the engine was asked %q, want %d questions", paths, v.asked)
			}
			mu.Unlock()
			s.wantFigures(t, before, []figure{
				{fallbacks, []string{untokenized}, 1}, {fallbacks, nil, 1}, {requestsTotal, []string{`outcome="query"`}, 1}, {requestsTotal, nil, 1},
			})
			var w adminWorker
			s.api(t, http.MethodGet, "/pools/"+pool+"/workers/"+addr, nil, &w)
			if !w.Health.Available || w.Health.Failures != 0 || w.Health.Answers != 0 || w.Load.Requests != 0 {
				t.Errorf("the worker is %+v, %+v", w.Health, w.Load)
			}
			if n := s.logged(t, "fallback untokenized"); n != 1 {
				t.Errorf("%d lines in the log", n)
			}
		})
	}
}

// TestTokenizersSeeWhoAsks has engines with keys. The router asks for token ids with the
// client's key, or with its own if the client sent none. Header operations and the rewrite
// apply.
func TestTokenizersSeeWhoAsks(t *testing.T) {
	var got []*http.Request
	addr := serveRaw(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost {
			http.NotFound(w, r)
			return
		}
		got = append(got, r)
		io.WriteString(w, `{"tokens":[1,2]}`)
	})
	site := func(block string) string {
		return "kv_router {\ntrust explain\nworker " + addr + " {\nengine sglang\napi_key router\n}\nreverse_proxy " + addr + " {\n" + block + "\n}\n}"
	}
	s := startCaddy(t, site("header_up X-Extra up\nrewrite /base{path}"))
	body := []byte(`{"model":"m","messages":[{"role":"user","content":"hi"}],` + queries + `}`)
	q := queried(t, s.post(t.Context(), "/v1/chat/completions", body), false)
	queried(t, s.post(t.Context(), "/v1/chat/completions", body, "Authorization", "Bearer client", "X-Secret", "s"), false)
	if err := s.reload(site("header_up Authorization \"Bearer proxy\"")); err != nil {
		t.Fatal(err)
	}
	queried(t, s.post(t.Context(), "/v1/chat/completions", body, "Authorization", "Bearer client"), false)
	if !slices.Equal(q.NVExt.TokenIDs, []int{1, 2}) || len(got) != 3 {
		t.Fatalf("told %v with %d questions", q.NVExt.TokenIDs, len(got))
	}
	for i, want := range []string{"Bearer router", "Bearer client", "Bearer proxy"} {
		h := got[i].Header
		if h.Get("Authorization") != want || h.Get("X-Secret") != "" || h.Get("User-Agent") != "kv_router" || i < 2 && h.Get("X-Extra") != "up" {
			t.Errorf("question %d: %v", i, h)
		}
	}
	if got[0].URL.Path != "/base/tokenize" {
		t.Errorf("asked at %s", got[0].URL.Path)
	}
}

// TestQueryOfAKnownPromptAsksNobody queries prompts of token ids: the router asks no
// engine.
func TestQueryOfAKnownPromptAsksNobody(t *testing.T) {
	e := startSimulated(t, engine.Config{})
	s := startCaddy(t, simulated([]*engine.Engine{e}, "trust explain", "engine vllm"))
	for _, body := range []string{`{"model":"sim-8b","prompt":[1,2],` + queries + `}`, `{"model":"sim-8b","prompt":"x","nvext":{"annotations":["query_instance_id"],"token_data":[1,2]}}`} {
		if q := queried(t, s.post(t.Context(), "/v1/completions", []byte(body)), false); !slices.Equal(q.NVExt.TokenIDs, []int{1, 2}) {
			t.Errorf("told %v", q.NVExt.TokenIDs)
		}
	}
	if got := ownPosts(e); len(got) > 0 {
		t.Errorf("the engine was asked %d questions", len(got))
	}
}
