package tests

import (
	"bufio"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

const (
	keepaliveComment = ": keepalive\n\n"
	wholeStream      = oneChunk + "data: [DONE]\n\n"
)

// answersWith answers like an engine that computes nothing.
func answersWith(status int, kind, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", kind)
		w.Header().Set("X-Engine", "e1")
		w.WriteHeader(status)
		io.WriteString(w, body)
	}
}

// streams is an engine that streams a whole answer.
var streams = answersWith(http.StatusOK, "text/event-stream", wholeStream)

// answersWhen has an engine answer inference requests only once they are let go.
func answersWhen(let <-chan struct{}, then http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost {
			http.NotFound(w, r)
			return
		}
		io.Copy(io.Discard, r.Body)
		select {
		case <-let:
			then(w, r)
		case <-r.Context().Done():
		}
	}
}

// readKept reads an answer. After its first comment, it calls then.
func (s *server) readKept(t *testing.T, path, body string, then func(), header ...string) (resp *http.Response, text string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	resp = s.mustOpen(ctx, t, path, []byte(body), header...)
	from := io.Reader(resp.Body)
	if resp.Header.Get("Content-Encoding") == "gzip" {
		var err error
		from, err = gzip.NewReader(resp.Body)
		noError(t, err)
	}
	var all strings.Builder
	for lines := bufio.NewReader(from); ; {
		line, err := lines.ReadString('\n')
		all.WriteString(line)
		if strings.HasPrefix(line, ":") && then != nil {
			then()
			then = nil
		}
		if err != nil {
			if err != io.EOF {
				t.Errorf("reading the answer: %v", err)
			}
			return resp, all.String()
		}
	}
}

