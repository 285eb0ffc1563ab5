package tests

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/tidwall/gjson"
)

// parsedStory is a vLLM's answer of reasoning, text and a tool call, a token each piece. A request
// goes on by ids through the scale-out endpoints: that of piece i is i. Some pieces say nothing.
type parsedStory struct {
	cuts    sync.Map // questions whose streams were cut, to how often
	refuses bool     // to render
	mute    bool     // no ids
	fails   bool     // to derender the rest
	aborts  bool     // the first rest
}

const (
	parsedPieces = 24   // 8 of each kind
	parsedPrompt = 1000 // ids
)

// delta is what pieces from one up to another say.
func (s *parsedStory) delta(from, to int) map[string]any {
	d := map[string]any{}
	for i := from; i < to; i++ {
		piece := fmt.Sprintf(" p%d\n", i)
		if s.silent(i) {
			continue
		}
		switch i / 8 {
		case 0:
			d["reasoning"] = fmt.Sprint(orEmpty(d["reasoning"]), piece)
		case 1:
			d["content"] = fmt.Sprint(orEmpty(d["content"]), piece)
		default:
			f := map[string]any{"arguments": piece}
			call := map[string]any{"index": 0, "function": f}
			if before, ok := d["tool_calls"].([]any); ok {
				call = before[0].(map[string]any)
				f = call["function"].(map[string]any)
				f["arguments"] = fmt.Sprint(f["arguments"], piece)
			}
			if i == 16 {
				call["id"], call["type"], f["name"] = "call-1", "function", "f"
			}
			d["tool_calls"] = []any{call}
		}
	}
	return d
}

// silent returns whether a piece is a control token, or half a character.
func (*parsedStory) silent(i int) bool { return i == 0 || i == 8 || i == 13 || i == 19 }

func orEmpty(v any) any {
	if v == nil {
		return ""
	}
	return v
}

func (s *parsedStory) answer(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	q := gjson.ParseBytes(body)
	value := func(v any) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(v)
	}
	type m = map[string]any
	switch path := r.URL.Path; {
	case s.refuses && (strings.HasSuffix(path, "render") || strings.HasPrefix(path, "/inference")):
		http.Error(w, `{"error":{"message":"Scale-out endpoints are disabled.","code":403}}`, http.StatusForbidden)
	case strings.HasSuffix(path, "/derender"):
		from := int(q.Get("stream_state.output_token_ids.#").Int())
		ids := q.Get("generate_chunk.choices.0.token_ids").Array()
		all := q.Get("stream_state.output_token_ids").Array()
		read, sum := []int64{}, 0
		for _, n := range q.Get("stream_state.output_chunk_lens").Array() {
			read, sum = append(read, n.Int()), sum+int(n.Int())
		}
		if s.fails && from > 0 {
			http.Error(w, "invalid stream_state: derender failed", http.StatusBadRequest)
			return
		}
		for i, id := range ids {
			if int(id.Int()) != from+i || sum != from || q.Get("prompt_token_ids.#").Int() != parsedPrompt || q.Get("chat_request.messages.#").Int() != 1 {
				http.Error(w, "not the next ids: "+string(body), http.StatusBadRequest)
				return
			}
		}
		state := m{"role_sent": true, "output_chunk_lens": append(read, int64(len(ids)))}
		list := []json.RawMessage{}
		for _, id := range append(all, ids...) {
			list = append(list, json.RawMessage(id.Raw))
		}
		state["output_token_ids"] = list
		d := s.delta(from, from+len(ids))
		d["role"] = nil
		if from == 0 {
			d["role"] = "assistant"
		}
		finish := q.Get("generate_chunk.choices.0.finish_reason").Value()
		if finish != nil && from+len(ids) > 16 { // whatever the reason
			finish = "tool_calls"
		}
		chunk := m{"id": "derendered", "object": "chat.completion.chunk", "created": 7, "model": "m", "usage": nil, "choices": []m{{
			"index": 0, "delta": d, "finish_reason": finish, "logprobs": nil, "token_ids": nil,
		}}}
		value(m{"chunk": chunk, "stream_state": state})
	case strings.HasSuffix(path, "/render"):
		most := q.Get("max_tokens").Int()
		if most == 0 {
			most = 1000
		}
		value(m{"request_id": "r", "token_ids": make([]int, parsedPrompt), "sampling_params": m{"max_tokens": most}, "stream": true, "stream_options": m{"include_usage": true}})
	default:
		from := 0
		if strings.HasPrefix(path, "/inference") {
			from = int(q.Get("token_ids.#").Int()) - parsedPrompt
		}
		s.stream(w, r, q, from)
	}
}

