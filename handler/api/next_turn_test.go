package api

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"
)

// answered returns the observer of an answer that has come whole.
func answered(r *Request, stream bool, most int, reads ...string) *observed {
	a := observe(r, stream)
	a.KeepText(most)
	for _, p := range reads {
		a.Write([]byte(p))
	}
	a.Finish()
	return a
}

func asEvents(data ...string) (out []string) {
	for _, d := range data {
		out = append(out, "data: "+d+"\n\n")
	}
	return out
}

// TestTextIsWhatComesBack has answers of which the text is kept, without
// reasoning, and such as nothing is known of.
func TestTextIsWhatComesBack(t *testing.T) {
	const end = stop
	chatBody, messagesBody := `{"messages":[{"role":"user","content":"q"}],"stream":true}`, `{"messages":[{"role":"user","content":"q"}],"max_tokens":9}`
	for _, c := range []struct {
		name   string
		api    API
		stream bool
		reads  []string
		want   string
	}{
		{"Stream", chat{}, true, asEvents(delta(`{"role":"assistant","content":""}`), delta(`{"content":"say \"a\""}`), delta(`{"content":"\n\u00e9"}`), end, "[DONE]"), `say \"a\"\n\u00e9`},
		{"Repeated", chat{}, true, asEvents(append(slices.Repeat([]string{delta(`{"content":"x"}`)}, 40), end)...), strings.Repeat("x", 40)},
		{"HalvesOfACharacter", chat{}, true, asEvents(delta(`{"content":"\ud83d"}`), delta(`{"content":"\ude00"}`), end), `\ud83d\ude00`},
		{"Reasoning", chat{}, true, asEvents(delta(`{"reasoning_content":"hm"}`), delta(`{"content":"a"}`), delta(`{"content":"b"}`), end), "ab"},
		{"ReasoningInTheText", chat{}, true, asEvents(delta(`{"content":"<think>hm"}`), delta(`{"content":"\n</thi"}`), delta(`{"content":"nk>\n\na\"b"}`), end), `a\"b`},
		{"OnlyItsEnd", chat{}, true, asEvents(delta(`{"content":"hm</think>a"}`), end), "a"},
		{"EscapedReasoning", chat{}, true, asEvents(delta(`{"content":"\u003cthink>hm\u003c/think>é\u0001"}`), end), `é\u0001`},
		{"ReasoningToTheEnd", chat{}, true, asEvents(delta(`{"content":"<think>hm"}`), end), ""},
		{"ThinkingAloud", chat{}, true, asEvents(delta(`{"content":"I think <thin"}`), end), `I think <thin`},
		{"Plain", chat{}, false, []string{`{"choices":[{"index":0,"message":{"role":"assistant","content":"a b","reasoning":"hm"},"finish_reason":"length"}]}`}, "a b"},
		{"ToolCall", chat{}, true, asEvents(delta(`{"content":"a"}`), delta(`{"tool_calls":[{"index":0,"id":"1","function":{"name":"f","arguments":"{}"}}]}`), end), ""},
		{"ToolCallBehindReasoning", chat{}, true, asEvents(delta(`{"reasoning":"hm"}`), delta(`{"content":"a"}`), delta(`{"tool_calls":[{"index":0,"id":"1","function":{"name":"f","arguments":"{}"}}]}`), end), ""},
		{"OldToolCall", chat{}, true, asEvents(delta(`{"content":"a"}`), delta(`{"function_call":{"name":"f"}}`), end), ""},
		{"Refusal", chat{}, true, asEvents(delta(`{"content":"a"}`), delta(`{"refusal":"no"}`), end), ""},
		{"Parts", chat{}, true, asEvents(delta(`{"content":[{"type":"text","text":"a"}]}`), end), ""},
		{"AnotherChoice", chat{}, true, asEvents(delta(`{"content":"a"}`), `{"choices":[{"index":1,"delta":{"content":"b"}}]}`, end), ""},
		{"AnotherRole", chat{}, true, asEvents(delta(`{"role":"user","content":"a"}`), end), ""},
		{"Error", chat{}, true, asEvents(delta(`{"content":"a"}`), `{"error":{"message":"m"}}`, end), ""},
		{"Aborted", chat{}, true, asEvents(delta(`{"content":"a"}`), `{"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}`), ""},
		{"Unfinished", chat{}, true, asEvents(delta(`{"content":"a"}`)), ""},
		{"Malformed", chat{}, true, asEvents(delta(`{"content":"a"}`), `{"choices":[}`, end), ""},
		{"NoText", chat{}, true, asEvents(end), ""},
		{"TooLong", chat{}, true, asEvents(delta(`{"content":"`+strings.Repeat("a", 101)+`"}`), end), ""},
		{"NoString", chat{}, true, asEvents(delta(`{"content":"a\x"}`), end), ""},
		{
			"Messages", messages{}, true, asEvents(`{"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":""}}`,
				`{"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"hm"}}`,
				`{"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}`,
				`{"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"a"}}`,
				`{"type":"message_delta","delta":{"stop_reason":"end_turn"}}`, `{"type":"message_stop"}`), "a",
		},
		{"MessagesTool", messages{}, false, []string{`{"type":"message","content":[{"type":"text","text":"a"},{"type":"tool_use","name":"f","input":{}}],"stop_reason":"tool_use"}`}, ""},
		{"MessagesServerTool", messages{}, false, []string{`{"type":"message","content":[{"type":"text","text":"a"},{"type":"web_search_tool_result"}],"stop_reason":"end_turn"}`}, ""},
	} {
		body := chatBody
		if c.api == (messages{}) {
			body = messagesBody
		}
		r := mustParse(t, c.api, body)
		if got := answered(r, c.stream, 100, c.reads...).Text(); string(got) != c.want || (got == nil) != (c.want == "") {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
		if got := answered(r, c.stream, 0, c.reads...).Text(); got != nil {
			t.Errorf("%s: %q is kept, though nobody asked", c.name, got)
		}
	}
}

// TestBlocksWithAnswerBeginTheNextTurn compares them with those of the next
// turn's own body.
func TestBlocksWithAnswerBeginTheNextTurn(t *testing.T) {
	const history = `{"role":"system","content":"be brief"},{"role":"user","content":"what is \"it\"?"}`
	const answer = `it is\nlong enough for some blocks, and é`
	for _, tools := range []string{"", `"tools":[{"type":"function","function":{"name":"f"}}],`} {
		r := mustParse(t, chat{}, `{`+tools+`"messages":[`+history+`]}`)
		blocks, past := r.BlocksWith([]byte(answer))
		next := mustParse(t, chat{}, `{`+tools+`"messages":[`+history+`,{"role":"assistant","content":"`+answer+`"},{"role":"user","content":"and then?"}]}`)
		if n := len(blocks); n <= len(r.Blocks) || !slices.Equal(next.Blocks[:n], blocks) || next.Root != r.Root {
			t.Errorf("%d blocks of prompt and answer %x, the next turn has %x", n, blocks, next.Blocks)
		}
		a := answered(r, false, 0, `{"choices":[{"index":0,"message":{"role":"assistant","content":"`+answer+`"},"finish_reason":"stop"}]}`)
		if !slices.Equal(a.Prediction(), blocks) || a.PredictionPast() != past || past <= 0 || past >= 1 {
			t.Errorf("%x and %v, the answer predicts %x and %v", blocks, past, a.Prediction(), a.PredictionPast())
		}
	}
}

func TestNextTurn(t *testing.T) {
	const two = `,{"role":"assistant","content":"A"},{"role":"user","content":"."}]`
	const asks = `"max_tokens":1,"stream":false}`
	for in, want := range map[string]string{
		`{"messages":[{"role":"user"}]}`:                                                 `{"messages":[{"role":"user"}` + two + `,` + asks,
		` {"stream":true, "model" : "m","messages":[1 ] ,"max_tokens":9} `:               ` { "model" : "m","messages":[1 ` + two + ` ,"max_tokens":1,"stream":false} `,
		`{"nvext":{},"messages":[1],"tools":[],"stream_options":{"include_usage":true}}`: `{"messages":[1` + two + `,"tools":[],` + asks,
		`{"messages":{},"n":1,"messages":[1],"priority":-9,"min_tokens":2}`:              `{"n":1,"messages":[1` + two + `,` + asks,
		`{"messages":[1],"session_params":null}`:                                         `{"messages":[1` + two + `,"session_params":null,` + asks,
		`{"m\u0061x_tokens":7,"messages":[1]}`:                                           `{"messages":[1` + two + `,` + asks,
		`{"messages":[1],"messages":[]}`:                                                 "",
		`{"messages":[1],"session_params":{"id":"s"}}`:                                   "",
		`{"messages":[1],"kv_transfer_params":{}}`:                                       "",
		`{"messages":[1],"bootstrap_room":7}`:                                            "",
		`{"messages":[ ]}`:                                                               "",
		`{"messages":{}}`:                                                                "",
		`{"messages":"x"}`:                                                               "",
		`{"prompt":"x"}`:                                                                 "",
		`{"messages":[1]`:                                                                "",
		`{"messages":[1]} x`:                                                             "",
		`[]`:                                                                             "",
		``:                                                                               "",
	} {
		out, ok := []byte("x"), false
		if r, err := Parse(chat{}, []byte(in), testOptions); err == nil {
			out, ok = r.NextTurn(out, []byte(in), []byte("A"))
		}
		if ok != (want != "") || string(out) != "x"+want {
			t.Errorf("%s: %v %s, want %s", in, ok, out, want)
		}
	}
}

// FuzzNextTurn: the body stays valid JSON, and equal but for what is said.
func FuzzNextTurn(f *testing.F) {
	f.Add([]byte(`{"messages":[{"role":"user","content":"q"}],"stream":true,"stream_options":{},"nvext":{"a":1},"max_tokens":5,"tools":[{}]}`), "an \"answer\"\n")
	f.Add([]byte(` { "stream" : true , "messages" : [ 1 ] , "nve\u0078t" : 1 , "messages":[2], "logprobs":true } `), "é")
	for _, a := range []API{chat{}, messages{}} {
		f.Add(goldenFile(f, a.Name(), "request.json"), "a")
	}
	f.Fuzz(func(t *testing.T, body []byte, answer string) {
		quoted, err := json.Marshal(answer)
		if err != nil {
			t.Fatal(err)
		}
		before := slices.Clone(body)
		r, err := Parse(chat{}, body, testOptions)
		if err != nil {
			return
		}
		out, ok := r.NextTurn(nil, body, quoted[1:len(quoted)-1])
		if !bytes.Equal(before, body) {
			t.Fatal("the body has changed")
		}
		var was, is map[string]json.RawMessage
		if !ok || json.Unmarshal(body, &was) != nil {
			return
		}
		if err := json.Unmarshal(out, &is); err != nil {
			t.Fatalf("%s: %v", out, err)
		}
		if string(is["max_tokens"]) != "1" || string(is["stream"]) != "false" {
			t.Fatalf("does not ask for one token in one piece: %s", out)
		}
		var old, list []json.RawMessage
		if json.Unmarshal(was["messages"], &old) != nil || json.Unmarshal(is["messages"], &list) != nil || len(list) != len(old)+2 {
			t.Fatalf("messages %s of %s", is["messages"], was["messages"])
		}
		var said struct{ Role, Content string }
		if err := json.Unmarshal(list[len(old)], &said); err != nil || said.Role != "assistant" {
			t.Fatalf("%s, %v", list[len(old)], err)
		}
		for i, m := range old {
			if !bytes.Equal(m, list[i]) {
				t.Fatalf("message %d: %s, was %s", i, list[i], m)
			}
		}
		maps.DeleteFunc(was, func(name string, _ json.RawMessage) bool { return ofTheTurn(name) || name == "messages" })
		maps.DeleteFunc(is, func(name string, _ json.RawMessage) bool { return ofTheTurn(name) || name == "messages" })
		if !maps.EqualFunc(was, is, func(a, b json.RawMessage) bool { return bytes.Equal(a, b) }) {
			t.Fatalf("%s of %s", out, body)
		}
	})
}
