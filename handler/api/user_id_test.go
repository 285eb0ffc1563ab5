package api

import (
	"encoding/json"
	"strings"
	"testing"
)

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

// FuzzSessionOfUser compares the parser with encoding/json and with the older form.
func FuzzSessionOfUser(f *testing.F) {
	for _, id := range []string{
		"user_a_account_b_session_c", `{"device_id":"a","account_uuid":"b","session_id":"c"}`,
		`{"session_id":"\ud83d\ude00"}`, `{"session_id":"a","session_id":"b"}`, `{"session_id":null}`, "{", "user_", "alice",
	} {
		f.Add(id)
	}
	f.Fuzz(func(t *testing.T, id string) {
		got := sessionOfUser(id)
		if len(got) > 3*len(id) || got != strings.TrimSpace(got) {
			t.Fatalf("%q has the session %q", id, got)
		}
		if strings.HasPrefix(id, "user_") {
			if got != "" && !strings.Contains(id, "_session_") {
				t.Fatalf("%q has the session %q", id, got)
			}
			return
		}
		var form map[string]any
		if json.Unmarshal([]byte(id), &form) != nil || len(id) > maxUserID {
			return
		}
		// encoding/json replaces invalid UTF-8, and takes keys with escapes
		want, _ := form["session_id"].(string)
		if want = strings.TrimSpace(want); got != want && got != "" && !strings.ContainsRune(want, '\ufffd') {
			t.Fatalf("%q has the session %q, want %q", id, got, want)
		}
	})
}
