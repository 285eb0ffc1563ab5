package nvext

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for _, c := range []struct{ raw, id, err string }{
		{`{}`, "", ""},
		{`null`, "", ""},
		{` {"session_control":{"session_id":"s-1","action":"open","timeout":5}} `, "s-1", ""},
		{`{"session_control":{"session_id":"caf\u00e9\n"}}`, "café\n", ""},
		{`{"session_control":{"session_\u0069d":"s"}}`, "s", ""},
		{`{"session_control":{"session_id":""}}`, "", ""},
		{`{"session_control":{"session_id":null}}`, "", ""},
		{`{"session_control":null,"agent_hints":{"priority":1}}`, "", ""},
		{`{"session_control":{"session_id":"a","session_id":"b"}}`, "b", ""},
		{`{"session_control":{"session_id":"a"},"session_control":{}}`, "", ""},
		{`{"session_control":5,"session_control":{"session_id":"b"}}`, "b", ""},
		{`{"token_data":[1,2,3],"session_id":"x"}`, "", ""},
		{`"x"`, "", "nvext: expected an object, got string"},
		{`[1]`, "", "nvext: expected an object, got array"},
		{`true`, "", "nvext: expected an object, got boolean true"},
		{`{"session_control":"s"}`, "", "nvext.session_control: expected an object, got string"},
		{`{"session_control":[]}`, "", "nvext.session_control: expected an object, got array"},
		{`{"session_control":{"session_id":5}}`, "", "nvext.session_control.session_id: expected a string, got number 5"},
		{`{"session_control":{"session_id":{}}}`, "", "nvext.session_control.session_id: expected a string, got object"},
		{`{"session_control":{"session_id":false}}`, "", "nvext.session_control.session_id: expected a string, got boolean false"},
		{`{"session_control":{"session_id":1` + strings.Repeat("0", 40) + `}}`, "", "nvext.session_control.session_id: expected a string, got number 1" + strings.Repeat("0", 31) + "..."},
		{``, "", "nvext: malformed JSON"},
		{`{"session_control":{"session_id" "s"}}`, "", "nvext: malformed JSON"},
		{`{} {}`, "", "nvext: malformed JSON"},
	} {
		raw := []byte(c.raw)
		ext, err := Parse(raw)
		clear(raw) // the result must not point into it
		msg := ""
		if err != nil {
			msg = err.Error()
		}
		if msg != c.err || ext.SessionID != c.id {
			t.Errorf("%s: %q, %q; want %q, %q", c.raw, ext.SessionID, msg, c.id, c.err)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{`{"session_control":{"session_id":"a\u0000"}}`, `{"session_control":[],"session_control":{}}`, `5`, `{"a":[[[]]]}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		ext, err := Parse(raw)
		var field *FieldError
		if err != nil && (ext != Ext{} || !errors.Is(err, ErrMalformed) && !errors.As(err, &field)) {
			t.Fatalf("%+v with error %v", ext, err)
		}
		if !json.Valid(raw) {
			return
		}
		// The standard library keeps the last of two members, too.
		var top map[string]json.RawMessage
		var session map[string]json.RawMessage
		var id string
		ok := json.Unmarshal(raw, &top) == nil
		if v, found := top["session_control"]; ok && found {
			ok = json.Unmarshal(v, &session) == nil
		}
		if v, found := session["session_id"]; ok && found {
			ok = json.Unmarshal(v, &id) == nil
		}
		// It replaces invalid UTF-8, which is passed on here.
		if ok != (err == nil) || ok && id != strings.ToValidUTF8(ext.SessionID, "\ufffd") && !strings.Contains(id, "\ufffd") {
			t.Fatalf("%q, %v; want %q, ok %v", ext.SessionID, err, id, ok)
		}
	})
}
