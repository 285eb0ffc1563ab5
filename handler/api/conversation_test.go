package api

import (
	"bytes"
	"slices"
	"testing"
)

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
	for _, body := range []string{`{"session_params":{"id":"s"}}`, `{"session_params":{"session_id":"s","offset":1}}`, `{"session_params":{"id":"s"},"session_id":"x"}`, `{"session_id":"x","session_params":{"id":"s"}}`} {
		if r := mustParse(t, generate{}, body); r.SessionID != "s" {
			t.Errorf("%s: %q", body, r.SessionID)
		}
	}
}
