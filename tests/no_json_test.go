package tests

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
	"unicode/utf16"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// TestWhatIsNoJSONPasses has an engine that orders by priority, for which no client has
// the grant. Sounds, images and forms carry no priority. They pass at any length.
func TestWhatIsNoJSONPasses(t *testing.T) {
	e := startEngines(t, 1, canned.Pace{})[0]
	s := startCaddy(t, route([]*canned.Engine{e}, typed(e, "sglang", "priority on"), "max_body 40KiB"))
	form := "--b\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\n" + strings.Repeat("sound ", 20000) + "\r\n--b--\r\n"
	for _, path := range []string{"/v1/chat/completions", "/v1/audio/transcriptions", "/vertex_generate", "/upload"} {
		for _, c := range []struct{ name, kind, body string }{
			{"sound", "audio/wav", "RIFF" + strings.Repeat("\x00", 100)},
			{"image", "image/png", "\x89PNG\r\n" + strings.Repeat("\x00", 100)},
			{"fields", "application/x-www-form-urlencoded", "a=b&c=d"},
			{"form", "multipart/form-data; boundary=b", form},
			{"form behind a line", "multipart/form-data; boundary=b", "\r\n" + form},
			{"form behind a preamble", "multipart/form-data; boundary=b", "preamble\r\n" + form},
			{"nothing", "application/json", ""},
			{"space", "text/plain", "  "},
			{"a list", "application/json", "[1,2]"},
		} {
			a := s.sendBy(t, http.MethodPost, path, c.body, "Content-Type", c.kind)
			if path == "/v1/chat/completions" && strings.Contains(string(a.body), "invalid JSON:") {
				a.status = 200 // the engine has judged it
			}
			if got := string(lastOf(e).Body); a.status != 200 || got != c.body {
				t.Errorf("%s to %s: status %d, %.200s; the engine got %d of %d bytes", c.name, path, a.status, a.body, len(got), len(c.body))
			}
		}
	}
	s.booksAtZero(t)
	equal(t, s.bodyBytes(t), 0, "bytes of bodies")
}

// TestUploadsAreStreamed has clients send the rest of their bodies only after the engine
// has received the beginning.
func TestUploadsAreStreamed(t *testing.T) {
	begun := make(chan struct{}, 1)
	addr := serveRaw(t, func(_ http.ResponseWriter, r *http.Request) {
		if _, err := io.ReadFull(r.Body, make([]byte, 5)); err == nil {
			begun <- struct{}{}
		}
		io.Copy(io.Discard, r.Body)
	})
	s := startCaddy(t, "kv_router "+addr)
	for _, c := range []struct{ name, head string }{
		{"PutOfAnything", "PUT /foo HTTP/1.1\r\n"},
		{"PostOfUnknownLength", "POST /foo HTTP/1.1\r\n"},
		{"GetWithABody", "GET /foo HTTP/1.1\r\n"},
		{"Sound", "POST /v1/audio/transcriptions HTTP/1.1\r\nContent-Type: audio/wav\r\n"},
		{"GRPC", "POST /invocations HTTP/1.1\r\nContent-Type: application/grpc+proto\r\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn := s.connect(t)
			fmt.Fprintf(conn, "%sHost: %s\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", c.head, s.addr)
			select {
			case <-begun:
			case <-time.After(patience):
				t.Fatal("the engine has not got the beginning")
			}
			fmt.Fprint(conn, "5\r\nworld\r\n0\r\n\r\n")
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			noError(t, err)
			resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				t.Errorf("status %d", resp.StatusCode)
			}
		})
	}
}

// TestContentTypeDoesNotGetAroundMaxRunning sends inferences whose Content-Type is not
// JSON, some of them unreadable. Each takes a slot.
func TestContentTypeDoesNotGetAroundMaxRunning(t *testing.T) {
	h := startGated(t, 1)
	chat := string(ask("hi").body())
	for _, c := range []struct{ body, coding string }{
		{"\xef\xbb\xbf" + chat, "identity"},
		{"\x1f\x8b" + chat, "gzip"},
		{chat, "identity"},
	} {
		header := []string{"Content-Type", "text/plain", "Content-Encoding", c.coding}
		first := h.start(t, atChat, c.body, header...)
		runs(t, h.gates[0], 1)
		second := h.start(t, atChat, c.body, header...)
		h.wantWaiting(t, 1)
		for range 2 {
			h.gates[0].pass(t, http.StatusOK)
		}
		h.wantServed(t, "", first, second)
	}
}

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

// TestTransfersNeedReadableBodies has clients hide the host of a transfer, in a pool whose engines
// transfer prompts.
func TestTransfersNeedReadableBodies(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	const plain = `{"model":"canned","kv_transfer_params":{"do_remote_prefill":true,"remote_host":"6.6.6.6"}}`
	apart := "worker " + engines[0].Addr() + " {\nengine vllm\nrole prefill\n}\nworker " + engines[1].Addr() + " {\nengine vllm\nrole decode\n}"
	for _, v := range []struct {
		path, kind, body string
		status           int // of the refusal; 0: it passes
	}{
		{atChat, "application/json", inUTF16(plain), 400},
		{"/invocations", "application/json", inUTF16(plain), 400},
		{atChat, "text/plain", `{"x":` + strings.Repeat("[", 300) + strings.Repeat("]", 300) + "," + plain[1:], 400},
		{"/v1/messages", "application/json", "{" + strings.Repeat(`"a":1,`, 5000) + plain[1:], 400},
		{"/inference/v1/generate", "application/json", strings.Replace(plain, "canned", strings.Repeat("x", 50<<10), 1), 413},
		{"/v1/audio/transcriptions", "multipart/form-data; boundary=b", "--b\r\n\r\n--b--\r\n", 0},
		{"/upload", "application/octet-stream", "\x00", 0},
	} {
		for _, block := range []string{apart, apart + "\ntrust pins", ""} {
			s := startCaddy(t, route(engines, "max_body 40KiB", block))
			received := len(engines[0].Journal()) + len(engines[1].Journal())
			a := s.sendBy(t, http.MethodPost, v.path, v.body, "Content-Type", v.kind)
			refuses := v.status != 0 && block == apart
			if refuses {
				wantError(t, v.path, a, v.status, "body_unreadable", "engines transfer prompts")
			}
			if arrived := len(engines[0].Journal())+len(engines[1].Journal()) > received; arrived == refuses {
				t.Errorf("%s, %.20q with %q: arrived %v, status %d", v.path, v.body, block, arrived, a.status)
			}
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
				for never := range strings.FieldsSeq(v.never) {
					if strings.Contains(got, never) {
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
