package api

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// begun returns the answer to a request after the events' data.
func begun(t testing.TB, path, body string, events ...string) *Answer {
	t.Helper()
	r, err := Parse(For(path), []byte(body), Options{})
	if err != nil {
		t.Fatal(err)
	}
	a := r.NewAnswer(true)
	a.Track([]byte(body), 1<<17, false, nil)
	for _, e := range events {
		a.Event(rawjson.Frame{Data: []byte(e), Lines: 1})
	}
	return a
}

const (
	pathChat, pathCompletions  = "/v1/chat/completions", "/v1/completions"
	pathMessages, pathResponse = "/v1/messages", "/v1/responses"
	chatRole                   = `{"id":"1","created":1,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}`
)

func chatPiece(text string) string {
	return fmt.Sprintf(`{"id":"1","created":1,"model":"m","choices":[{"index":0,"delta":{"content":%q},"finish_reason":null}]}`, text)
}

// TestRestIsAskedFor compares the bodies that ask for the rest of answers. "": the prompt cannot go on.
func TestRestIsAskedFor(t *testing.T) {
	piece := chatPiece
	text := func(s string) string { return fmt.Sprintf(`{"id":"1","choices":[{"index":0,"text":%q}]}`, s) }
	for _, v := range []struct {
		name, path, body, want, way string
		events                      []string
	}{
		{"nothing", pathChat, `{"messages":[{"role":"user","content":"q"}],"n":2}`, `{"messages":[{"role":"user","content":"q"}],"n":2}`, WayWhole, []string{chatRole}},
		{
			"text", pathChat, `{"messages":[{"role":"user","content":"q"}],"max_tokens":10,"min_tokens":4}`,
			`{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"so \"far"}],"max_tokens":8,"min_tokens":2}`, WayText,
			[]string{chatRole, piece("so"), piece(` "far`)},
		},
		{
			"white space", pathChat, `{"messages":[{"role":"user","content":"q"}]}`,
			`{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"so"}]}`, WayText,
			[]string{piece("so"), piece("\n\n")},
		},
		{"white space alone", pathChat, `{"messages":[{"role":"user","content":"q"}]}`, `{"messages":[{"role":"user","content":"q"}]}`, WayWhole, []string{piece("\n")}},
		{
			"half a stop string", pathChat, `{"messages":[{"role":"user","content":"q"}],"stop":["##END"]}`,
			`{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"so"}],"stop":["##END"]}`, WayText,
			[]string{piece("so##")},
		},
		{
			"continued already", pathChat, `{"messages":[{"role":"assistant","content":"a"}],"continue_final_message":true}`,
			`{"messages":[{"role":"assistant","content":"a so"}],"continue_final_message":true}`, WayText,
			[]string{piece(" so")},
		},
		{
			"its limit", pathChat, `{"messages":[{"role":"user","content":"q"}],"max_completion_tokens":1,"min_tokens":1}`,
			`{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"so"}],"max_completion_tokens":1,"min_tokens":0}`, WayText,
			[]string{piece("so")},
		},
		{"the assistant's message last", pathChat, `{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":"a"}]}`, "", "", []string{piece("so")}},
		{
			"parts that are to be continued", pathChat,
			`{"messages":[{"role":"assistant","content":[{"type":"text","text":"a"}]}],"continue_final_message":true}`, "", "",
			[]string{piece("so")},
		},
		{"completions", pathCompletions, `{"prompt":"q","max_tokens":9}`, `{"prompt":"qso ","max_tokens":8}`, WayText, []string{text("so ")}},
		{"completions, a list", pathCompletions, `{"prompt":["q"]}`, `{"prompt":["qso"],"max_tokens":15}`, WayText, []string{text("so")}},
	} {
		a := begun(t, v.path, v.body, v.events...)
		rest, reason := a.Rest([]byte(v.body))
		if reason != "" || !rest.Fits(a.req.Editor([]byte(v.body))) {
			if v.want != "" {
				t.Errorf("%s: is not resumable because of %q", v.name, reason)
			}
			continue
		}
		e := a.req.Editor([]byte(v.body))
		rest.Ask(e, false)
		if got := string(e.Apply()); got != v.want || rest.Way != v.way {
			t.Errorf("%s: %s, want %s %s", v.name, got, v.way, v.want)
		}
	}
}

// TestReasoningInTheText has engines that leave reasoning in a chat's text. More text follows it.
func TestReasoningInTheText(t *testing.T) {
	for _, pieces := range [][]string{{"<think>", "hm", "</think>", "so"}, {"\n<th", "ink>hm", "m"}, {"hm", "</", "think>so", "<", "x"}} {
		a := begun(t, pathChat, `{"messages":[{"role":"user","content":"q"}]}`)
		for _, piece := range pieces {
			a.Event(rawjson.Frame{Data: []byte(chatPiece(piece)), Lines: 1})
		}
		if a.WhyNotResumable() != NotResumableReasoning {
			t.Errorf("%q goes on: %q", pieces, a.WhyNotResumable())
		}
	}
}

