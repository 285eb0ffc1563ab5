package tests

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// carried is the part of an answer's nvext that the router makes.
type carried struct {
	WorkerID *struct {
		Prefill     *uint64 `json:"prefill_worker_id"`
		PrefillRank *uint32 `json:"prefill_dp_rank"`
		Decode      *uint64 `json:"decode_worker_id"`
		DecodeRank  *uint32 `json:"decode_dp_rank"`
	} `json:"worker_id"`
	Timing *struct {
		Received *uint64  `json:"request_received_ms"`
		Wait     *float64 `json:"prefill_wait_time_ms"`
		Prefill  *float64 `json:"prefill_time_ms"`
		TTFT     *float64 `json:"ttft_ms"`
		Total    *float64 `json:"total_time_ms"`
		HitRate  *float64 `json:"kv_hit_rate"`
		Depth    *uint64  `json:"router_queue_depth"`
	} `json:"timing"`
	TokenIDs []uint32        `json:"token_ids"`
	Own      json.RawMessage `json:"mine"`
}

// chunk is the part of a chunk, or of a plain answer, that the tests check.
type chunk struct {
	Choices []struct {
		Finish *string `json:"finish_reason"`
	} `json:"choices"`
	Usage json.RawMessage `json:"usage"`
	NVExt *carried        `json:"nvext"`
}

// chunksOf returns the chunks of a stream, or a plain answer as one.
func chunksOf(t *testing.T, a answer, stream bool) (list []chunk) {
	t.Helper()
	docs := []string{string(a.body)}
	if stream {
		docs = nil
		for line := range strings.Lines(string(a.body)) {
			if data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: "); ok && data != "[DONE]" {
				docs = append(docs, data)
			}
		}
	}
	for _, d := range docs {
		var c chunk
		if err := json.Unmarshal([]byte(d), &c); err != nil {
			t.Fatalf("%s: %v", d, err)
		}
		list = append(list, c)
	}
	return list
}

// withoutNVExt removes the nvext that the router added. The engines' own nvext here is
// {"mine":1}, or there is none.
func withoutNVExt(body []byte) []byte {
	const added = `"(?:worker_id|timing)":\{[^{}]*\}|"token_ids":\[[0-9,]*\]`
	body = regexp.MustCompile(`(?s)^(event: [a-z_]+\n: [^\n]*\n\n)*`).ReplaceAll(body, nil)
	body = regexp.MustCompile(`,"nvext":\{(?:(?:`+added+`),?)+\}`).ReplaceAll(body, nil)
	return regexp.MustCompile(`(\{"mine":1)(?:,(?:`+added+`))+\}`).ReplaceAll(body, []byte("$1}"))
}

const explained = "trust explain"

// asksFor returns a request's body with these extra fields.
func asksFor(path string, stream bool, fields ...string) []byte {
	list, _ := json.Marshal(fields)
	prompt := `"messages":[{"role":"user","content":"` + strings.Repeat("some words ", 20) + `"}]`
	if path == "/v1/completions" {
		prompt = `"prompt":[1, 2,30000,4]`
	}
	return fmt.Appendf(nil, `{"model":"canned",%s,"stream":%v,"nvext":{"extra_fields":%s}}`, prompt, stream, list)
}

// TestAnswersCarryWhatIsAskedFor requests each member, alone and together. The engines
// have an nvext of their own or none. Split from nvext, the bytes equal those of an
// ordinary answer.
func TestAnswersCarryWhatIsAskedFor(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines, explained, fmt.Sprintf("worker %s {\nid 9007199254740991\n}", engines[0].Addr())))
	own := func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.Header.Get("X-Streamed") == "" {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprintf(w, `{ "choices":[{"index":0,"text":"abc","message":{"role":"assistant","content":"abc"},"finish_reason":"stop"}],"nvext":{"mine":1}} `+"\n")
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for _, c := range "abc" {
			fmt.Fprintf(w, ": ping\n\ndata: {\"choices\":[{\"index\":0,\"text\":\"%c\",\"delta\":{\"content\":\"%c\"}}],\"nvext\":{\"mine\":1}}\r\n\r\n", c, c)
			http.NewResponseController(w).Flush()
		}
		fmt.Fprintf(w, "data: {\"nvext\":{\"mine\":1},\"choices\":[{\"index\":0,\"delta\":{},\"text\":\"\",\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n%s", body[len(body):])
	}
	for _, engine := range []string{"Plain", "OwnNVExt"} {
		for _, path := range []string{"/v1/chat/completions", "/v1/completions"} {
			for _, stream := range []bool{true, false} {
				for _, fields := range [][]string{{"worker_id"}, {"timing"}, {"token_ids"}, {"worker_id", "timing", "token_ids", "nonsense"}, {"engine_data"}} {
					t.Run(fmt.Sprintf("%s%s/%v/%s", engine, path, stream, strings.Join(fields, "+")), func(t *testing.T) {
						engines[0].SetHandler(nil)
						header := []string{}
						if engine == "OwnNVExt" {
							engines[0].SetHandler(own)
							if stream {
								header = []string{"X-Streamed", "1"}
							}
						}
						plain := s.post(t.Context(), path, asksFor(path, stream), header...)
						a := s.post(t.Context(), path, asksFor(path, stream, fields...), header...)
						if !a.ok() || !plain.ok() {
							t.Fatalf("status %d, error %v, body %q", a.status, a.err, a.body)
						}
						if back := withoutNVExt(a.body); !bytes.Equal(back, plain.body) {
							t.Errorf("besides nvext the answer is\n%q, want\n%q", back, plain.body)
						}
						checkCarried(t, chunksOf(t, a, stream), stream, path, fields, engine == "OwnNVExt")
					})
				}
			}
		}
	}
	s.booksAtZero(t)
}