// TestKeepalive has engines answer only after the client has a comment.
func TestKeepalive(t *testing.T) {
	const chats, messages, responses = "/v1/chat/completions", "/v1/messages", "/v1/responses"
	refuses := answersWith(http.StatusBadRequest, "application/json", "{\"error\": {\"message\": \"too long\",\n\"type\": \"BadRequestError\", \"code\": 400}}")
	hangsUp := func(w http.ResponseWriter, _ *http.Request) { canned.CloseConn(w, false) }
	full := maxRunning(1) + "\nqueue {\nmax_wait 2s\n}" // long after the first comment
	for _, v := range []struct {
		name, path, block, before string
		engines                   []http.HandlerFunc // in the order of their answers; all but the last answer once
		full                      bool               // another request has the only slot
		stays                     bool               // and keeps it
		header                    []string
		want                      string // with one comment of all
		engine                    bool   // the header is the engine's
	}{
		{name: "prefill", engines: []http.HandlerFunc{streams}, want: keepaliveComment + wholeStream},
		{name: "expects 100", header: []string{"Expect", "100-continue"}, engines: []http.HandlerFunc{streams}, want: keepaliveComment + wholeStream},
		{name: "queue", block: maxRunning(1), full: true, engines: []http.HandlerFunc{streams}, want: keepaliveComment + wholeStream},
		{name: "compressed", before: "encode gzip", header: []string{"Accept-Encoding", "gzip"}, engines: []http.HandlerFunc{streams}, want: keepaliveComment + wholeStream},
		{name: "retry", engines: []http.HandlerFunc{hangsUp, streams}, want: keepaliveComment + wholeStream},
		{name: "refusal", engines: []http.HandlerFunc{refuses}, want: keepaliveComment + `data: {"error":{"message":"too long","type":"BadRequestError","code":400}}` + "\n\n"},
		{name: "refusal of messages", path: messages, engines: []http.HandlerFunc{refuses}, want: keepaliveComment + "event: error\n" + `data: {"type":"error","error":{"message":"too long","type":"BadRequestError","code":400}}` + "\n\n"},
		{
			name: "refusal of responses", path: responses, engines: []http.HandlerFunc{refuses},
			want: keepaliveComment + "event: error\n" + `data: {"type":"error","code":400,"message":"too long","param":null,"sequence_number":0,"error":{"message":"too long","type":"BadRequestError","code":400}}` + "\n\n",
		},
		{name: "failure", engines: []http.HandlerFunc{hangsUp, hangsUp}, want: keepaliveComment + `data: {"error":{"message":"the worker failed before it answered","type":"server_error","param":null,"code":"worker_failed"}}` + "\n\n"},
		{
			name: "queue timeout", block: full, full: true, stays: true, engines: []http.HandlerFunc{streams},
			want: keepaliveComment + `data: {"error":{"message":"all workers are full, and none had a free slot within 2s; try again later","type":"server_error","param":null,"code":"queue_timeout"}}` + "\n\n",
		},
		{
			name: "header operations", block: "reverse_proxy {\nheader_down X-Operator yes\nheader_down X-Status {rp.status_code}\n}",
			engines: []http.HandlerFunc{streams}, want: keepaliveComment + wholeStream,
		},
		{
			name: "pause", engines: []http.HandlerFunc{nil}, engine: true,
			want: oneChunk + keepaliveComment + wholeStream,
		},
	} {
		whenInTime(t, v.name, func(t *testing.T) bool {
			let := make(chan struct{})
			turn := make(chan http.HandlerFunc, len(v.engines))
			for _, h := range v.engines {
				turn <- h
			}
			engine := answersWhen(let, func(w http.ResponseWriter, r *http.Request) {
				select {
				case h := <-turn:
					h(w, r)
				default:
					v.engines[len(v.engines)-1](w, r)
				}
			})
			if v.engine {
				paused := stall(let, oneChunk)
				engine = func(w http.ResponseWriter, r *http.Request) {
					if r.Method == http.MethodPost {
						w.Header().Set("X-Engine", "e1")
						paused(w, r)
					}
				}
			}
			var addrs []string
			for range v.engines {
				addrs = append(addrs, serveRaw(t, engine))
			}
			block := v.block + "\nkeepalive 40ms"
			up := " " + strings.Join(addrs, " ")
			if rest, proxy := strings.CutPrefix(v.block, "reverse_proxy {"); proxy {
				block, up = "reverse_proxy"+up+" {"+rest+"\nkeepalive 40ms", ""
			}
			s := startCaddy(t, v.before+"\nkv_router"+up+" {\n"+block+"\n}")
			body := string(ask("long prompt").streamed().body())
			path := v.path
			switch path {
			case "":
				path = chats
			case responses:
				body = `{"input":"long prompt","stream":true}`
			}
			var first asked
			if v.full {
				first = s.startChat(t, "occupies the slot")
				eventually(t, "the slot is taken", func() bool { return s.workers(t)[0].Load.Running == 1 })
			}
			resp, text := s.readKept(t, path, body, func() {
				if !v.stays {
					close(let)
				}
			}, v.header...)
			if v.engine && resp.Header.Get("X-Engine") == "" {
				return false // the engine's header took longer than the keepalive
			}
			begin, rest, _ := strings.Cut(text, keepaliveComment)
			text = begin + keepaliveComment + strings.ReplaceAll(rest, keepaliveComment, "") // more may come between any two events
			if h := resp.Header; resp.StatusCode != http.StatusOK || !strings.HasPrefix(h.Get("Content-Type"), "text/event-stream") || (h.Get("X-Engine") != "") != v.engine {
				t.Errorf("status %d, header %v", resp.StatusCode, h)
			}
			if text != v.want {
				t.Errorf("the client got\n%s\nwant\n%s", text, v.want)
			}
			if strings.Contains(v.block, "header_down") && (resp.Header.Get("X-Operator") != "yes" || resp.Header["X-Status"] != nil) {
				t.Errorf("header operations gave %v", resp.Header)
			}
			if v.stays {
				close(let)
			}
			if v.full {
				first.wait(t)
			}
			s.booksAtZero(t)
			return true
		})
	}
}

