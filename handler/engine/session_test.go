package engine

import (
	"encoding/json"
	"runtime"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
)

// TestEnginesHoldSessions asks each engine for which APIs it holds sessions, as set and
// as reported.
func TestEnginesHoldSessions(t *testing.T) {
	apis := []string{api.NameChat, api.NameCompletions, api.NameGenerate, api.NameResponses, api.NameMessages, ""}
	for _, c := range []struct {
		name string
		e    Engine
		want string
	}{
		{"SGLang that reports nothing", Engine{Type: SGLang}, api.NameGenerate},
		{"SGLang without sessions", Engine{Type: SGLang, Info: Info{NoSessions: true}}, ""},
		{"SGLang that heeds them everywhere", Engine{Type: SGLang, Settings: Settings{Sessions: On}}, "chat completions generate"},
		{"SGLang, whatever it reports", Engine{Type: SGLang, Info: Info{NoSessions: true}, Settings: Settings{Sessions: On}}, "chat completions generate"},
		{"SGLang, switched off", Engine{Type: SGLang, Settings: Settings{Sessions: Off}}, ""},
		{"vLLM", Engine{Type: VLLM, Settings: Settings{Sessions: On}}, ""},
		{"Dynamo", Engine{Type: Dynamo, Settings: Settings{Sessions: On}}, ""},
		{"an unknown engine", Engine{}, ""},
	} {
		var held []string
		for _, a := range apis {
			if c.e.HoldsSessions(a) {
				held = append(held, a)
			}
		}
		if got := strings.Join(held, " "); got != c.want {
			t.Errorf("%s holds sessions for %q, want %q", c.name, got, c.want)
		}
	}
}

// TestSGLangReportsItsSessions reads enable_streaming_session in /server_info.
func TestSGLangReportsItsSessions(t *testing.T) {
	for reported, none := range map[string]bool{
		`"enable_streaming_session":true,"version":"0.5.12"`:  false,
		`"enable_streaming_session":false,"version":"0.5.12"`: true,
		`"enable_streaming_session":false`:                    true,
		`"version":"0.6.0"`:                                   false, // it may report them elsewhere
		`"version":"0.5.8"`:                                   true,  // it has none
		`"version":"private"`:                                 false,
		`"page_size":1`:                                       false,
	} {
		s := site{pathModels: `{"data":[{"owned_by":"sglang"}]}`, pathServerInfo: `{"max_total_num_tokens":1,` + reported + `}`}
		var asked []string
		if got := Ask(s.get(&asked)); got.NoSessions != none {
			t.Errorf("%s: without sessions %v, want %v", reported, got.NoSessions, none)
		}
	}
}

// TestSessionCalls opens and closes a session of SGLang.
func TestSessionCalls(t *testing.T) {
	call := OpenSession(`my "own"`, 330500*time.Millisecond)
	if want := `{"capacity_of_str_len":65536,"session_id":"my \"own\"","streaming":true,"timeout":330.5}`; call.Path != "/open_session" || string(call.Body) != want {
		t.Errorf("opened by %s %s, want %s", call.Path, call.Body, want)
	}
	if call = CloseSession(`my "own"`); call.Path != "/close_session" || string(call.Body) != `{"session_id":"my \"own\""}` {
		t.Errorf("closed by %s %s", call.Path, call.Body)
	}
	for _, c := range []struct {
		status       int
		answer, want string // want: a part of the error, empty for none
	}{
		{200, `"my session"`, ""},
		{200, `null`, "no session"},
		{200, `""`, "no session"},
		{200, ``, "no session"},
		{200, `{"session_id":"s"}`, "no session"},
		{200, `"cut sh`, "no session"},
		{400, `{"error":{"message":"Failed to open the session. Check if a session with the same id is still open."}}`, ""},
		{400, `{"error":{"message":"Session already exists"}}`, ""},
		{400, `{"error":{"message":"Streaming sessions are disabled. Please relaunch with --enable-streaming-session."}}`, `status 400: "Streaming sessions are disabled.`},
		{500, `{"error":{"message":"Session already exists"}}`, `status 500: "Session already exists"`},
		{404, `{"detail":"Not Found"}`, `Not Found`},
		{502, ``, "status 502"},
		{503, "<html>\n<b>none\x1b[31m" + strings.Repeat("x", 9999), `status 503: "<html>\n<b>none\x1b[31mxxx`},
	} {
		err := Opened(c.status, []byte(c.answer))
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want) || len(err.Error()) > 300) {
			t.Errorf("%d %.60s: %v, want %q", c.status, c.answer, err, c.want)
		}
	}
	for status, want := range map[int]bool{200: true, 204: true, 400: true, 404: true, 0: false, 401: false, 408: false, 429: false, 500: false, 503: false} {
		if Closed(status) != want {
			t.Errorf("closed by %d: %v", status, !want)
		}
	}
}

