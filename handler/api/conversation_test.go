package api

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

const someTools = `[ {"type": "function", "function":{"name":"f", "description":"a \" b  cé", "parameters": {"type": "object", "x": [1, "a b"]}}},
	{"type":"function","function":{"parameters":{"type":"object"},"name":"g"}} ]`

// A conversation has one canonical text in every API and spelling. Each turn's
// prediction is what the next turn begins with, also when that uses another
// API.
func TestOneConversationThroughAllAPIs(t *testing.T) {
	apis := []struct {
		api           API
		request       func(speller, string, []message) string
		stream, plain func(speller, message) [][]byte
	}{
		{chat{}, speller.request, speller.stream, speller.plain},
		{responses{}, speller.responsesRequest, speller.responsesStream, speller.responsesPlain},
		{messages{}, speller.messagesRequest, speller.messagesStream, speller.messagesPlain},
	}
	for seed := range uint64(250) {
		s := speller{rand.New(rand.NewPCG(seed, 11))}
		tools := ""
		if s.IntN(2) == 0 {
			tools = someTools
		}
		var msgs []message
		if s.IntN(2) == 0 {
			msgs = append(msgs, message{role: "system", text: "x" + s.words(60)})
		}
		role := "user"
		for turn := range 4 {
			if role == "tool" && s.IntN(2) == 0 {
				msgs = append(msgs, message{role: role, text: s.words(40)})
				role = "user"
			}
			msgs = append(msgs, message{role: role, text: s.words(60)})
			via := apis[s.IntN(len(apis))]
			r := mustParse(t, via.api, via.request(s, tools, msgs))
			want := canonical(tools, msgs)
			if r.Kind != Text || r.Bytes != int64(len(want)) || !slices.Equal(r.Blocks, blocksOf(want)) {
				t.Fatalf("seed %d turn %d: %s does not read the prompt as %q", seed, turn, via.api.Name(), want)
			}
			answer := message{role: "assistant", text: s.words(60)}
			role = "user"
			for range s.IntN(3) {
				answer.calls = append(answer.calls, s.call(false))
				role = "tool"
			}
			stream := s.IntN(3) > 0
			reads := via.plain
			if stream {
				reads = via.stream
			}
			a := observe(r, stream)
			var all []byte
			for _, p := range reads(s, answer) {
				p = slices.Clone(p)
				all = append(all, p...)
				a.Write(p)
				clear(p) // it must not have been kept
			}
			a.Finish()
			msgs = append(msgs, answer)
			if got := a.Prediction(); !a.Done() || !slices.Equal(got, blocksOf(canonical(tools, msgs))) {
				t.Fatalf("seed %d turn %d: %s predicts %d blocks, done %v, answer %+v\n%s", seed, turn, via.api.Name(), len(got), a.Done(), answer, all)
			}
			if n, _, cached := a.Usage(); n != 9 || cached != -1 {
				t.Fatalf("seed %d: %s: usage %d, %d", seed, via.api.Name(), n, cached)
			}
			if (answer.text != "" || len(answer.calls) > 0) && !a.FirstToken() {
				t.Fatalf("seed %d: %s: no first token\n%s", seed, via.api.Name(), all)
			}
		}
	}
}

// same parses bodies of several APIs and checks that they have one chain.
func same(t *testing.T, forms map[string]API) {
	t.Helper()
	var want *Request
	first := ""
	for body, a := range forms {
		r := mustParse(t, a, body)
		if r.Kind != Text || len(r.Blocks) == 0 {
			t.Fatalf("no blocks: %s", body)
		}
		if want == nil {
			want, first = r, body
		}
		if !slices.Equal(r.Blocks, want.Blocks) || r.Bytes != want.Bytes || !bytes.Equal(r.rest.tail, want.rest.tail) ||
			r.Root != want.Root || r.Media != want.Media || r.MediaTokens != want.MediaTokens {
			t.Errorf("differ:\n%s\n%s\n%q %q, media %d %d", first, body, want.rest.tail, r.rest.tail, want.MediaTokens, r.MediaTokens)
		}
	}
}

