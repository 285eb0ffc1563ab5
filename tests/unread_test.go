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

// TestUnreadBodies has bodies that the router cannot read. They are refused for a
// tenant and where salts are enforced, and pass as they are otherwise.
func TestUnreadBodies(t *testing.T) {
	e := startEngines(t, 1, canned.Pace{})[0]
	const plain = `{"cache_salt":"victim","session_id":"victim","id_slot":7,"priority":-9}`
	form := "--b\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\nsound\r\n--b--\r\n"
	const vertex = `{"instances":[{"text":"x"}],"parameters":{"cache_salt":"victim","session_params":{"id":"s"},"priority":99}}`
	for _, v := range []struct {
		name, path, kind, body string
		status                 int // of the refusal
	}{
		{"UTF-16", "/v1/chat/completions", "text/plain", inUTF16(plain), 400},
		{"words", "/v1/chat/completions", "text/plain", "some words", 400},
		{"gzip", "/v1/chat/completions", "application/json; gzip", gzipped(plain), 400},
		{"too long", "/v1/chat/completions", "application/json", strings.Replace(plain, "victim", strings.Repeat("x", 50<<10), 1), 413},
		{"nested deeply", "/invocations", "application/json", `{"x":` + strings.Repeat("[", 300) + strings.Repeat("]", 300) + "," + plain[1:], 400},
		{"many members", "/close_session", "application/json", "{" + strings.Repeat(`"a":1,`, 5000) + plain[1:], 400},
		{"too long for another path", "/tokenize", "application/json", strings.Replace(plain, "victim", strings.Repeat("x", 50<<10), 1), 413},
		{"another type", "/invocations", "text/plain", plain, 400},
		{"no type", "/infill", "", plain, 400},
		{"form", "/v1/audio/transcriptions", "multipart/form-data; boundary=b", form, 400},
		{"anything", "/upload", "application/octet-stream", "\x00\x01", 400},
		{"Vertex AI's form", "/vertex_generate", "application/json", vertex, 400},
		{"Vertex AI's form, any path", "/v1/endpoints/1:predict", "application/json", vertex, 400},
	} {
		engine := "vllm"
		if v.body == vertex {
			engine = "sglang"
		}
		for _, c := range []struct {
			block, tenant string
			refuses       bool
		}{
			{"trust tenants", "mine", true},
			{"enforce_cache_salt", "", true},
			{"trust tenants", "", false},
			{"pool default", "mine", false}, // which is not granted
		} {
			s := startCaddy(t, route([]*canned.Engine{e}, typed(e, engine, "priority on"), "max_body 40KiB", c.block))
			received := len(e.Journal())
			header := []string{"X-Tenant-Id", c.tenant, "Content-Type", v.kind}
			if v.name == "gzip" {
				header = append(header, "Content-Encoding", "gzip")
			}
			a := s.sendBy(t, http.MethodPost, v.path, v.body, header...)
			if c.refuses {
				wantError(t, v.name+", "+c.block, a, v.status, "body_unreadable", "the router cannot read the body")
			}
			if arrived := len(e.Journal()) > received; arrived == c.refuses {
				t.Errorf("%s, %s, tenant %q: arrived %v, status %d", v.name, c.block, c.tenant, arrived, a.status)
			} else if arrived && string(lastOf(e).Body) != v.body {
				t.Errorf("%s, %s: the engine got another body", v.name, c.block)
			}
			s.booksAtZero(t)
		}
	}
}

// TestTenantsBodiesAreReadWhereverEnginesCompute has tenants write another one's
// salt, session and slot at paths of no known API: these are cut.
func TestTenantsBodiesAreReadWhereverEnginesCompute(t *testing.T) {
	e := startEngines(t, 1, canned.Pace{})[0]
	const plain = `{"cache_salt":"victim","session_id":"victim","id_slot":7,"priority":-9}`
	for _, v := range []struct{ kind, path, never string }{
		{"vllm", "/invocations", `"cache_salt":"victim" "priority":-9`},
		{"sglang", "/close_session", `"cache_salt":"victim" "session_id":"victim" "priority":-9`},
		{"llamacpp", "/completion", `"cache_salt":"victim" "id_slot":7`},
		{"dynamo", "/v1/images/generations", `victim backend_instance_id`},
	} {
		s := startCaddy(t, route([]*canned.Engine{e}, typed(e, v.kind, "priority on"), "trust tenants"))
		body := plain
		if v.kind == "dynamo" {
			body = `{"nvext":{"cache_salt":"victim","backend_instance_id":7}}`
		}
		for _, coding := range []string{"", "gzip"} { // which it is not
			received := len(e.Journal())
			long := strings.Replace(body, "{", `{"x":"`+strings.Repeat("x", 2<<20)+`",`, 1)
			for _, sent := range []string{body, long, "\xef\xbb\xbf" + body} { // with a byte order mark
				a := s.sendBy(t, http.MethodPost, v.path, sent, "X-Tenant-Id", "mine", "Content-Type", "application/json", "Content-Encoding", coding)
				if a.status != 200 || len(e.Journal()) == received {
					t.Errorf("%s %s: status %d, %.200s", v.kind, v.path, a.status, a.body)
					continue
				}
				got := string(lastOf(e).Body)
				for wish := range strings.FieldsSeq(v.never) {
					if strings.Contains(got, wish) {
						t.Errorf("%s %s: the engine got %s", v.kind, v.path, got[max(0, len(got)-300):])
					}
				}
				if v.kind == "vllm" && !strings.Contains(got, `"cache_salt":"mine"`) {
					t.Errorf("%s: the engine is not told the tenant", v.path)
				}
			}
		}
		s.booksAtZero(t)
	}
}
