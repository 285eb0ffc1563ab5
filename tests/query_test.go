package tests

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
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
			c := wishing(prompt, `{"annotations":["`+v.annotation+`"]}`)
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
	s.booksAtZero(t)
	var was, is adminSession
	pool, asked := s.pool(t), [2]int{engines[0].Requests(), engines[1].Requests()}
	s.api(t, "GET", defaultPool+"/sessions/bound", nil, &was)
	before := s.scrape(t)
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
			c := wishing(fmt.Sprint(prompt, i%2), v.nvext)
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
	s.api(t, "GET", defaultPool+"/sessions/bound", nil, &is)
	if is.Expires >= was.Expires {
		t.Errorf("the session would have expired in %v s, now in %v", was.Expires, is.Expires)
	}
	if now := s.pool(t); now.Sessions != pool.Sessions || now.IndexBlocks != pool.IndexBlocks || now.Leases != 0 {
		t.Errorf("the pool was %+v, is %+v", pool, now)
	}
	if now := [2]int{engines[0].Requests(), engines[1].Requests()}; now != asked {
		t.Errorf("the engines were sent %v requests, then %v", asked, now)
	}
	after := s.scrape(t)
	for name, v := range after {
		switch {
		case !strings.HasPrefix(name, "caddy_kv_router_"), strings.Contains(name, `outcome="query"`):
		case strings.Contains(name, "untokenized"): // these engines have no tokenizer, which is counted
		case before[name] != v:
			t.Errorf("%s was %v, is %v", name, before[name], v)
		}
	}
	if n := after.value(requestsTotal, `outcome="query"`) - before.value(requestsTotal, `outcome="query"`); n != float64(queries) || queries != 32 {
		t.Errorf("%v of %d queries were counted", n, queries)
	}
	// The query did not use up the policy's turn either.
	last := s.mustChat(t, ask("next")).engine()
	if last == home {
		t.Errorf("the turn is %s's again", last)
	}
}

// TestQueryIsRefusedAsItsRequest has queries of requests that the router refuses.
func TestQueryIsRefusedAsItsRequest(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, numbered(engines), "trust explain pins overrides"))
	const query = `{"annotations":["query_instance_id"],`
	wantError(t, "unknown worker", s.chat(t.Context(), wishing("x", query+`"backend_instance_id":9}`)), 400, "invalid_pin", "id 9")
	wantError(t, "taints", s.chat(t.Context(), wishing("x", query+`"routing_constraints":{"required_taints":["gold"]}}`)), 503, "no_worker", `["gold"]`)
	s.drain(t, engines[0], "drain")
	if q := queried(t, s.mustChat(t, wishing("x", query+`"dp_rank":0}`)), false); q.NVExt.WorkerID["decode_worker_id"] != 2 {
		t.Errorf("told %v, while worker 1 is drained", q.NVExt.WorkerID)
	}
}
