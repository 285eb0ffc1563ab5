package tests

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/journal"
	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
	"github.com/tidwall/gjson"
)

// queryAnswer is the part of an answer to a query that the tests check.
type queryAnswer struct {
	ID, Object string
	Choices    *[]any
	NVExt      struct {
		WorkerID map[string]uint64 `json:"worker_id"`
		TokenIDs []int             `json:"token_ids"`
		Explain  *adminExplained   `json:"explain"`
	}
}

// queried reads an answer to a query, plain or streamed.
func queried(t testing.TB, a answer, stream bool) (q queryAnswer) {
	t.Helper()
	body := string(a.body)
	if stream {
		data, ok := strings.CutPrefix(body, "data: ")
		body, _, _ = strings.Cut(data, "\n\n")
		if !ok || string(a.body) != "data: "+body+"\n\ndata: [DONE]\n\n" {
			t.Errorf("no stream of one event: %q", a.body)
		}
	}
	if err := json.Unmarshal([]byte(body), &q); err != nil || a.status != 200 {
		t.Fatalf("status %d, error %v, body %.300q", a.status, err, a.body)
	}
	return q
}

// TestQueryTellsTheWorker queries a request, and then sends it to the worker of the
// answer.
func TestQueryTellsTheWorker(t *testing.T) {
	engines := startEngines(t, 3, canned.Pace{})
	s := startCaddy(t, route(engines, numbered(engines), "response_headers X-KV-", "trust pins explain"))
	for _, v := range []struct {
		name, path, object, annotation string
		stream, explains               bool
	}{
		{"Chat", "/v1/chat/completions", "chat.completion", "query_instance_id", false, false},
		{"Streamed", "/v1/chat/completions", "chat.completion.chunk", "query_instance_id", true, false},
		{"WithValue", "/v1/chat/completions", "chat.completion", "query_instance_id:abc", false, false},
		{"Explained", "/v1/chat/completions", "chat.completion.chunk", "query_instance_id:explain", true, true},
		{"Messages", "/v1/messages", "", "query_instance_id", false, false},
	} {
		t.Run(v.name, func(t *testing.T) {
			prompt := v.name + strings.Repeat(" is a prompt of several blocks, which one of them holds", 20)
			warm := s.mustChat(t, ask(prompt)).header.Get("X-KV-Worker")
			c := withHints(prompt, `{"annotations":["`+v.annotation+`"]}`)
			c.Stream = v.stream
			q := queried(t, s.post(t.Context(), v.path, c.body()), v.stream)
			if q.ID == "" || q.Object != v.object || (q.Choices != nil) != (v.object != "") {
				t.Errorf("%+v", q)
			}
			id, rank := fmt.Sprint(q.NVExt.WorkerID["decode_worker_id"]), fmt.Sprint(q.NVExt.WorkerID["decode_dp_rank"])
			if p := q.NVExt.WorkerID; id != warm || rank != "0" || len(p) != 4 || p["prefill_worker_id"] != p["decode_worker_id"] || p["prefill_dp_rank"] != p["decode_dp_rank"] {
				t.Errorf("told %v, want the worker %s that holds the prompt", q.NVExt.WorkerID, warm)
			}
			if x := q.NVExt.Explain; (x != nil) != v.explains || x != nil && (len(x.Candidates) != 3 || x.Chosen.Reason != "overlap") {
				t.Errorf("explained: %+v", x)
			}
			a := s.mustChat(t, ask(prompt), "X-Worker-Instance-Id", id, "X-Dp-Rank", rank)
			if a.header.Get("X-KV-Worker") != id || a.header.Get("X-KV-Reason") != "pin" {
				t.Errorf("in the second stage: header %v", a.header)
			}
		})
	}
}