// checkCarried compares an answer's nvext with the requested fields.
func checkCarried(t *testing.T, chunks []chunk, stream bool, path string, fields []string, own bool) {
	t.Helper()
	asked := " " + strings.Join(fields, " ") + " "
	has := func(name string) bool { return strings.Contains(asked, " "+name+" ") }
	for i, c := range chunks {
		x := c.NVExt
		if x == nil {
			x = new(carried)
		}
		final := !stream || len(c.Choices) > 0 && c.Choices[0].Finish != nil
		if own != (x.Own != nil) {
			t.Errorf("chunk %d: the engine's own member is %s", i, x.Own)
		}
		if (x.WorkerID != nil) != has("worker_id") {
			t.Errorf("chunk %d: worker_id %+v", i, x.WorkerID)
		}
		if w := x.WorkerID; w != nil {
			if *w.Decode != 1<<53-1 || *w.Prefill != 1<<53-1 || *w.DecodeRank != 0 || *w.PrefillRank != 0 {
				t.Errorf("chunk %d: worker_id %d/%d %d/%d", i, *w.Prefill, *w.PrefillRank, *w.Decode, *w.DecodeRank)
			}
		}
		if (x.Timing != nil) != (has("timing") && final) {
			t.Errorf("chunk %d: timing %+v", i, x.Timing)
		}
		if x.Timing != nil {
			checkTiming(t, x, stream)
		}
		want := ""
		if has("token_ids") && final && path == "/v1/completions" {
			want = "[1 2 30000 4]"
		}
		if got := fmt.Sprint(x.TokenIDs); got != want && (got != "[]" || want != "") {
			t.Errorf("chunk %d: token_ids %s, want %s", i, got, want)
		}
	}
}

func checkTiming(t *testing.T, x *carried, stream bool) {
	t.Helper()
	m := x.Timing
	if m.Received == nil || m.Wait == nil || m.Total == nil || m.Depth == nil {
		t.Fatalf("timing %+v", m)
	}
	if age := time.Since(time.UnixMilli(int64(*m.Received))); age < -time.Millisecond || age > time.Minute {
		t.Errorf("received %v ago", age)
	}
	if *m.Wait < 0 || *m.Total < *m.Wait || *m.Depth != 0 {
		t.Errorf("waited %v of %v ms, behind %d", *m.Wait, *m.Total, *m.Depth)
	}
	if (m.TTFT != nil) != stream || (m.Prefill != nil) != stream {
		t.Errorf("first token: %+v", m) // of a plain answer it is not seen
	}
	if stream {
		if d := *m.TTFT - *m.Wait - *m.Prefill; d < -0.01 || d > 0.01 || *m.TTFT > *m.Total {
			t.Errorf("%v ms waited and %v ms of prefill are %v ms, of %v", *m.Wait, *m.Prefill, *m.TTFT, *m.Total)
		}
	}
	if m.HitRate != nil && (*m.HitRate < 0 || *m.HitRate > 1) {
		t.Errorf("hit ratio %v", *m.HitRate)
	}
}

