package tests

import (
	"net/http"
	"strings"
	"testing"
	"unicode/utf16"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// inUTF16 returns a text as Python's json.loads reads it, too.
func inUTF16(s string) string {
	var b strings.Builder
	for _, c := range utf16.Encode([]rune(s)) {
		b.WriteByte(byte(c))
		b.WriteByte(byte(c >> 8))
	}
	return b.String()
}

// TestTenantsBodiesAreReadWhereverEnginesCompute has tenants write another one's
// salt, session and slot, in forms that the router does not read but an engine
// may, at paths of no client's API.
func TestTenantsBodiesAreReadWhereverEnginesCompute(t *testing.T) {
	e := startEngines(t, 1, canned.Pace{})[0]
	const plain = `{"cache_salt":"victim","session_id":"victim","id_slot":7,"priority":-9}`
	long := func(n int) string { return `{"x":"` + strings.Repeat("x", n) + `",` + plain[1:] }
	forms := []struct {
		name, body, kind string
		status           int // 200: it is read, and cut
	}{
		{"plain", plain, "application/json", 200},
		{"of another type", plain, "text/plain", 200},
		{"as curl says", plain, "application/x-www-form-urlencoded", 200},
		{"of no type", plain, "", 200},
		{"said to be gzip", plain, "application/json; gzip", 200},
		{"long", long(2 << 20), "application/json", 200},
		{"too long", long(5 << 20), "application/json", 413},
		{"with a byte order mark", "\xef\xbb\xbf" + plain, "application/json", 400},
		{"in UTF-16", inUTF16(plain), "application/json", 400},
		{"nested deeply", `{"x":` + strings.Repeat("[", 300) + strings.Repeat("]", 300) + "," + plain[1:], "application/json", 400},
		{"of many members", "{" + strings.Repeat(`"a":1,`, 5000) + plain[1:], "application/json", 400},
		{"said to be of parts", plain, "multipart/form-data; boundary=b", 200},
	}
	for _, v := range []struct{ kind, path, never string }{
		{"vllm", "/invocations", `"cache_salt":"victim" "priority":-9`},
		{"sglang", "/close_session", `"cache_salt":"victim" "session_id":"victim" "priority":-9`},
		{"llamacpp", "/completion", `"cache_salt":"victim" "id_slot":7`},
		{"dynamo", "/v1/images/generations", `victim backend_instance_id`},
	} {
		s := startCaddy(t, route([]*canned.Engine{e}, typed(e, v.kind, "priority on"), "max_body 4MiB", "trust tenants"))
		for _, f := range forms {
			received := len(e.Journal())
			body := f.body
			if v.kind == "dynamo" {
				body = strings.Replace(body, plain[1:], `"nvext":{"cache_salt":"victim","backend_instance_id":7}}`, 1)
			}
			a := s.sendBy(t, http.MethodPost, v.path, body, "X-Tenant-Id", "mine", "Content-Type", f.kind)
			if a.status != f.status {
				t.Errorf("%s %s, %s: status %d, want %d; %.200s", v.kind, v.path, f.name, a.status, f.status, a.body)
			}
			if f.status != 200 {
				wantError(t, v.path+", "+f.name, a, f.status, map[int]string{400: "body_unreadable", 413: "body_too_large"}[f.status])
				continue
			}
			got := string(lastOf(e).Body)
			shown := got[max(0, len(got)-300):]
			for wish := range strings.FieldsSeq(v.never) {
				if len(e.Journal()) == received || strings.Contains(got, wish) {
					t.Errorf("%s %s, %s: the engine got %s", v.kind, v.path, f.name, shown)
				}
			}
			if v.kind == "vllm" && !strings.Contains(got, `"cache_salt":"mine"`) {
				t.Errorf("%s, %s: the engine is not told the tenant: %s", v.path, f.name, shown)
			}
		}
		// what is of several parts says nothing of this, and may be long
		form := "--b\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\n" + strings.Repeat("sound ", 1<<20) + "\r\n--b--\r\n"
		a := s.sendBy(t, http.MethodPost, "/v1/audio/transcriptions", form, "X-Tenant-Id", "mine", "Content-Type", "multipart/form-data; boundary=b")
		if got := lastOf(e); a.status != 200 || string(got.Body) != form {
			t.Errorf("%s: a form of %d bytes became one of %d: status %d", v.kind, len(form), len(got.Body), a.status)
		}
		// at paths where no engine computes, what is not read passes
		if a := s.sendBy(t, http.MethodPost, "/upload", "\x00\x01", "X-Tenant-Id", "mine", "Content-Type", "application/octet-stream"); a.status != 200 {
			t.Errorf("%s: another body at another path: status %d", v.kind, a.status)
		}
		s.booksAtZero(t)
	}
}

// TestUnreadBodiesPassWhereNothingIsAtStake, and else do not: where salts are
// enforced, or an engine heeds priorities that the client has no grant for.
func TestUnreadBodiesPassWhereNothingIsAtStake(t *testing.T) {
	e := startEngines(t, 1, canned.Pace{})[0]
	deep := `{"x":` + strings.Repeat("[", 300) + strings.Repeat("]", 300) + `,"priority":-2147483648,"id_slot":0,"routed_dp_rank":1}`
	many := "{" + strings.Repeat(`"a":1,`, 5000) + `"priority":1}`
	long := `{"x":"` + strings.Repeat("long ", 10000) + `","priority":1}`
	for _, v := range []struct {
		kind, worker, block string
		grant               string // with which they pass; empty: none makes them
		passes              bool
	}{
		{"vllm", "", "", "", true},
		{"vllm", "priority off", "", "", true},
		{"vllm", "priority on", "", "priorities", false},
		{"trtllm", "priority on", "", "priorities", false},
		{"sglang", "", "", "", true},
		{"sglang", "dp_size 2", "", "", true},
		{"sglang", "priority on", "", "priorities", false},
		{"llamacpp", "", "", "", true},
		{"other", "", "", "", true},
		{"auto", "", "", "", true},
		{"vllm", "", "cache_salt enforce", "", false},
	} {
		var more []string
		if v.grant != "" {
			more = append(more, trust(v.grant))
		}
		s := startCaddy(t, route([]*canned.Engine{e}, append([]string{typed(e, v.kind, v.worker), "max_body 40KiB", "pool unread", v.block}, more...)...))
		for name, body := range map[string]string{"deep": deep, "many": many, "long": long} {
			for _, path := range []string{"/v1/chat/completions", "/completion"} {
				status := 200
				switch {
				case v.passes:
				case name == "long":
					status = 413
				default:
					status = 400
				}
				if a := s.sendBy(t, http.MethodPost, path, body); a.status != status {
					t.Errorf("%s, %s%s, %s to %s: status %d, want %d; %.200s", v.kind, v.worker, v.block, name, path, a.status, status, a.body)
				} else if status == 200 && string(lastOf(e).Body) != body {
					t.Errorf("%s, %s: the engine got another body", v.kind, name)
				}
				if v.grant == "" {
					continue
				}
				if a := s.sendBy(t, http.MethodPost, path, body, trusted...); a.status != 200 {
					t.Errorf("%s, %s, %s to %s of who is trusted: status %d, %.200s", v.kind, v.worker, name, path, a.status, a.body)
				}
			}
		}
		s.booksAtZero(t)
	}
}