// TestQueryTellsTokens queries prompts with known and with unknown token ids.
func TestQueryTellsTokens(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, "trust explain"))
	const query = `"nvext":{"annotations":["query_instance_id"]`
	for _, v := range []struct{ path, body, want string }{
		{"/v1/completions", `{"model":"m","prompt":[ 1,2, 4294967295 ],` + query + `}}`, "[1,2,4294967295]"},
		{"/v1/completions", `{"model":"m","prompt":[[1,2],[3]],` + query + `}}`, ""},
		{"/v1/completions", `{"model":"m","prompt":"text",` + query + `}}`, ""},
		{"/v1/completions", `{"model":"m","prompt":"text",` + query + `,"token_data":[7, 8]}}`, "[7,8]"},
		{"/v1/chat/completions", `{"model":"m","messages":[],` + query + `,"token_data":[9]}}`, "[9]"},
		{"/generate", `{"input_ids":[5,6],` + query + `}}`, "[5,6]"},
		{"/generate", `{"input_ids":[` + strings.Repeat("5,", 9999) + `5],` + query + `}}`, "[" + strings.Repeat("5,", 9999) + "5]"},
	} {
		a := s.post(t.Context(), v.path, []byte(v.body))
		if got := gjson.GetBytes(a.body, "nvext.token_ids").Raw; a.status != 200 || got != v.want || !gjson.ValidBytes(a.body) {
			t.Errorf("%.80s: status %d, token ids %.100q, want %.100q", v.body, a.status, got, v.want)
		}
	}
}

// TestQueryLeavesNothingBehind has queries of all kinds. Only the count of queries grows.
// The router stores no session and no prompt, and no engine gets the queries.
func TestQueryLeavesNothingBehind(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, numbered(engines), "policy round_robin", "trust explain pins overrides", "affinity {\nttl 10m\n}"))
	prompt := strings.Repeat("the prompt of a session, of several blocks ", 20)
	home := s.mustChat(t, ask(prompt), "X-Session-Id", "bound").engine()
	before := s.mustChat(t, ask("another")).engine()
	s.booksAtZero(t)
	eventually(t, "all to be in the journal", func() bool {
		n, others, _ := journal.Trace(filepath.Join(filepath.Dir(s.log), "caddy", "kv_router", "default.journal"), io.Discard)
		return n+others == 2
	})
	var was, is adminSession
	pool, asked := s.pool(t), [2]int{engines[0].Requests(), engines[1].Requests()}
	s.api(t, "GET", defaultPool+"/sessions/bound?model=canned", nil, &was)
	figures := s.scrape(t)
	queries := 0
	for i := range 8 {
		for _, v := range []struct {
			nvext, session string
			status         int
		}{
			{`{"annotations":["query_instance_id"]}`, "bound", 200},
			{`{"annotations":["query_instance_id:explain"]}`, fmt.Sprint("new ", i), 200},
			{`{"annotations":["query_instance_id"],"backend_instance_id":2}`, "bound", 200},
			{`{"annotations":["query_instance_id"],"session_control":{"session_id":"x","action":"bind"}}`, "", 200},
		} {
			c := withHints(fmt.Sprint(prompt, i%2), v.nvext)
			c.Stream = i%2 == 1
			header := []string{}
			if v.session != "" {
				header = append(header, "X-Session-Id", v.session)
			}
			a := s.chat(t.Context(), c, header...)
			q := queried(t, a, c.Stream)
			if a.status == v.status {
				queries++
			}
			if strings.Contains(v.nvext, "backend") && q.NVExt.WorkerID["decode_worker_id"] != 2 || v.session == "bound" && !strings.Contains(v.nvext, "backend") && "e"+fmt.Sprint(q.NVExt.WorkerID["decode_worker_id"]) != home {
				t.Errorf("%s: told %v", v.nvext, q.NVExt.WorkerID)
			}
		}
	}
	s.api(t, "GET", defaultPool+"/sessions/bound?model=canned", nil, &is)
	if is.Expires >= was.Expires {
		t.Errorf("the session would have expired in %v s, now in %v", was.Expires, is.Expires)
	}
	if now := s.pool(t); now.Sessions != pool.Sessions || now.IndexBlocks != pool.IndexBlocks || now.Leases != 0 {
		t.Errorf("the pool was %+v, is %+v", pool, now)
	}
	equal(t, [2]int{engines[0].Requests(), engines[1].Requests()}, asked, "requests at the engines")
	after := s.scrape(t)
	for name, v := range after {
		switch {
		case !strings.HasPrefix(name, "caddy_kv_router_"), strings.Contains(name, `outcome="query"`):
		case strings.Contains(name, "untokenized"): // these engines have no tokenizer, which is counted
		case figures[name] != v:
			t.Errorf("%s was %v, is %v", name, figures[name], v)
		}
	}
	if n := after.value(requestsTotal, `outcome="query"`) - figures.value(requestsTotal, `outcome="query"`); n != float64(queries) || queries != 32 {
		t.Errorf("%v of %d queries were counted", n, queries)
	}
	// The query did not use up the policy's turn either.
	if s.mustChat(t, ask("next")).engine() == before {
		t.Errorf("the turn is %s's again", before)
	}
}

