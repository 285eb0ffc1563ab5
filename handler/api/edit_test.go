package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// many is a body with more members than Parse remembers.
var many = func() string {
	var s strings.Builder
	for i := range 2 * keptMembers {
		fmt.Fprintf(&s, `"m%d":%d,`, i, i)
	}
	return s.String()
}()

func TestEditor(t *testing.T) {
	for _, c := range []struct {
		body, want string
		edit       func(*rawjson.Editor)
	}{
		{`{"a":1}`, `{"a":1}`, func(*rawjson.Editor) {}},
		{`{"a":1}`, `{"a":1,"b":2}`, func(e *rawjson.Editor) { e.Set("b", []byte("2")) }},
		{` { "a" : 1 } `, ` { "a" : 1 ,"b":2} `, func(e *rawjson.Editor) { e.Set("b", []byte("2")) }},
		{`{}`, `{"b":2,"c":3}`, func(e *rawjson.Editor) { e.Set("b", []byte("2")); e.Set("c", []byte("3")) }},
		{`{"a":1,"b" : "x"}`, `{"a":1,"b" : 2}`, func(e *rawjson.Editor) { e.Set("b", []byte("2")) }},
		{`{"b":0,"a":1,"b":1}`, `{"a":1,"b":2}`, func(e *rawjson.Editor) { e.Set("b", []byte("2")) }},
		{`{"\u0062":0}`, `{"\u0062":2}`, func(e *rawjson.Editor) { e.Set("b", []byte("2")) }},
		{`{"b":0,"b":1,"b":null}`, `{"b":2}`, func(e *rawjson.Editor) { e.Set("b", []byte("2")) }},
		{`{"b":0,"b":1}`, `{"c":2}`, func(e *rawjson.Editor) { e.Cut("b"); e.Set("c", []byte("2")) }},
		{`{"a":[1] , "b" : 0 , "b":1,"c":{}}`, `{"a":[1]  ,"c":{}}`, func(e *rawjson.Editor) { e.Cut("b") }},
		{`{"b":0, "a":1}`, `{ "a":1}`, func(e *rawjson.Editor) { e.Cut("b") }},
		{`{"b":0,"a":1}`, `{"a":1,"b":2}`, func(e *rawjson.Editor) { e.Cut("b"); e.Set("b", []byte("2")) }},
		{`{"a":1,"b":0}`, `{"c":9}`, func(e *rawjson.Editor) { e.Cut("a"); e.Cut("b"); e.Set("c", []byte("9")) }},
		{`{"nvext":1,"nvext":null,"nvext":{},"a":0,"nvext":null}`, `{"nvext":{},"a":0}`, onlyNVExt},
		{`{"nvext":null,"nvext":null}`, `{"nvext":null,"nvext":null}`, onlyNVExt},
		{`{"s":{"t":1,"x":2}}`, `{"s":{"t":0,"x":2}}`, func(e *rawjson.Editor) { in, _ := e.Object("s"); in.Set("t", []byte("0")) }},
		{`{"s":{},"s":{ "x":2 }}`, `{"s":{ "x":2 ,"t":0}}`, func(e *rawjson.Editor) { in, _ := e.Object("s"); in.Set("t", []byte("0")) }},
		{`{"s":null}`, `{"s":{"t":0,"u":{"v":1}}}`, func(e *rawjson.Editor) {
			in, _ := e.Object("s")
			in.Set("t", []byte("0"))
			in, _ = e.Object("s")
			in, _ = in.Object("u")
			in.Set("v", []byte("1"))
		}},
		{`{"s":{}}`, `{"s":{"t":0,"u":1}}`, func(e *rawjson.Editor) {
			in, _ := e.Object("s")
			in.Set("t", []byte("0"))
			in, _ = e.Object("s")
			in.Set("u", []byte("1"))
		}},
		{`{"s":{"u":{"v":0}}}`, `{"s":{"u":{"v":1}},"w":{"x":2}}`, func(e *rawjson.Editor) {
			in, _ := e.Object("s")
			in, _ = in.Object("u")
			in.Set("v", []byte("1"))
			in, _ = e.Object("w")
			in.Set("x", []byte("2"))
			e.Object("unused")
		}},
		{`{` + many + `"b":1}`, `{` + many + `"b":2}`, func(e *rawjson.Editor) { e.Set("b", []byte("2")) }},
		{`{"b":1,` + many + `"c":1}`, `{` + many + `"c":1,"d":2}`, func(e *rawjson.Editor) { e.Cut("b"); e.Set("d", []byte("2")) }},
	} {
		e := mustParse(t, chat{}, c.body).Editor([]byte(c.body))
		c.edit(e)
		if got := string(rawjson.Splice(nil, []byte(c.body), e.Edits())); got != c.want {
			t.Errorf("%s became %s, want %s", c.body, got, c.want)
		}
	}
}

