package api

import (
	"strings"
	"testing"
)

// TestFind finds the part of a prompt that is new, as an explanation shows it.
func TestFind(t *testing.T) {
	chat := func(system, user string) string {
		return `{"model":"m","tools":[{"type":"function","function":{"name":"f","description":"` + strings.Repeat("d", 70) + `"}}],` +
			`"messages":[{"role":"system","content":"` + system + `"},{"role":"user","content":"` + user + `"}]}`
	}
	for _, c := range []struct {
		path, body string
		from       int
		want       Place
	}{
		{"/v1/completions", `{"prompt":"0123456789"}`, 4, Place{0, 0, "", 4, "45678"}},
		{"/v1/completions", `{"prompt":"0123456789"}`, 10, Place{}},
		{"/v1/completions", `{"prompt":[1,2,3]}`, 0, Place{}},
		{"/v1/completions", `{`, 0, Place{}},
		{"/v1/chat/completions", chat("0123456789", "hello you"), 18, Place{0, 0, "tools", 0, " f dd"}},
		{"/v1/chat/completions", chat("0123456789", "hello you"), 13, Place{0, 1, "system", 5, "56789"}},
		{"/v1/chat/completions", chat("0123456789", "hello you"), 100, Place{0, 2, "user", 2, "llo y"}},
		{"/v1/chat/completions", chat(`\u00e9\n0`, "hello"), 8, Place{0, 1, "system", 0, "é\\n0"}},
	} {
		got := Find(For(c.path), []byte(c.body), c.from, c.from+5)
		if got != c.want {
			t.Errorf("%s from %d: %+v, want %+v", c.body, c.from, got, c.want)
		}
	}
}