// TestQueryIsRefusedAsItsRequest has queries of requests that the router refuses.
func TestQueryIsRefusedAsItsRequest(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, numbered(engines), "trust explain pins overrides"))
	const query = `{"annotations":["query_instance_id"],`
	wantError(t, "unknown worker", s.chat(t.Context(), withHints("x", query+`"backend_instance_id":9}`)), 400, "invalid_pin", "id 9")
	wantError(t, "taints", s.chat(t.Context(), withHints("x", query+`"routing_constraints":{"required_taints":["gold"]}}`)), 503, "no_worker", `["gold"]`)
	s.drain(t, engines[0], "drain")
	if q := queried(t, s.mustChat(t, withHints("x", query+`"dp_rank":0}`)), false); q.NVExt.WorkerID["decode_worker_id"] != 2 {
		t.Errorf("told %v, while worker 1 is drained", q.NVExt.WorkerID)
	}
}

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

// TestQueryTellsTheEnginesTokens queries text prompts. The answers have the ids that the
// engine computes. Unit tests of the engines have the router's requests.
func TestQueryTellsTheEnginesTokens(t *testing.T) {
	for name, cfg := range tokenizers {
		t.Run(name, func(t *testing.T) {
			e := startSimulated(t, cfg)
			s := startCaddy(t, route([]*engine.Engine{e}, "trust explain"))
			before := s.scrape(t)
			s.mustChat(t, simChat("hello"))
			kind, _, _ := strings.Cut(name, "-")
			s.awaitType(t, e.Addr(), kind)
			for _, c := range tokenized {
				a := s.post(t.Context(), c.path, []byte(strings.Replace(c.body, "@", ","+queries, 1)))
				q := queried(t, a, strings.Contains(c.body, `"stream":true`))
				real := s.post(t.Context(), c.path, []byte(strings.Replace(strings.Replace(c.body, `"stream":true,"stream_options":{"include_usage":true},`, "", 1), "@", `,"return_token_ids":true`, 1)))
				want := gjson.GetBytes(real.body, "prompt_token_ids|@ugly").Raw
				if want == "" {
					want = gjson.GetBytes(real.body, "choices.0.prompt_token_ids|@ugly").Raw
				}
				if got, _ := json.Marshal(q.NVExt.TokenIDs); string(got) != want || len(q.NVExt.TokenIDs) < 2 {
					t.Errorf("%s: told %s, the engine computes %s", c.name, got, want)
				}
			}
			s.booksAtZero(t)
			s.wantFigures(t, before, []figure{
				{fallbacks, []string{untokenized}, 0}, {requestsTotal, []string{`outcome="query"`}, float64(len(tokenized))}, {requestsTotal, nil, 1 + 2*float64(len(tokenized))},
			})
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
		"not there in either": {"vllm", 404, `{"detail":"Not Found"}`, false, 2, ""},
		"refused":             {"llamacpp", 401, `{"error":{}}`, false, 1, ""},
		"no JSON":             {"sglang", 200, `{"tokens":[1]`, false, 1, ""},
		"too large ids":       {"sglang", 200, `{"tokens":[4294967296]}`, false, 1, ""},
		"too many":            {"sglang", 200, long, false, 1, ""},
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
			request := cmp.Or(v.request, `{"model":"m","stream":false,"messages":[{"role":"user","content":"hi"}],`+queries+`}`)
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
			equal(t, s.logged(t, "fallback untokenized"), 1, "lines in the log")
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
	s.mustReload(t, site("header_up Authorization \"Bearer proxy\""))
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
	equal(t, got[0].URL.Path, "/base/tokenize", "path of the question")
}