// TestHitRateIsTheEnginesOrPredicted requests the hit ratio. The usage of a plain answer
// is known at its end. The usage of a stream comes after the last chunk.
func TestHitRateIsTheEnginesOrPredicted(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	engines[0].SetHandler(usageAnswer(`{"prompt_tokens":1000,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":250}}`))
	s := startCaddy(t, route(engines, explained))
	body := asksFor("/v1/chat/completions", false, "timing")
	if a := s.post(t.Context(), "/v1/chat/completions", body); *chunksOf(t, a, false)[0].NVExt.Timing.HitRate != 0.25 {
		t.Errorf("the engine reports 250 of 1000, the answer is %s", a.body)
	}
	engines[0].SetHandler(nil)
	body = asksFor("/v1/chat/completions", true, "timing")
	a := s.post(t.Context(), "/v1/chat/completions", body) // the second time
	list := chunksOf(t, a, true)
	if r := list[len(list)-1].NVExt.Timing.HitRate; r == nil || *r < 0.5 {
		t.Errorf("asked again, the hit ratio is %v", r)
	}
}

// TestUsageAndNVExtTogether removes a usage chunk that the client did not ask for. The
// router adds nvext to the same stream.
func TestUsageAndNVExtTogether(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines, explained, "inject_usage"))
	a := s.post(t.Context(), "/v1/chat/completions", asksFor("/v1/chat/completions", true, "worker_id", "timing"))
	list := chunksOf(t, a, true)
	for i, c := range list {
		if c.Usage != nil || len(c.Choices) == 0 || c.NVExt == nil || c.NVExt.WorkerID == nil {
			t.Errorf("chunk %d of %d: %+v", i, len(list), c)
		}
	}
	if !a.ok() || len(list) < 3 || list[len(list)-1].NVExt.Timing == nil {
		t.Errorf("status %d, error %v, %d chunks", a.status, a.err, len(list))
	}
	if asked := string(lastOf(engines[0]).Body); !strings.Contains(asked, "include_usage") || strings.Contains(asked, "nvext") {
		t.Errorf("the engine was sent %s", asked)
	}
}

// TestAnnotationsComeFirst checks that requested annotation events come before the answer.
func TestAnnotationsComeFirst(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines, explained))
	const ids = "event: request_id\n: \"my\\\"id\\\"\"\n\n"
	body := func(prompt string, stream bool, ext string) []byte {
		return fmt.Appendf(nil, `{"model":"canned",%s,"stream":%v,"nvext":%s}`, prompt, stream, ext)
	}
	const all = `{"annotations":["request_id","token_ids","formatted_prompt","unheard_of"],"extra_fields":["worker_id"]}`
	for _, c := range []struct{ name, path, prompt, ext, want string }{
		{"Chat", "/v1/chat/completions", `"messages":[{"role":"user","content":"q"}]`, all, ids},
		{"Text", "/v1/completions", `"prompt":"a\n\"b\" é"`, all, ids + "event: formatted_prompt\n: \"a\\n\\\"b\\\" é\"\n\n"},
		{"Tokens", "/v1/completions", `"prompt":[ 1, 4294967295 ]`, all, ids + "event: token_ids\n: [1,4294967295]\n\n"},
		{"TokenData", "/v1/completions", `"prompt":"x"`, `{"token_data":[7,8],"annotations":["token_ids"]}`, "event: token_ids\n: [7,8]\n\n"},
		{"OfTwo", "/v1/completions", `"prompt":["x","y"]`, `{"annotations":["formatted_prompt","token_ids"]}`, ""},
		{"None", "/v1/completions", `"prompt":"x"`, `{"annotations":[]}`, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			sees := c.prompt // the engine
			if c.name == "TokenData" {
				sees = `"prompt":[7,8]`
			}
			plain := s.post(t.Context(), c.path, body(sees, true, "{}"))
			a := s.post(t.Context(), c.path, body(c.prompt, true, c.ext), "X-Request-Id", `my"id"`)
			before, found := strings.CutSuffix(string(withoutWorker(a.body)), string(plain.body))
			if !a.ok() || !found || before != c.want {
				t.Errorf("status %d, error %v, before the answer is %q, want %q", a.status, a.err, before[:min(300, len(before))], c.want)
			}
			whole := s.post(t.Context(), c.path, body(c.prompt, false, strings.Replace(c.ext, "worker_id", "x", 1)))
			if !whole.ok() || bytes.Contains(whole.body, []byte("event:")) {
				t.Errorf("a plain answer is %s", whole.body)
			}
		})
	}
	t.Run("IdOfItsOwn", func(t *testing.T) { // by which the choice is found
		for _, named := range []string{"", "not printable: é"} {
			a := s.post(t.Context(), "/v1/completions", body(`"prompt":"x"`, true, `{"annotations":["request_id"]}`), "X-Request-Id", named)
			id := regexp.MustCompile(`^event: request_id\n: "([0-9a-f]+)"\n\n`).FindSubmatch(a.body)
			if id == nil {
				t.Fatalf("the answer is %q", a.body)
			}
			var past []struct{ N int }
			s.api(t, http.MethodGet, defaultPool+"/choices?request_id="+string(id[1]), nil, &past)
			if len(past) != 1 {
				t.Errorf("request %s has %d choices", id[1], len(past))
			}
		}
	})
}