func onlyNVExt(e *rawjson.Editor) { e.Object(nameNVExt) }

// FuzzEditor checks an edited body with another reader: it is valid, and equals
// the original but for what was edited.
func FuzzEditor(f *testing.F) {
	f.Add([]byte(`{"nvext":1,"a":1,"nvext":{"x":2},"b":{"t":1},"a":null}`), "a", "b", "c")
	f.Add([]byte(`{"a":1 , "a":2}`), "a", "a", "a")
	f.Add([]byte(` { } `), "x", "y", "z")
	f.Add([]byte(`{`+many+`"b":{"t":0,"t":1}}`), "m3", "b", "m7")
	f.Fuzz(func(t *testing.T, body []byte, set, within, cut string) {
		if set == within || within == cut || set == cut || !utf8.ValidString(set) || len(set)+len(within)+len(cut) > 32 || strings.ContainsAny(set+within+cut, "\\\"") {
			return
		}
		for _, name := range []string{set, within, cut} {
			if quoted, _ := json.Marshal(name); string(quoted) != `"`+name+`"` || name == nameNVExt {
				return
			}
		}
		var before map[string]json.RawMessage
		r, err := Parse(chat{}, body, testOptions)
		if err != nil || !utf8.Valid(body) || bytes.Contains(bytes.ToLower(body), []byte(`\ud`)) || json.Unmarshal(body, &before) != nil || before == nil {
			return
		}
		e := r.Editor(body)
		e.Set(set, []byte(`[7]`))
		e.Cut(cut)
		e.CutGiven(nameNVExt)
		if in, ok := e.Object(within); ok {
			in.Set("t", []byte("8"))
		}
		out := rawjson.Splice(nil, body, e.Edits())
		var after map[string]json.RawMessage
		if err := json.Unmarshal(out, &after); err != nil {
			t.Fatalf("%s became %s: %v", body, out, err)
		}
		before[set] = json.RawMessage(`[7]`)
		delete(before, cut)
		if v := before[nameNVExt]; string(v) != "null" {
			delete(before, nameNVExt)
		}
		if v := after[nameNVExt]; string(v) == "null" {
			delete(after, nameNVExt)
			delete(before, nameNVExt)
		}
		var was, is map[string]json.RawMessage
		if v := before[within]; v == nil || string(v) == "null" || v[0] == '{' {
			_ = json.Unmarshal(v, &was)
			if json.Unmarshal(after[within], &is) != nil || string(is["t"]) != "8" {
				t.Fatalf("%s became %s", body, out)
			}
			delete(was, "t")
			delete(is, "t")
			delete(before, within)
			delete(after, within)
		}
		if len(was) != len(is) || len(was) > 0 && !reflect.DeepEqual(was, is) || !reflect.DeepEqual(before, after) {
			t.Fatalf("%s became %s", body, out)
		}
	})
}

// TestEditsAreBounded has more members and elements than anybody edits.
func TestEditsAreBounded(t *testing.T) {
	many := strings.Repeat(`"a":1,`, maxMembers)
	if _, err := Parse(chat{}, []byte(`{`+many+`"b":1}`), testOptions); !errors.Is(err, ErrMembers) {
		t.Errorf("a body of many members: %v", err)
	}
	body := `{"s":{` + many + `"b":1}}`
	if _, ok := mustParse(t, generate{}, body).Editor([]byte(body)).Object("s"); ok {
		t.Error("an object of many members is to be edited")
	}
}