func TestSystemPromptThroughAllAPIs(t *testing.T) {
	same(t, map[string]API{
		`{"model":"m","messages":[{"role":"system","content":"You are kind."},{"role":"user","content":"hello there"}]}`:                                                                                               chat{},
		`{"model":"m","system":"You are kind.","messages":[{"role":"user","content":"hello there"}]}`:                                                                                                                  messages{},
		`{"model":"m","system":[{"type":"text","text":"You are ","cache_control":{"type":"ephemeral"}},{"type":"text","text":"kind."}],"messages":[{"role":"user","content":[{"type":"text","text":"hello there"}]}]}`: messages{},
		`{"model":"m","instructions":"You are kind.","input":"hello there"}`:                                                                                                                                           responses{},
		`{"model":"m","instructions":null,"input":[{"role":"system","content":"You are kind."},{"role":"user","content":[{"type":"input_text","text":"hello there"}]}]}`:                                               responses{},
	})
	same(t, map[string]API{
		`{"messages":[{"role":"developer","content":"Be brief."},{"role":"user","content":"hello"}]}`: chat{},
		`{"input":[{"role":"developer","content":"Be brief."},{"role":"user","content":"hello"}]}`:    responses{},
	})
	if a, b := mustParse(t, chat{}, `{"messages":[{"role":"developer","content":"Be brief, please."}]}`),
		mustParse(t, responses{}, `{"instructions":"Be brief, please.","input":""}`); a.Blocks[0] == b.Blocks[0] {
		t.Error("developer is not system")
	}
}

func TestToolsThroughAllAPIs(t *testing.T) {
	user := `"messages":[{"role":"user","content":"hello"}]`
	same(t, map[string]API{
		`{"tools":[{"type":"function","function":{"name":"w","description":"the weather","parameters":{"type":"object"}}}],` + user + `}`:                         chat{},
		`{"tools":[{"function":{"parameters":{ "type" : "object" },"strict":true,"description":"the we\u0061ther","name":"w"}}],` + user + `}`:                    chat{},
		`{"functions":[{"name":"w","description":"the weather","parameters":{"type":"object"}}],` + user + `}`:                                                    chat{},
		`{"tools":[{"name":"w","description":"the weather","input_schema":{"type":"object"}}],` + user + `}`:                                                      messages{},
		`{"tools":[{"type":"custom","name":"w","cache_control":{"type":"ephemeral"},"description":"the weather","input_schema":{"type":"object"}}],` + user + `}`: messages{},
		`{"tools":[{"type":"function","name":"w","description":"the weather","parameters":{"ty\u0070e":"object"}}],"input":"hello"}`:                              responses{},
	})
	same(t, map[string]API{ // of servers' tools a moved breakpoint does not count
		`{"tools":[{"type":"web_search_20250305","name":"web_search","max_uses":5}],` + user + `}`:                                       messages{},
		`{"tools":[{"type":"web_search_20250305","name":"web_search","max_uses": 5,"cache_control":{"type":"ephemeral"}}],` + user + `}`: messages{},
	})
}

func TestToolCallsThroughAllAPIs(t *testing.T) {
	same(t, map[string]API{
		`{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"let me see","tool_calls":[{"id":"1","type":"function","function":{"name":"w","arguments":"{\"city\": \"Z\u00fcrich \\\"x\\\"\", \"n\": 1}"}}]},{"role":"tool","tool_call_id":"1","content":"20 degrees"},{"role":"user","content":"thanks"}]}`:                                                                 chat{},
		`{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":"let me see","tool_calls":[{"function":{"name":"w","arguments":"\n{\"city\":\"Z\\u00FCrich \\u0022x\\\"\",\"n\":1}"}}]},{"role":"tool","content":[{"type":"text","text":"20 degrees"}]},{"role":"user","content":"thanks"}]}`:                                                                                   chat{},
		`{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":[{"type":"thinking","thinking":"hm"},{"type":"text","text":"let me see"},{"type":"tool_use","id":"t","name":"w","input":{ "city" : "Zürich \"x\"", "n":1 }}]},{"role":"user","content":[{"type":"tool_result","tool_use_id":"t","content":"20 degrees"},{"type":"text","text":"thanks"}]}]}`:                    messages{},
		`{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":[{"type":"tool_use","id":"t","name":"w","input":{"city":"Z\u00fcrich \"x\"","n":1}},{"type":"text","text":"let me see"}]},{"role":"user","content":[{"type":"text","text":"thanks"},{"type":"tool_result","tool_use_id":"t","content":[{"type":"text","text":"20 degrees"}]}]}]}`:                               messages{},
		`{"input":[{"role":"user","content":"hi"},{"type":"message","role":"assistant","content":[{"type":"output_text","text":"let me see"}]},{"type":"reasoning","summary":[]},{"type":"function_call","call_id":"1","name":"w","arguments":"{\"city\":\"Zürich \\\"x\\\"\",\"n\":1}"},{"type":"function_call_output","call_id":"1","output":"20 degrees"},{"role":"user","content":"thanks"}]}`: responses{},
	})
	same(t, map[string]API{ // calls without text, and two of them
		`{"messages":[{"role":"user","content":"hello you"},{"role":"assistant","content":null,"tool_calls":[{"function":{"name":"a","arguments":"{}"}},{"function":{"name":"b","arguments":"{ }"}}]},{"role":"tool","content":"1"},{"role":"tool","content":"2"}]}`:                           chat{},
		`{"messages":[{"role":"user","content":"hello you"},{"role":"assistant","content":[{"type":"tool_use","name":"a","input":{}},{"type":"tool_use","name":"b","input":{}}]},{"role":"user","content":[{"type":"tool_result","content":"1"},{"type":"tool_result","content":"2"}]}]}`:      messages{},
		`{"input":[{"role":"user","content":"hello you"},{"type":"function_call","name":"a","arguments":"{}"},{"type":"function_call","name":"b","arguments":"{}"},{"type":"function_call_output","output":"1"},{"type":"function_call_output","output":[{"type":"input_text","text":"2"}]}]}`: responses{},
	})
}