func withoutWorker(body []byte) []byte {
	return regexp.MustCompile(`,"nvext":\{"worker_id":\{[^{}]*\}\}`).ReplaceAll(body, nil)
}

// TestAnswersThatCarryNothing has answers into which the router cannot put nvext. They
// pass byte for byte, and the router counts each omission.
func TestAnswersThatCarryNothing(t *testing.T) {
	const longEvent = `data: {"choices":[{"index":0,"delta":{"content":"`
	long := longEvent + strings.Repeat("x", 1<<20) + `"}}]}` + "\n\ndata: [DONE]\n\n"
	for _, c := range []struct {
		name, path, kind, coding, body string
		status                         int
		counted                        float64
	}{
		{"Error", "/v1/chat/completions", "application/json", "", `{"error":{"message":"m"}}`, 400, 0},
		{"ErrorEvent", "/v1/chat/completions", "text/event-stream", "", "data: {\"error\":{\"message\":\"m\"}}\n\ndata: [DONE]\n\n", 200, 0},
		{"ErrorWithAGoodStatus", "/v1/chat/completions", "application/json", "", `{"object":"error","message":"m"}`, 200, 0},
		{"NoJSON", "/v1/chat/completions", "text/html", "", `<html>`, 200, 0},
		{"Compressed", "/v1/chat/completions", "application/json", "br", "packed", 200, 1},
		{"CompressedStream", "/v1/chat/completions", "text/event-stream", "br", "packed", 200, 1},
		{"LongEvent", "/v1/chat/completions", "text/event-stream", "", long, 200, 1},
		{"OtherAPI", "/v1/messages", "application/json", "", `{"type":"message","content":[],"stop_reason":"end_turn"}`, 200, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			engines := startEngines(t, 1, canned.Pace{})
			s := startCaddy(t, route(engines, explained, "pool omitted-"+c.name))
			before := s.scrape(t)
			engines[0].SetHandler(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", c.kind)
				if c.coding != "" {
					w.Header().Set("Content-Encoding", c.coding)
				}
				w.WriteHeader(c.status)
				io.WriteString(w, c.body)
			})
			stream := c.kind == "text/event-stream"
			a := s.post(t.Context(), c.path, asksFor(c.path, stream, "worker_id", "timing"))
			if a.status != c.status || a.err != nil || string(a.body) != c.body {
				t.Errorf("status %d, error %v, %d bytes %.200q; want %d bytes", a.status, a.err, len(a.body), a.body, len(c.body))
			}
			s.booksAtZero(t)
			s.wantFigures(t, before, []figure{{fallbacksTotal, []string{`pool="omitted-` + c.name + `"`, `reason="nvext_omitted"`}, c.counted}})
		})
	}
}

// TestDynamoIsLeftToItself has a Dynamo, which gets the nvext and serves it. The router
// only replaces the worker ids with those that the client knows.
func TestDynamoIsLeftToItself(t *testing.T) {
	e := startOwn(t, &ownRequests{answer: func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "event: request_id\n: \"theirs\"\n\n"+
			`data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}],"nvext":{"worker_id":{"decode_worker_id":7},"mine":1}}`+"\n\ndata: [DONE]\n\n")
	}})
	s := startCaddy(t, "kv_router "+e.addr+" {\n"+explained+"\n"+speculates+"\nworker "+e.addr+" {\nid 42\nengine dynamo\n}\n}")
	before := s.scrape(t)
	a := s.post(t.Context(), "/v1/chat/completions", []byte(`{"messages":[{"role":"user","content":"q"}],"stream":true,"nvext":{"annotations":["request_id"],"extra_fields":["worker_id"],"agent_hints":{"speculative_prefill":true}}}`))
	if !a.ok() || strings.Count(string(a.body), "event: ") != 1 || !strings.HasPrefix(string(a.body), "event: request_id\n: \"theirs\"\n\n") ||
		!strings.Contains(string(a.body), `"nvext":{"mine":1,"worker_id":{"prefill_worker_id":42,"prefill_dp_rank":0,"decode_worker_id":42,"decode_dp_rank":0}}`) {
		t.Errorf("status %d, error %v, body %s", a.status, a.err, a.body)
	}
	s.booksAtZero(t)
	s.wantFigures(t, before, []figure{{speculativeTotal, nil, 0}})
	if own, _ := e.counts(); own != 0 {
		t.Errorf("the router computes beforehand, too: %s", e.body)
	}
}