// stream streams the pieces from one on, as ids or parsed.
func (s *parsedStory) stream(w http.ResponseWriter, r *http.Request, q gjson.Result, from int) {
	ids := strings.HasPrefix(r.URL.Path, "/inference")
	most := int(q.Get("max_tokens").Int() + q.Get("sampling_params.max_tokens").Int())
	end, reason := parsedPieces, "tool_calls"
	if most > 0 && from+most < end {
		end, reason = from+most, "length"
	}
	if ids && reason != "length" {
		reason = "stop"
	}
	cut := 1000
	if at := r.Header.Get("X-Cut"); at != "" {
		question := at + r.Header.Get("X-Name")
		before, again := s.cuts.LoadOrStore(question, 1)
		if !again || r.Header.Get("X-Twice") != "" && before.(int) == 1 {
			if fmt.Sscan(at, &cut); again {
				s.cuts.Store(question, 2)
				cut = 2
			}
		}
	}
	w.Header().Set("Content-Type", "text/event-stream")
	events := 0
	event := func(data string) {
		if events++; events > cut { // within an event
			_, _ = fmt.Fprintf(w, "data: %s", data[:len(data)/2])
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}
		_, _ = fmt.Fprintf(w, "data: %s\n\n", data)
		_ = http.NewResponseController(w).Flush()
	}
	const head = `{"id":"one","object":"chat.completion.chunk","created":5,"model":"m",`
	asked := q.Get("return_token_ids").Bool() && !s.mute
	list := func(ids ...int) string {
		if b, _ := json.Marshal(ids); asked || ids != nil && strings.HasPrefix(r.URL.Path, "/inference") {
			return string(b)
		}
		return "null"
	}
	if !ids {
		event(head + `"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}],"prompt_token_ids":` + list(make([]int, parsedPrompt)...) + `,"prompt_text":null}`)
	}
	for i := from; i < end; i++ {
		finish := "null"
		if i == end-1 {
			finish = `"` + reason + `"`
		}
		d, _ := json.Marshal(s.delta(i, i+1))
		switch {
		case ids && s.aborts && i == from+3:
			s.aborts = false
			event(`{"request_id":"g","choices":[{"index":0,"finish_reason":"error","stop_reason":null,"token_ids":[]}]}`)
			event("[DONE]")
			return
		case ids:
			event(fmt.Sprintf(`{"request_id":"g","usage":null,"choices":[{"index":0,"finish_reason":%s,"stop_reason":null,"token_ids":%s}]}`, finish, list(i)))
		case asked || !s.silent(i) || finish != "null":
			event(fmt.Sprintf(head+`"choices":[{"index":0,"delta":%s,"finish_reason":%s,"token_ids":%s}]}`, d, finish, list(i)))
		}
	}
	usage := fmt.Sprintf(`"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":2}}}`,
		parsedPrompt+from, end-from, parsedPrompt+end)
	if ids {
		event(`{"request_id":"g",` + usage)
	} else if q.Get("stream_options.include_usage").Bool() {
		event(head + usage)
	}
	event("[DONE]")
}