func TestHistoryOnTheServer(t *testing.T) {
	for body, want := range map[string][2]string{
		`{"input":"hello","previous_response_id":"resp_1"}`:        {"resp_1", ""},
		`{"input":"hello","conversation":"conv_1"}`:                {"", "conv_1"},
		`{"input":"hello","conversation":{"id":"conv_2"}}`:         {"", "conv_2"},
		`{"input":"hello","prompt":{"id":"p"}}`:                    {},
		`{"input":[{"type":"item_reference","id":"msg_1"}]}`:       {},
		`{"input":[{"id":"msg_1"},{"role":"user","content":"x"}]}`: {},
	} {
		r := mustParse(t, responses{}, body)
		if r.Kind != None || r.Blocks != nil || r.PreviousResponse != want[0] || r.Conversation != want[1] {
			t.Errorf("%s: %+v", body, r)
		}
	}
	if r := mustParse(t, responses{}, `{"input":"hello","previous_response_id":null,"conversation":null,"prompt":null}`); r.Kind != Text {
		t.Errorf("%+v", r)
	}
}

func TestSessionIdentity(t *testing.T) {
	r := mustParse(t, messages{}, `{"metadata":{"user_id":"user_a_session_b"},"prompt_cache_key":"k","session_id":"s","messages":[]}`)
	if r.UserSession != "b" || r.CacheKey != "k" || r.SessionID != "s" {
		t.Errorf("%+v", r)
	}
	for _, body := range []string{`{"session_params":{"id":"s"}}`, `{"session_params":{"session_id":"s","offset":1}}`, `{"session_params":{"id":"x"},"session_id":"s"}`, `{"session_id":"s","session_params":{"id":"x"}}`} {
		if r := mustParse(t, generate{}, body); r.SessionID != "s" {
			t.Errorf("%s: %q", body, r.SessionID)
		}
	}
}

// What a call's arguments are must not depend on how they are cut, nor on
// whether they came as text or as a value.
func TestArgumentsInPieces(t *testing.T) {
	s := speller{rand.New(rand.NewPCG(21, 22))}
	for range 2000 {
		raw := s.members([]string{s.words(4), s.words(20), s.words(4), s.words(20)})
		if s.IntN(4) == 0 { // broken escapes, too
			at := s.IntN(len(raw))
			for !utf8.RuneStart(raw[at]) {
				at--
			}
			raw = raw[:at] + []string{`\u12`, `\ud83d`, `\ud83d\u0041`, `\x`, `\ud83d\ud83d\ude00`}[s.IntN(5)] + raw[at:]
		}
		whole, pieces := newHasher(16, 1), newHasher(16, 1)
		whole.addArguments([]byte(raw))
		var args []byte
		for _, piece := range s.split(raw) {
			piece = s.str(piece)
			args = appendArguments(args, []byte(piece), rawjson.Span{End: len(piece)})
		}
		pieces.addArguments(args)
		if !slices.Equal(pieces.blocks, whole.blocks) || !bytes.Equal(pieces.tail, whole.tail) {
			t.Fatalf("%s: %q %q", raw, pieces.tail, whole.tail)
		}
		if mustScan(raw) && strings.HasPrefix(raw, "{") {
			value := newHasher(16, 1)
			value.addJSON([]byte(raw))
			if !slices.Equal(value.blocks, whole.blocks) || !bytes.Equal(value.tail, whole.tail) {
				t.Fatalf("%s: %q %q", raw, value.tail, whole.tail)
			}
		}
	}
}

func mustScan(raw string) bool {
	v, ok := rawjson.ValueAt([]byte(raw), 0)
	return ok && v.End == len(raw)
}
