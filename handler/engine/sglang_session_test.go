package engine

import (
	"encoding/json"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
)

// TestSessionsDoNotPassUnscoped has a tenant name another tenant's session in all
// ways that cannot be scoped, or that hide the id.
func TestSessionsDoNotPassUnscoped(t *testing.T) {
	victims := SessionID("victim", "", "s")
	mine := SessionID("t", "", victims)
	id := `{"id":"` + victims + `"}`
	for _, v := range []struct{ name, params, want string }{
		{"an object", id, `{"id":"` + mine + `"}`},
		{"behind another id", `{"id":"` + victims + `","id":"s"}`, `{"id":"` + SessionID("t", "", "s") + `"}`},
		{"behind null", `{"id":"` + victims + `","id":null}`, `{}`},
		{"in a list", `[` + id + `,null]`, ""},
		{"without a name", `{"id":""}`, `{"id":"` + SessionID("t", "", "x")[:33] + `"}`},
		{"without an id", `{"rid":"r"}`, `{"rid":"r"}`},
		{"a text", `"` + victims + `"`, ""},
		{"a list as a name", `{"id":["` + victims + `"]}`, ""},
	} {
		for _, c := range []struct{ path, before, after string }{
			{"/generate", `{"text":"x"`, `}`},
			{"/v1/chat/completions", `{"messages":[]`, `}`},
			{"/v1/anything", `{"text":"x"`, `}`},
		} {
			want := c.before + `,"session_params":` + v.want + c.after
			if v.want == "" {
				want = c.before + c.after
			}
			body := c.before + `,"session_params":` + v.params + c.after
			got := adapted(t, SGLang, c.path, body, func(r *asked) { r.Salt = "t" })
			if lacks := strings.Join(got.lacks, " "); got.body != want || lacks != map[bool]string{true: "session_params"}[v.want == ""] {
				t.Errorf("%s, %s became %.300s without %q", c.path, v.name, got.body, lacks)
			}
			if without := adapted(t, SGLang, c.path, body, nil); without.body != body {
				t.Errorf("%s, %s: without a salt it became %.300s", c.path, v.name, without.body)
			}
		}
	}
	// SGLang refuses session_id beside the session_params that the router sets
	if got := adapted(t, SGLang, "/generate", `{"text":"x","session_id":"a"}`, func(r *asked) { r.Session = "s" }); got.body != `{"text":"x","session_params":{"id":"s"}}` {
		t.Errorf("became %.300s", got.body)
	}
	// session_params of nvext that is too long removes the body's own, too
	pad := strings.Repeat(" ", maxParams)
	got := adapted(t, SGLang, "/generate", `{"session_params":`+id+`,"nvext":{"session_params":{"id":"s"`+pad+`}}}`, func(r *asked) { r.Salt = "t" })
	if got.body != `{}` || strings.Join(got.lacks, " ") != "session_params" {
		t.Errorf("became %.300s without %q", got.body, got.lacks)
	}
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
			if ext, err = nvext.Parse(parsed.NVExt, nvext.Options{}); err != nil {
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

// TestLongNamesStayApart has ids that digests replace.
func TestLongNamesStayApart(t *testing.T) {
	session := func(salt, id string) string {
		t.Helper()
		body := adapted(t, SGLang, "/generate", `{"session_params":{"id":"`+id+`"}}`, func(r *asked) { r.Salt = salt }).body
		var got struct {
			Params struct{ ID string } `json:"session_params"`
		}
		if err := json.Unmarshal([]byte(body), &got); err != nil {
			t.Fatal(err)
		}
		return got.Params.ID
	}
	long := strings.Repeat("long ", 1000)
	a := session("t", long+"a")
	if a == session("t", long+"b") || a == session("u", long+"a") || len(a) > 200 {
		t.Errorf("named %q", a)
	}
	if session("t", long+"a") != a || session("t", a) != a {
		t.Errorf("%q has another name when it comes back", a)
	}
	if got := session("t", SessionID("t", "", long)); len(got) > 200 || !strings.HasPrefix(got, scopeOf("t")) {
		t.Errorf("named %q", got)
	}
}
