package engine

import (
	"slices"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/tidwall/gjson"
)

// An engine that isolates caches gets the salt. One that gets none does not.
func TestIsolatesCaches(t *testing.T) {
	on, off := Settings{CacheSalt: On}, Settings{CacheSalt: Off}
	for _, c := range []struct {
		kind, version, api string
		set                Settings
		want               bool
	}{
		{VLLM, "", api.NameChat, Settings{}, false},
		{VLLM, "", api.NameChat, on, true},
		{VLLM, "", Invocations, on, true},
		{VLLM, "0.10.1", api.NameCompletions, Settings{}, true},
		{VLLM, "0.10.0", api.NameChat, Settings{}, false},
		{VLLM, "0.10.0", api.NameChat, on, true},
		{VLLM, "0.12.0", api.NameMessages, Settings{}, false},
		{VLLM, "0.12.0", api.NameMessages, on, true},
		{VLLM, "0.12.0", "embeddings", Settings{}, false},
		{VLLM, "0.12.0", api.NameChat, off, false},
		{VLLM, "0.12.0", "", Settings{}, false},
		{VLLM, "0.12.0", "", on, false},
		{SGLang, "", api.NameGenerate, Settings{}, false},
		{SGLang, "0.5.4", api.NameGenerate, Settings{}, true},
		{SGLang, "", Invocations, on, true},
		{SGLang, "0.5.3", api.NameChat, Settings{}, false},
		{SGLang, "0.5.10", api.NameMessages, Settings{}, false},
		{SGLang, "0.5.10", api.NameMessages, on, false},
		{TRTLLM, "", api.NameChat, Settings{}, true},
		{TRTLLM, "", api.NameCompletions, on, false},
		{LlamaCpp, "", api.NameChat, on, false},
		{Other, "", api.NameChat, Settings{}, false},
		{Other, "", api.NameChat, on, true},
		{"", "", api.NameChat, Settings{}, false},
		{Dynamo, "1.3.0", api.NameChat, Settings{}, true},
		{Dynamo, "1.2.0", api.NameChat, Settings{}, false},
		{Dynamo, "v1.2", api.NameChat, Settings{}, false},
		{Dynamo, "v1.12", api.NameChat, Settings{}, true},
		{Dynamo, "", api.NameChat, Settings{}, false},
		{Dynamo, "1.3.0", api.NameMessages, Settings{}, false},
		{Dynamo, "", api.NameMessages, on, true},
	} {
		e := Engine{Type: c.kind, Info: Info{Version: c.version}, Settings: c.set}
		if got := e.IsolatesCaches(c.api); got != c.want {
			t.Errorf("%s %s, %s, %v: %v", c.kind, c.version, c.api, c.set.CacheSalt, got)
		}
	}
	for _, kind := range append(slices.Clone(Names), "") {
		for _, path := range paths {
			a := api.For(path)
			got := adapted(t, kind, path, `{"cache_salt":"victim","nvext":{"cache_salt":"mine"}}`, nil)
			if kind != Dynamo && strings.Contains(got.body, "victim") {
				t.Errorf("%s, %s got %s", kind, path, got.body)
			}
			e := Engine{Type: kind, Info: Info{Version: "99.0"}}
			if e.IsolatesCaches(a.Name()) && !strings.Contains(got.body, `"mine"`) {
				t.Errorf("%s, %s keeps caches apart without getting the salt: %s", kind, path, got.body)
			}
		}
	}
}

// TestSGLangSessionsAreOpenedInTheirScope has a tenant open a session, use it by its
// own id and by the engine's, and close it.
func TestSGLangSessionsAreOpenedInTheirScope(t *testing.T) {
	send := func(path, body string) string {
		t.Helper()
		parsed, err := api.Parse(api.Unplanned, []byte(body), api.Options{})
		if err != nil {
			t.Fatal(err)
		}
		e := parsed.Editor([]byte(body))
		(&Engine{Type: SGLang}).Adapt(&Request{API: PostTo(path), Body: e, Ext: &nvext.Ext{Tenant: "t"}, Salt: "t", Ranks: 1})
		return gjson.GetBytes(e.Apply(), "session_id").Str
	}
	mine := send("/open_session", `{"capacity_of_str_len":1000,"session_id":"s"}`)
	if mine != SessionID("t", "", "s") || mine == SessionID("u", "", "s") || send("/open_session", `{"session_id":"`+mine+`"}`) != mine {
		t.Errorf("opened as %q", mine)
	}
	if got := send("/close_session", `{"session_id":"s"}`); got != mine {
		t.Errorf("closed as %q", got)
	}
	one, two := send("/open_session", `{"capacity_of_str_len":1000}`), send("/open_session", `{"session_id":null}`)
	scope := mine[:len(mine)-1]
	if one == two || !strings.HasPrefix(one, scope) || !strings.HasPrefix(two, scope) {
		t.Errorf("without a name they are opened as %q and %q", one, two)
	}
	if empty := send("/open_session", `{"session_id":""}`); empty != scope || send("/close_session", `{"session_id":""}`) != empty {
		t.Errorf("a session of no name is opened as %q, closed as %q", empty, send("/close_session", `{"session_id":""}`))
	}
	if odd := send("/open_session", `{"session_id":7}`); !strings.HasPrefix(odd, scope) {
		t.Errorf("a number is opened as %q", odd)
	}
	if got := send("/generate_from_file", `{}`); got != "" {
		t.Errorf("what opens none has the session %q", got)
	}
	if SessionID("", "", "s") != "s" || SessionID("t", "", "") != "" {
		t.Error("what needs no scope has one")
	}
}

func TestInfers(t *testing.T) {
	for path, want := range map[string]bool{
		"/invocations": true, "/v1/invocations/": true, "/completion": true, "/infill": true, "/api/generate": true, "/api/chat": true,
		"/v1/images/generations": true, "/v1/audio/transcriptions": true, "/encode": true, "/v2/embed": true,
		"/tokenize": false, "/detokenize": false, "/v1/models": false, "/open_session": false, "/v1/load_lora_adapter": false, "/": false,
		"/v1/chat/completions/render": false,
	} {
		if Infers(path) != want {
			t.Errorf("%s: %v", path, !want)
		}
	}
	for path, want := range map[string]string{"/invocations": Invocations, "/x/close_session": closeSession, "/open_sessions": "", "": ""} {
		if got := PostTo(path); got != want {
			t.Errorf("%s is %q", path, got)
		}
	}
}