// TestSplicer compares what clients get of the second part of a stream.
func TestSplicer(t *testing.T) {
	const chatBody = `{"messages":[{"role":"user","content":"q"}],"max_tokens":10}`
	other := func(choice string) string { return `{"id":"2","created":2,"model":"n","choices":[` + choice + `]}` }
	mine := func(choice string) string { return `{"id":"1","created":1,"model":"m","choices":[` + choice + `]}` }
	start := `{"type":"message_start","message":{"id":"1","usage":{"input_tokens":5}}}`
	block := `{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}`
	delta := `{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"so"}}`
	for _, v := range []struct {
		name, path, body string
		first            []string
		second, want     []string // without an event: it is dropped. "!": it does not belong
	}{
		{"chat", pathChat, chatBody, []string{chatRole, chatPiece("so ")}, []string{
			other(`{"index":0,"delta":{"role":"assistant","content":""}}`), other(`{"index":0,"delta":{"content":" fa"}}`),
			other(`{"index":0,"delta":{},"finish_reason":"stop"}`),
			`{"id":"2","choices":[],"usage":{"prompt_tokens":11,"completion_tokens":2,"total_tokens":13}}`, "[DONE]",
		}, []string{
			"", mine(`{"index":0,"delta":{"content":"fa"}}`), mine(`{"index":0,"delta":{},"finish_reason":"stop"}`),
			`{"id":"1","choices":[],"usage":{"prompt_tokens":10,"completion_tokens":3,"total_tokens":13}}`, "[DONE]",
		}},
		{"chat without text", pathChat, chatBody, []string{chatRole}, []string{
			other(`{"index":0,"delta":{"role":"assistant","content":"a"}}`), `{"error":{"message":"x"}}`, `{"object":"error","message":"x"}`, `[1]`, `x`,
		}, []string{mine(`{"index":0,"delta":{"content":"a"}}`), `{"error":{"message":"x"}}`, `{"object":"error","message":"x"}`, "!", "!"}},
		{"chat with nothing", pathChat, chatBody, nil, []string{other(`{"index":0,"delta":{"role":"assistant"}}`)}, []string{other(`{"index":0,"delta":{"role":"assistant"}}`)}},
		{"messages", pathMessages, `{"messages":[{"role":"user","content":"q"}],"max_tokens":9}`, []string{start, block, delta}, []string{
			start, `{"type":"ping"}`, block, delta, `{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":4}}`, `{"type":"message_stop"}`, `{"type":"error"}`,
		}, []string{"", `{"type":"ping"}`, "", delta, `{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":5}}`, `{"type":"message_stop"}`, `{"type":"error"}`}},
		{"messages without text", pathMessages, `{"messages":[{"role":"user","content":"q"}],"max_tokens":9}`, []string{start}, []string{start, block}, []string{"", block}},
		{"responses", pathResponse, `{"input":"q"}`, []string{`{"type":"response.created","response":{"id":"1"}}`}, []string{
			`{"type":"response.created","response":{"id":"2"}}`, `{"type":"response.in_progress"}`,
		}, []string{"", `{"type":"response.in_progress"}`}},
	} {
		a := begun(t, v.path, v.body, v.first...)
		rest, reason := a.Rest([]byte(v.body))
		if reason != "" {
			t.Errorf("%s is not resumable because of %s", v.name, reason)
			continue
		}
		rest.Ask(a.req.Editor([]byte(v.body)), false)
		for i, e := range v.second {
			out, ok := rest.Splicer.Event([]byte(e))
			if got := string(out); ok != (v.want[i] != "!") || ok && got != v.want[i] {
				t.Errorf("%s: of %s the client gets %s, %v; want %s", v.name, e, got, ok, v.want[i])
			}
		}
	}
}

// FuzzSplicer gives splicers any data. What a client gets is JSON.
func FuzzSplicer(f *testing.F) {
	f.Add(0, "so ", chatPiece(" far"))
	f.Add(1, "so", `{"choices":[{"text":"a","finish_reason":"stop"}],"usage":{"prompt_tokens":1,"prompt_tokens_details":{"cached_tokens":1}}}`)
	f.Add(2, "so", `{"type":"content_block_delta","delta":{"type":"text_delta","text":"x"}}`)
	f.Fuzz(func(t *testing.T, api int, text, data string) {
		path := []string{pathChat, pathCompletions, pathMessages}[(api%3+3)%3]
		body := `{"messages":[{"role":"user","content":"q"}],"prompt":"q","max_tokens":3}`
		first, _ := json.Marshal(text)
		a := begun(t, path, body, []string{
			`{"id":"1","choices":[{"delta":{"content":` + string(first) + `}}]}`, `{"id":"1","choices":[{"text":` + string(first) + `}]}`,
			`{"type":"content_block_delta","delta":{"type":"text_delta","text":` + string(first) + `}}`,
		}[(api%3+3)%3])
		rest, reason := a.Rest([]byte(body))
		if reason != "" {
			return
		}
		e := a.req.Editor([]byte(body))
		if rest.Ask(e, false); !json.Valid(e.Apply()) {
			t.Error("the request is no JSON")
		}
		out, ok := rest.Splicer.Event([]byte(data))
		if ok && out != nil && strings.TrimSpace(string(out)) != "[DONE]" && !json.Valid(out) {
			t.Errorf("%s becomes %s", data, out)
		}
	})
}