// parsed is what a client reads of a parsedStory.
func parsed(body []byte) (said, others string) {
	var reasoning, content, args, name, finish, ids string
	roles, done := 0, 0
	var usage gjson.Result
	for e := range strings.SplitSeq(string(body), "\n\n") {
		data, _ := strings.CutPrefix(e, "data: ")
		if data == "[DONE]" {
			done++
		}
		v := gjson.Parse(data)
		c := v.Get("choices.0")
		if !strings.Contains(ids, v.Get("id").Str) {
			ids += v.Get("id").Str
		}
		reasoning += c.Get("delta.reasoning").Str
		content += c.Get("delta.content").Str
		args += c.Get("delta.tool_calls.0.function.arguments").Str
		name += c.Get("delta.tool_calls.0.id").Str + c.Get("delta.tool_calls.0.function.name").Str
		finish += c.Get("finish_reason").Str
		if c.Get("delta.role").Str != "" {
			roles++
		}
		if v.Get("usage").IsObject() {
			usage = v.Get("usage")
		}
	}
	return reasoning + "|" + content + "|" + args, fmt.Sprintf("%s %s %s roles %d done %d usage %d+%d=%d", name, finish, ids, roles, done,
		usage.Get("prompt_tokens").Int(), usage.Get("completion_tokens").Int(), usage.Get("total_tokens").Int())
}

// TestStreamsGoOnExactly cuts streams at every place within reasoning, text and a tool call. They go
// on by the ids of their tokens, which the client does not get.
func TestStreamsGoOnExactly(t *testing.T) {
	s := new(parsedStory)
	engines := startEngines(t, 3, canned.Pace{})
	setAll(engines, s.answer)
	caddy := startCaddy(t, route(engines, "pool exact", "engine vllm", "resume exact", "retry_budget 100% 1000/s"))
	ended := 0 // by the router
	for _, limit := range []string{"", `,"max_tokens":12`, `,"max_tokens":20`} {
		more := limit + `,"stream_options":{"include_usage":true}`
		whole := caddy.post(t.Context(), "/v1/chat/completions", storyBody(true, "whole", more))
		said, others := parsed(whole.body)
		if want := direct(engines[0]).post(t.Context(), atChat, storyBody(true, "whole", more)); string(want.body) != string(whole.body) {
			t.Errorf("exactly the client gets %s\notherwise %s", whole.body, want.body)
		}
		if strings.Contains(string(whole.body), "token_ids\":[") || !strings.Contains(others, "roles 1 done 1") {
			t.Fatalf("%s", whole.body)
		}
		for cut := range parsedPieces + 2 {
			for _, twice := range []string{"", "yes"} {
				name := fmt.Sprintf("%s after %d %s", limit, cut, twice)
				a := caddy.post(t.Context(), "/v1/chat/completions", storyBody(true, name, more), "X-Cut", fmt.Sprint(cut), "X-Name", name, "X-Twice", twice)
				if cut < 2 && twice != "" {
					continue // twice without a token
				}
				got, rest := parsed(a.body)
				if bare, ok := strings.CutSuffix(rest, " usage 0+0=0"); ok && strings.HasPrefix(others, bare+" usage ") {
					rest = others
					ended++
				}
				if got != said || rest != others || strings.Contains(string(a.body), "token_ids\":[") || strings.Contains(string(a.body), "derendered") {
					t.Errorf("%s: %v\n%s\n%s\nwant\n%s\n%s\n%s", name, a.err, got, rest, said, others, a.body)
				}
			}
		}
	}
	if n := caddy.scrape(t).value(resumedTotal, `pool="exact"`, `way="exact"`, `outcome="ok"`); n < 60 {
		t.Errorf("%v streams went on exactly", n)
	}
	if ended < 3 || ended > 12 { // those that were cut behind the reason of their end
		t.Errorf("%d streams have no usage", ended)
	}
	var past []struct{ Rest, Sentence string }
	caddy.post(t.Context(), "/v1/chat/completions", storyBody(true, "explained", ""), "X-Cut", "9", "X-Name", "explained", "X-Request-Id", "explained-1")
	caddy.api(t, http.MethodGet, "/pools/exact/choices?request_id=explained-1", nil, &past)
	if len(past) != 2 || past[0].Rest+past[1].Rest != "exact" {
		t.Errorf("explained as %+v", past)
	}
	asked := caddy.post(t.Context(), "/v1/chat/completions", storyBody(true, "asked", `,"return_token_ids":true`), "X-Cut", "9", "X-Name", "asked")
	if n := strings.Count(string(asked.body), `"token_ids":[`); n != parsedPieces-1 && n != parsedPieces { // several at once after the cut
		t.Logf("%d events with ids", n)
		if said, _ := parsed(asked.body); !strings.Contains(said, "p23") || n < 8 {
			t.Errorf("the client gets no ids: %s", asked.body)
		}
	}
	caddy.booksAtZero(t)
}

