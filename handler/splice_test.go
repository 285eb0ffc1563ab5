package handler

import (
	"encoding/json"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
)

// TestMemberIsAdded adds a member to bodies in one part and in several, short
// and long ones, and sends each twice and as it is.
func TestMemberIsAdded(t *testing.T) {
	const member = `"routed_dp_rank":3`
	rng := rand.New(rand.NewPCG(4, 4))
	long := strings.Repeat("x", 3*small)
	for _, c := range []struct{ body, want string }{
		{`{"a":1}`, `{"a":1,"routed_dp_rank":3}`},
		{"{\"a\":[{}]} \r\n\t", "{\"a\":[{}],\"routed_dp_rank\":3} \r\n\t"},
		{`{"routed_dp_rank":7,"a":"}"}`, `{"routed_dp_rank":7,"a":"}","routed_dp_rank":3}`},
		{`{}`, `{"routed_dp_rank":3}`},
		{"{ \n } ", "{ \n \"routed_dp_rank\":3} "},
		{`{"p":"` + long + `"}`, `{"p":"` + long + `","routed_dp_rank":3}`},
		{strings.Repeat(" ", 3*small) + "{}", strings.Repeat(" ", 3*small) + `{"routed_dp_rank":3}`},
		{`[1]`, `[1]`},
		{`}`, `,"routed_dp_rank":3}`}, // never one that was read as a request
		{"  ", "  "},
		{"", ""},
	} {
		for range 20 {
			buf := bufferOf([]byte(c.body))
			b := replayOf(buf, cutUp(buf.data, rng)...)
			plain, added := b.with("")
			if added || plain.size != b.size {
				t.Fatal("no member was added")
			}
			s, added := b.with(member)
			if added != (c.want != c.body) || s.size != int64(len(c.want)) {
				t.Fatalf("%.40q: added %v, size %d, want %.40q", c.body, added, s.size, c.want)
			}
			for _, v := range []struct {
				s    sending
				want string
			}{{s, c.want}, {plain, c.body}, {s, c.want}} {
				r := v.s.open()
				got, err := io.ReadAll(r)
				if err != nil || string(got) != v.want {
					t.Fatalf("sent %.80q, error %v, want %.80q", got, err, v.want)
				}
				r.Close()
			}
			b.done()
			if n := b.users.Load(); n != 0 {
				t.Fatalf("%d users are left", n)
			}
		}
	}
}

// FuzzMember checks of any JSON object that it stays one, with one member more.
func FuzzMember(f *testing.F) {
	f.Add([]byte(`{"a":{"b":"}"}}`), 3)
	f.Add([]byte(" {\n} "), 1)
	f.Fuzz(func(t *testing.T, body []byte, cut int) {
		var before map[string]any
		if json.Unmarshal(body, &before) != nil || before == nil {
			return
		}
		cut = min(max(cut, 0), len(body))
		b := replayOf(nil, body[:cut], body[cut:])
		s, added := b.with(`"added":[1]`)
		r := s.open()
		got, err := io.ReadAll(r)
		r.Close()
		var after map[string]any
		if err != nil || !added || int64(len(got)) != s.size || json.Unmarshal(got, &after) != nil {
			t.Fatalf("%q became %q, added %v, error %v", body, got, added, err)
		}
		if list, ok := after["added"].([]any); !ok || len(list) != 1 {
			t.Fatalf("%q became %q", body, got)
		}
		delete(after, "added")
		delete(before, "added")
		if len(after) != len(before) {
			t.Fatalf("%q became %q", body, got)
		}
	})
}