// turnOf returns session_params as the engine gets them.
func turnOf(t testing.TB, path, body string, set func(*asked)) string {
	t.Helper()
	var got struct {
		Params json.RawMessage `json:"session_params"`
	}
	if err := json.Unmarshal([]byte(adapted(t, SGLang, path, body, set).body), &got); err != nil {
		t.Fatal(err)
	}
	return string(got.Params)
}

// TestTurnsNameTheirSession has the turn's session in place of the client's own id,
// wherever the client names it.
func TestTurnsNameTheirSession(t *testing.T) {
	for _, c := range []struct{ name, members, want string }{
		{"nothing", ``, `{"id":"held"}`},
		{"null", `,"session_params":null`, `{"id":"held"}`},
		{"empty", `,"session_params":{}`, `{"id":"held"}`},
		{"the client's own", `,"session_params":{"id":"s","rid":"r","offset":3}`, `{"id":"held","rid":"r","offset":3}`},
		{"the client's own without an id", `,"session_params":{"rid":"r"}`, `{"rid":"r","id":"held"}`},
		{"several ids", `,"session_params":{"id":"s","id":"t"}`, `{"id":"held"}`},
		{"a list", `,"session_params":[{"id":"s"},{"id":"t"}]`, `{"id":"held"}`},
		{"a text", `,"session_params":"s"`, `{"id":"held"}`},
		{"nvext's", `,"nvext":{"session_params":{"id":"s","rid":"r","replace":true}}`, `{"id":"held","rid":"r","replace":true}`},
		{"nvext's without an id", `,"nvext":{"session_params":{"rid":"r"}}`, `{"rid":"r","id":"held"}`},
		{"nvext's empty", `,"nvext":{"session_params":{}}`, `{"id":"held"}`},
		{"nvext's with several ids", `,"nvext":{"session_params":{"id":"s","drop_previous_output":false,"id":"t"}}`, `{"drop_previous_output":false,"id":"held"}`},
		{"both", `,"session_params":{"id":"s","rid":"own"},"nvext":{"session_params":{"id":"t","rid":"nv"}}`, `{"id":"held","rid":"nv"}`},
		{"session_control alone", `,"nvext":{"session_control":{"session_id":"s","action":"open"}}`, `{"id":"held"}`},
	} {
		for _, path := range []string{"/v1/chat/completions", "/v1/completions", "/generate"} {
			for _, salt := range []string{"", "tenant"} {
				body := map[string]string{"/v1/chat/completions": `{"messages":[]`, "/v1/completions": `{"prompt":"x"`, "/generate": `{"text":"x"`}[path] + c.members + `}`
				got := turnOf(t, path, body, func(r *asked) { r.Session, r.Salt = "held", salt })
				if got != c.want {
					t.Errorf("%s, %s, salt %q: %s, want %s", path, c.name, salt, got, c.want)
				}
			}
		}
	}
	body := `{"input":"x","session_params":{"id":"s"}}`
	if got := turnOf(t, "/v1/responses", body, func(r *asked) { r.Session = "held" }); got != `{"id":"s"}` {
		t.Errorf("responses have %s", got)
	}
	if got := adapted(t, VLLM, "/v1/completions", `{"prompt":"x"}`, func(r *asked) { r.Session = "held" }); got.body != `{"prompt":"x"}` {
		t.Errorf("vLLM gets %s", got.body)
	}
	long := `{"text":"x","nvext":{"session_params":{"id":"s"` + strings.Repeat(" ", maxParams) + `}}}`
	got := adapted(t, SGLang, "/generate", long, func(r *asked) { r.Session = "held" })
	if got.body != `{"text":"x","session_params":{"id":"held"}}` || strings.Join(got.lacks, " ") != "session_params" {
		t.Errorf("%.200s without %q", got.body, got.lacks)
	}
}

// TestSessionIDs has ids of two tenants and two scopes, which stay apart.
func TestSessionIDs(t *testing.T) {
	long := strings.Repeat("x", 2000)
	seen := make(map[string]string)
	for _, id := range []string{"s", "t", long, long + "y"} {
		for _, salt := range []string{"", "a", "b"} {
			for _, scope := range []string{"", "a", "b"} {
				got, of := SessionID(salt, scope, id), salt+"/"+scope+"/"+id
				if before := seen[got]; before != "" {
					t.Errorf("%.20s and %.20s have the id %.100s", before, of, got)
				}
				seen[got] = of
				if (salt+scope == "") != (got == id) || salt+scope != "" && len(got) > 200 {
					t.Errorf("%.20s has the id %.100s", of, got)
				}
				if again := SessionID(salt, scope, got); len(got) < maxWritten && again != got {
					t.Errorf("%.20s: %.100s comes back as %.100s", of, got, again)
				}
			}
		}
	}
	if got := SessionID("salt", "scope", ""); got != "" {
		t.Errorf("no session has the id %q", got)
	}
}