// TestKeepaliveYields has clients wait longer than the keepalive that get no comment, or no header of
// the router's.
func TestKeepaliveYields(t *testing.T) {
	full := maxRunning(1) + "\nqueue {\nmax_wait 1s\n}\n"
	for _, v := range []struct {
		name, block, errors string
		plain               bool // the client asked for no stream
		header              []string
		status              int
	}{
		{name: "off", block: "keepalive off", status: 503},
		{name: "plain", block: "keepalive 20ms", plain: true, status: 503},
		{name: "browser", block: "keepalive 20ms", header: []string{"Origin", "https://chat.example"}, status: 503},
		{name: "error routes", errors: "handle_errors {\nrespond elsewhere 200\n}", status: 200},
		{name: "error routes, but set", errors: "handle_errors {\nrespond elsewhere 200\n}", block: "keepalive 20ms", status: 200},
	} {
		t.Run(v.name, func(t *testing.T) {
			let := make(chan struct{})
			s := startCaddy(t, v.errors+"\nkv_router "+serveRaw(t, answersWhen(let, streams))+" {\n"+full+v.block+"\n}")
			first := s.startChat(t, "occupies the slot")
			eventually(t, "the slot is taken", func() bool { return s.workers(t)[0].Load.Running == 1 })
			c := ask("waits")
			c.Stream = !v.plain
			resp, text := s.readKept(t, "/v1/chat/completions", string(c.body()), nil, v.header...)
			set := v.errors != "" && v.block != ""
			if resp.StatusCode != v.status || strings.Contains(text, ":") && strings.HasPrefix(text, keepaliveComment) != set || v.errors != "" && (text == "elsewhere") == set {
				t.Errorf("status %d, body %q", resp.StatusCode, text)
			}
			close(let)
			first.wait(t)
			s.booksAtZero(t)
		})
	}
}

// TestKeepaliveThroughNginx has an nginx before the router that cuts connections which are silent for 2 s. It cuts
// a request without comments, while one with comments waits for longer.
func TestKeepaliveThroughNginx(t *testing.T) {
	takesSeconds(t)
	nginx, err := exec.LookPath("nginx")
	if err != nil {
		t.Skip(err)
	}
	let := make(chan struct{})
	up := serveRaw(t, answersWhen(let, streams))
	s := startCaddy(t, "handle_path /silent/* {\nkv_router "+up+" {\npool silent\nkeepalive off\n}\n}\nkv_router "+up+" {\nkeepalive 100ms\n}")
	dir, addr := t.TempDir(), freeAddr(t)
	conf := fmt.Sprintf("daemon off; master_process off; pid %[1]s/pid; error_log %[1]s/log; events {}\nhttp { access_log off; proxy_temp_path %[1]s; client_body_temp_path %[1]s;"+
		"fastcgi_temp_path %[1]s; uwsgi_temp_path %[1]s; scgi_temp_path %[1]s;\nserver { listen %[2]s; location / { proxy_pass %[3]s; proxy_http_version 1.1; proxy_read_timeout 2s; } } }", dir, addr, s.url)
	noError(t, os.WriteFile(filepath.Join(dir, "nginx.conf"), []byte(conf), 0o600))
	cmd := exec.CommandContext(t.Context(), nginx, "-p", dir, "-e", filepath.Join(dir, "log"), "-c", filepath.Join(dir, "nginx.conf"))
	noError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Wait() })
	eventually(t, "nginx", func() bool {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	s.url = "http://" + addr
	body := ask("long prompt").streamed().body()
	resp, text := s.readKept(t, "/v1/chat/completions", string(body), func() {
		defer close(let)
		if a := s.post(t.Context(), "/silent/v1/chat/completions", body); a.status != http.StatusGatewayTimeout {
			t.Errorf("without comments: status %d", a.status)
		}
	})
	if resp.StatusCode != http.StatusOK || strings.ReplaceAll(text, keepaliveComment, "") != wholeStream {
		t.Errorf("status %d, %q", resp.StatusCode, text)
	}
}

// TestKeptClientLeaves has a client leave the queue after a comment.
func TestKeptClientLeaves(t *testing.T) {
	h := startGated(t, 1, "keepalive 20ms")
	first := h.startChat(t, "occupies the slot")
	h.awaitRunning(t, 1)
	ctx, leave := context.WithCancel(t.Context())
	resp := h.mustOpen(ctx, t, atChat, ask("leaves").streamed().body())
	if line, err := bufio.NewReader(resp.Body).ReadString('\n'); line != ": keepalive\n" {
		t.Fatalf("the client got %q, %v", line, err)
	}
	leave()
	h.wantWaiting(t, 0)
	h.finish(t, first)
	equal(t, h.engines[0].Requests(), 1, "requests at the engine")
}
