package engine

import (
	"strings"
	"testing"
)

// TestOtherAPIs asks for the same by the responses, messages and chats APIs,
// whole and as streams. The words are the same, and the second answer comes
// from the cache.
func TestOtherAPIs(t *testing.T) {
	e := start(t, Config{AnswerTokens: 12})
	long := strings.Repeat("why? ", 100)
	said := text0(at(post(t.Context(), e.chatURL(), doc{"messages": []doc{
		{"role": "system", "content": "Be brief."}, {"role": "user", "content": long},
	}}).json(t), "choices", 0, "message", "content"))

	asked := doc{"instructions": "Be brief.", "input": []doc{{"type": "message", "role": "user", "content": []doc{{"type": "input_text", "text": long}}}}}
	v := post(t.Context(), e.URL()+"/v1/responses", asked).json(t)
	usage := at(v, "usage")
	prompt := number(at(usage, "input_tokens"))
	want := (prompt - 1) / 16 * 16
	if at(v, "output", 0, "content", 0, "text") != said || number(at(usage, "input_tokens_details", "cached_tokens")) != want || at(v, "status") != "completed" {
		t.Errorf("said %q: %v", said, v)
	}
	asked["stream"] = true
	a := post(t.Context(), e.URL()+"/v1/responses", asked)
	events, _ := a.events(t)
	text := ""
	for i, ev := range events {
		if number(at(ev, "sequence_number")) != i {
			t.Errorf("event %d: %v", i, ev)
		}
		if at(ev, "type") == "response.output_text.delta" {
			text += text0(at(ev, "delta"))
		}
	}
	last := events[len(events)-1]
	if text != said || at(last, "type") != "response.completed" || number(at(last, "response", "usage", "input_tokens")) != prompt {
		t.Errorf("said %q, streamed %q, end %v", said, text, last)
	}

	asked = doc{"max_tokens": 50, "system": "Be brief.", "messages": []doc{{"role": "user", "content": []doc{{"type": "text", "text": long}}}}}
	v = post(t.Context(), e.URL()+"/v1/messages", asked).json(t)
	usage = at(v, "usage")
	if at(v, "content", 0, "text") != said || at(v, "stop_reason") != "end_turn" ||
		number(at(usage, "cache_read_input_tokens")) != want || number(at(usage, "input_tokens"))+number(at(usage, "cache_creation_input_tokens")) != prompt-want {
		t.Errorf("said %q: %v", said, v)
	}
	asked["stream"] = true
	events, _ = post(t.Context(), e.URL()+"/v1/messages", asked).events(t)
	text = ""
	for _, ev := range events {
		if at(ev, "type") == "content_block_delta" {
			text += text0(at(ev, "delta", "text"))
		}
	}
	end := events[len(events)-2]
	if text != said || number(at(events[0], "message", "usage", "input_tokens")) != prompt || number(at(end, "usage", "cache_read_input_tokens")) != want {
		t.Errorf("said %q, streamed %q, end %v", said, text, end)
	}
}