// FuzzSessionID compares the ids of sessions with those of the client's own members.
func FuzzSessionID(f *testing.F) {
	for _, id := range []string{"s", "", `"`, "é<&>\x00\u2028", strings.Repeat("é", 600), strings.Repeat("\n", 300), SessionID("t", "", "s")} {
		f.Add("t", id)
		f.Add("", id)
	}
	f.Fuzz(func(t *testing.T, salt, id string) {
		if !utf8.ValidString(id) || strings.ContainsRune(id, utf8.RuneError) || id == "" || len(id) > maxParams/6 {
			return
		}
		raw, _ := json.Marshal(SessionID(salt, "", id))
		body := `{"text":"x","session_params":{"id":` + string(quoted(id)) + `}}`
		got := turnOf(t, "/generate", body, func(r *asked) { r.Salt = salt })
		var is, want struct{ ID string }
		if json.Unmarshal([]byte(got), &is) != nil || json.Unmarshal([]byte(`{"id":`+string(raw)+`}`), &want) != nil || is != want {
			t.Fatalf("%q with salt %q is %s, want %s", id, salt, got, raw)
		}
	})
}

// FuzzOpened reads any answer to an open.
func FuzzOpened(f *testing.F) {
	for _, answer := range []string{`"s"`, `null`, `{"error":{"message":"already exists"}}`, `{"message":7}`, `"\ud800"`, "\xff", `{"error":{"message":"` + strings.Repeat("é", 999) + `"}}`} {
		f.Add(200, []byte(answer))
		f.Add(400, []byte(answer))
	}
	f.Fuzz(func(t *testing.T, status int, answer []byte) {
		err := Opened(status, answer)
		var id string
		switch {
		case err == nil && status == 200 && (json.Unmarshal(answer, &id) != nil || id == ""):
			t.Fatalf("%q opened a session", answer)
		case err == nil && status != 200 && status != 400:
			t.Fatalf("status %d opened a session", status)
		case err == nil:
		default:
			if said := err.Error(); utf8.RuneCountInString(said) > 2500 || strings.ContainsFunc(said, unicode.IsControl) {
				t.Fatalf("%q is reported as %q", answer, said)
			}
		}
	})
}

// TestWhatIsMadeOfABodyIsBounded puts members of megabytes behind a salt: the result
// is short and cheap.
func TestWhatIsMadeOfABodyIsBounded(t *testing.T) {
	fill := strings.Repeat("<", 8<<20)
	deep := `[` + strings.Repeat(`{"a":1,"a":1,"a":1,"a":1,"id":"s"},`, 1000) + `{}]`
	for _, v := range []string{
		`{"session_id":"` + fill + `"}`, `{"session_params":{"id":"` + fill + `"}}`, `{"session_params":[{"id":"` + fill + `"}]}`,
		`{"extra_key":"` + fill + `"}`, `{"extra_key":["` + fill + `"]}`, `{"session_params":` + deep + `}`,
		`{"nvext":{"cache_salt":"s","session_params":{"id":"x","rid":"r"` + strings.Repeat(" ", 8<<20) + `}}}`,
		`{"nvext":{"greed_sampling":true,"max_thinking_tokens":1},"sampling_params":[` + strings.Repeat(`{`+strings.Repeat(`"temperature":1,`, 4000)+`"n":1},`, 100) + `{}]}`,
	} {
		path := "/generate"
		body := []byte(v)
		parsed, err := api.Parse(apiOf(path), body, api.Options{})
		if err != nil {
			t.Fatal(err)
		}
		ext := nvext.Ext{Tenant: "t"}
		if parsed.NVExt != nil {
			if ext, err = nvext.Parse(parsed.NVExt, nvext.MaxTTL); err != nil {
				t.Fatal(err)
			}
			ext.Tenant = "t"
		}
		r := Request{API: apiOf(path).Name(), Body: parsed.Editor(body), Ext: &ext, Salt: "t", Ranks: 1}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		(&Engine{Type: SGLang, Settings: Settings{ThinkingBudget: On}}).Adapt(&r)
		edits := r.Body.Edits()
		runtime.ReadMemStats(&after)
		made := 0
		for _, e := range edits {
			made += len(e.Text)
		}
		if cost := after.TotalAlloc - before.TotalAlloc; made > 128<<10 || cost > 8<<20 {
			t.Errorf("%.60s: %d bytes are made of %d, of %d allocated", v, made, len(v), cost)
		}
	}
	// the salt is digested once, for any length and any number of sessions
	salt := strings.Repeat("s", 8<<20)
	body := []byte(`{"session_params":` + deep + `}`)
	parsed, err := api.Parse(apiOf("/generate"), body, api.Options{})
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	(&Engine{Type: SGLang}).Adapt(&Request{API: api.NameGenerate, Body: parsed.Editor(body), Ext: new(nvext.Ext), Salt: salt, Ranks: 1})
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("it took %v", took)
	}
}