// TestExactAsks looks at which requests ask for ids.
func TestExactAsks(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	caddy := startCaddy(t, route(engines, "engine vllm", "resume exact"))
	for body, want := range map[string]bool{
		`{"model":"m","stream":true,"prompt":"hi"}`:                                       true,
		`{"model":"m","stream":true,"prompt":"hi","echo":true}`:                           false,
		`{"model":"m","stream":true,"prompt":"hi","n":2}`:                                 false,
		`{"model":"m","stream":true,"prompt":"hi","logprobs":1}`:                          false,
		`{"model":"m","stream":true,"prompt":"hi","stop":"x"}`:                            false,
		`{"model":"m","stream":true,"prompt":[1,2,3]}`:                                    false,
		`{"model":"m","stream":true,"prompt":"` + strings.Repeat("long ", 100_000) + `"}`: false,
		`{"model":"m","prompt":"hi"}`:                                                     false,
	} {
		before := [2]int{len(engines[0].Journal()), len(engines[1].Journal())}
		caddy.post(t.Context(), "/v1/completions", []byte(body))
		got := false
		for _, r := range slices.Concat(engines[0].Journal()[before[0]:], engines[1].Journal()[before[1]:]) {
			got = got || strings.Contains(string(r.Body), "return_token_ids")
		}
		equal(t, got, want, "%.80s: asks", body)
	}
}

// TestExactWithoutTheEngine has engines that do not render prompts, return no ids, or fail in the middle of the rest. The
// stream then breaks, unless only one engine fails.
func TestExactWithoutTheEngine(t *testing.T) {
	for name, s := range map[string]*parsedStory{"refused": {refuses: true}, "mute": {mute: true}, "fails": {fails: true}, "aborts": {aborts: true}} {
		engines := startEngines(t, 3, canned.Pace{})
		setAll(engines, s.answer)
		caddy := startCaddy(t, route(engines, "pool exact"+name, "engine vllm", "resume exact", "retry_budget 100% 1000/s"))
		a := caddy.post(t.Context(), atChat, storyBody(true, name, ""), "X-Cut", "6", "X-Name", name)
		said, others := parsed(a.body)
		whole := strings.Contains(others, "tool_calls") && strings.Contains(said, "p23")
		if whole != (name == "aborts") || whole == strings.Contains(string(a.body), brokenEvent) || strings.Count(said, "p3\n") != 1 {
			t.Errorf("%s: %s %s\n%s", name, said, others, a.body)
		}
		if n := caddy.logged(t, markedDown); n != 1 { // whose stream broke
			t.Errorf("%s: %d workers were marked down", name, n)
		}
		caddy.booksAtZero(t)
	}
	// plain text goes on as text
	story := newStory(24)
	caddy, _ := storyEngines(t, 3, story, "pool exacttext", "resume exact")
	a := caddy.post(t.Context(), atChat, storyBody(true, "text?", ""), "X-Cut", "9")
	if g := readTold(a.body); g.text != story.text() || g.done != 1 || g.bad != 0 {
		t.Errorf("%v: %+v", a.err, g)
	}
}
