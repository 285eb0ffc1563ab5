package api

import (
	"bytes"
	"encoding/base64"
	"slices"
	"strings"
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
		`{"tools":[{"function":{"parameters":{ "type" : "object" },"strict":null,"description":"the we\u0061ther","name":"w"}}],` + user + `}`:                    chat{},
		`{"functions":[{"name":"w","description":"the weather","parameters":{"type":"object"}}],` + user + `}`:                                                    chat{},
		`{"tools":[{"name":"w","description":"the weather","input_schema":{"type":"object"}}],` + user + `}`:                                                      messages{},
		`{"tools":[{"type":"custom","name":"w","cache_control":{"type":"ephemeral"},"description":"the weather","input_schema":{"type":"object"}}],` + user + `}`: messages{},
		`{"tools":[{"type":"function","name":"w","description":"the weather","parameters":{"ty\u0070e":"object"}}],"input":"hello"}`:                              responses{},
	})
	same(t, map[string]API{ // templates write strict
		`{"tools":[{"type":"function","function":{"name":"w","parameters":{"type":"object"},"strict":false}}],` + user + `}`: chat{},
		`{"tools":[{"name":"w","input_schema":{"type":"object"},"strict":false}],` + user + `}`:                              messages{},
		`{"tools":[{"type":"function","strict":false,"name":"w","parameters":{"type":"object"}}],"input":"hello"}`:           responses{},
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

func encode(b []byte) string { return base64.StdEncoding.EncodeToString(b) }

func TestMediaTokens(t *testing.T) {
	for part, want := range map[string]int64{
		`{"type":"image_url","image_url":{"url":"data:image/png;base64,` + encode(make([]byte, 120_000)) + `"}}`:               600,
		`{"type":"image_url","image_url":{"url":"data:image/png;base64,` + encode(make([]byte, 8_000_000)) + `"}}`:             16384,
		`{"type":"image_url","image_url":{"url":"https://a/b.png"}}`:                                                           1024,
		`{"type":"image_url","image_url":{"url":"https://a/b.png","detail":"low"}}`:                                            85,
		`{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}`:                                                64,
		`{"type":"input_audio","input_audio":{"format":"mp3","data":"` + encode(make([]byte, 160_000)) + `"}}`:                 250,
		`{"type":"audio_url","audio_url":{"url":"https://a/b"}}`:                                                               1024,
		`{"type":"video_url","video_url":{"url":"data:video/mp4;base64,` + encode(make([]byte, 500_000)) + `"}}`:               526,
		`{"type":"file","file":{"file_data":"data:application/pdf;base64,` + encode(make([]byte, 4000)) + `","filename":"x"}}`: 1000,
		`{"type":"file","file":{"file_data":"` + encode(make([]byte, 400_000)) + `"}}`:                                         16384,
		`{"type":"file","file":{"file_id":"f"}}`:                                                                               1024,
		`{"type":"odd","x":"` + strings.Repeat("x", 100) + `"}`:                                                                30,
	} {
		if r := mustParse(t, chat{}, `{"messages":[{"role":"user","content":[`+part+`]}]}`); r.Media != 1 || r.MediaTokens != want {
			t.Errorf("%.80s: %d parts, %d tokens, want %d", part, r.Media, r.MediaTokens, want)
		}
	}
}

func TestMediaThroughAllAPIs(t *testing.T) {
	data := encode([]byte("\x89PNG >?>?>?")) // with slashes in base64
	chatWith := func(part string) string {
		return `{"messages":[{"role":"user","content":[{"type":"text","text":"look:"},` + part + `]}]}`
	}
	same(t, map[string]API{
		chatWith(`{"type":"image_url","image_url":{"url":"data:image/png;base64,` + data + `"}}`):                                                              chat{},
		chatWith(`{"type":"image_url","image_url":{"url":"data:image\/png;base64,` + strings.ReplaceAll(data, "/", `\/`) + `","detail":"high"}}`):              chat{},
		chatWith(`{"cache_control":{"type":"ephemeral"},"type":"image","source":{"type":"base64","media_type":"image/png","data":"` + data + `"}}`):            messages{},
		`{"input":[{"role":"user","content":[{"type":"input_text","text":"look:"},{"type":"input_image","image_url":"data:image/png;base64,` + data + `"}]}]}`: responses{},
	})
	same(t, map[string]API{
		chatWith(`{"type":"image_url","image_url":{"url":"https://a/b.png"}}`):                                                                 chat{},
		chatWith(`{"type":"image","source":{"type":"url","url":"https://a/b.png"}}`):                                                           messages{},
		`{"input":[{"role":"user","content":[{"type":"input_text","text":"look:"},{"type":"input_image","image_url":"https:\/\/a\/b.png"}]}]}`: responses{},
	})
	same(t, map[string]API{
		chatWith(`{"type":"file","file":{"file_data":"data:application/pdf;base64,AAAABBBBCCCC","filename":"a"}}`):                                                  chat{},
		chatWith(`{"type":"document","source":{"type":"base64","media_type":"application/pdf","data":"AAAABBBBCCCC"},"title":"b"}`):                                 messages{},
		`{"input":[{"role":"user","content":[{"type":"input_text","text":"look:"},{"type":"input_file","file_data":"data:application/pdf;base64,AAAABBBBCCCC"}]}]}`: responses{},
	})
	same(t, map[string]API{ // a tool's images are the user's
		`{"messages":[{"role":"tool","content":"see"},{"role":"user","content":[{"type":"image_url","image_url":{"url":"https://a/b.png"}}]}]}`:                                       chat{},
		`{"messages":[{"role":"user","content":[{"type":"tool_result","content":[{"type":"text","text":"see"},{"type":"image","source":{"type":"url","url":"https://a/b.png"}}]}]}]}`: messages{},
	})
}

func TestSessionOfUser(t *testing.T) {
	const hash, uuid = "1f0e2d3c4b5a69788796a5b4c3d2e1f01f0e2d3c4b5a69788796a5b4c3d2e1f0", "0b5f3a52-6c3a-4a8e-9b6f-0d4c1f2e3a4b"
	for id, want := range map[string]string{
		"user_" + hash + "_account_" + uuid + "_session_" + uuid: uuid,
		"user_" + hash + "_account__session_" + uuid:             uuid,
		"user_x_session_a_session_b":                             "b",
		"user_x_session_":                                        "",
		"user_x_account_y":                                       "",
		`{"device_id":"` + hash + `","account_uuid":"","session_id":"` + uuid + `"}`: uuid,
		` {"session_id":" \u0073 "} `:       "s",
		`{"session_id":7}`:                  "",
		`{"device_id":"` + hash + `"}`:      "",
		`{"session_id":"s"`:                 "",
		`{"session_id":"s"}{}`:              "",
		`{"a":{"session_id":"s"}}`:          "",
		`["session_id","s"]`:                "",
		"alice@example.com":                 "",
		"x_session_y":                       "",
		"":                                  "",
		"user_" + strings.Repeat("x", 5000): "",
		"user_" + strings.Repeat("x", 5000) + "_session_s": "",
	} {
		if got := sessionOfUser(id); got != want {
			t.Errorf("%.120q has the session %q, want %q", id, got, want)
		}
	}
}
