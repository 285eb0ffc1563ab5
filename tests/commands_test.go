package tests

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// asCaddy has the test binary be a Caddy's command line.
const asCaddy = "KVROUTER_TEST_AS_CADDY"

// kvRouter runs `caddy kv-router` with arguments, and returns its code and what it printed.
func kvRouter(t testing.TB, args ...string) (code int, out string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], append([]string{"kv-router"}, args...)...)
	cmd.Env = append(os.Environ(), asCaddy+"=1")
	var b, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &b, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), b.String() + errs.String()
}

// TestCommands runs each command against a Caddy, by TCP and by a unix socket.
func TestCommands(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	site := route(engines)
	s := startCaddy(t, site)
	a, b := engines[0].Addr(), engines[1].Addr()
	for range 4 {
		s.mustChat(t, ask("hello").streamed(), "X-Session-Id", "secret-1", "X-Request-Id", "req-1")
	}
	eventually(t, "both workers to be seen", func() bool {
		_, out := kvRouter(t, "status", "--address", s.admin)
		return !strings.Contains(out, " untried ")
	})
	dir := t.TempDir()
	body := filepath.Join(dir, "body.json")
	write(t, body, `{"model":"canned","messages":[{"role":"user","content":"hello"}]}`)
	socket := "unix/" + filepath.Join(dir, "admin.sock")
	for _, address := range []string{s.admin, socket} {
		if address == socket {
			s.admin = socket
			s.mustReload(t, site)
		}
		for _, c := range []struct {
			args string
			code int
			want string
		}{
			{"status", 0, `(?s)pool default.*WORKER +STATE.*` + regexp.QuoteMeta(a) + ` +ok `},
			{"ready", 0, "^ready"},
			{"ready --pool nothing", 1, "there is no pool nothing"},
			{"status --json", 0, `"workers": \[`},
			{"drain " + a, 0, "is drained: nothing runs on it"},
			{"status", 0, regexp.QuoteMeta(a) + " +drained"},
			{"undrain " + a, 0, "gets new requests"},
			{"drain nobody:1", 1, "no worker with the address or id"},
			{"explain req-1", 0, `(?s)attempt 1, 2 of 2 candidates: \S+\nIt .*\n\n +CANDIDATE +CACHED.*→ `},
			{"explain nothing", 1, "remembers no such choice"},
			{"explain --file " + body, 0, `(?s)^model \S+: \S+\nIt .*CANDIDATE.*→ `},
			{"explain --file " + body + " --path nowhere", 1, "must be the path of a request"},
			{"explain", 1, "needs either"},
			{"call /v1/load_lora_adapter --body " + body, 0, `(?s)` + regexp.QuoteMeta(a) + `: 200 .*` + regexp.QuoteMeta(b) + `: 200 `},
			{"call /nowhere --worker " + a, 2, `^` + regexp.QuoteMeta(a) + `: 404`},
			{"call nowhere", 1, "must be a path of the engines"},
			{"call /x --worker nobody:1", 1, "no worker with the address or id"},
			{"sessions", 0, `(?s)HASH OF THE KEY.*[0-9a-f]{32} \S+ +router_only`},
			{"sessions show secret-1 --model canned", 0, `[0-9a-f]{32} \S+ +router_only`},
			{"sessions unbind secret-1 --model other", 1, "has no such session"},
			{"sessions burn secret-1", 1, "must be followed by show or unbind"},
			{"status --pool nothing", 1, `no pool has the name`},
		} {
			code, out := kvRouter(t, append(strings.Fields(c.args), "--address", address)...)
			if code != c.code || !regexp.MustCompile(c.want).MatchString(out) {
				t.Errorf("%s %s: code %d, want %d\n%s\nwant %s", c.args, address, code, c.code, out, c.want)
			}
			for line := range strings.Lines(out) {
				if c.args == "status" && utf8.RuneCountInString(line) > 101 {
					t.Errorf("%d columns: %s", utf8.RuneCountInString(line), line)
				}
			}
		}
	}
	if code, out := kvRouter(t, "sessions", "unbind", "secret-1", "--model", "canned", "--address", socket); code != 0 {
		t.Errorf("unbind: code %d\n%s", code, out)
	}
	if code, out := kvRouter(t, "status", "--address", freeAddr(t)); code != 1 || !strings.Contains(out, "connection refused") {
		t.Errorf("a wrong address: code %d\n%s", code, out)
	}
	engines[1].Kill()
	eventually(t, "the dead worker to be known", func() bool { return s.logged(t, markedDown) > 0 })
	eventually(t, "the dead worker needs a look", func() bool {
		code, out := kvRouter(t, "status", "--address", socket)
		return code == 2 && regexp.MustCompile(regexp.QuoteMeta(b)+" +unreachable").MatchString(out)
	})
	unlisted := httptest.NewServer(http.NotFoundHandler())
	defer unlisted.Close()
	c := unlisted.Listener.Addr().String()
	config := filepath.Join(dir, "Caddyfile")
	write(t, config, s.caddyfile("kv_router "+a+" "+b+" "+strings.Replace(a, "127.0.0.1", "localhost", 1)+" "+c+" 127.0.0.2:1 {\n"+
		"worker "+c+" {\nengine other\nmax_running auto\n}\nworker 127.0.0.2:1 {\nrole backup\nmodels m\n}\n}"))
	code, out := kvRouter(t, "check", "--config", config)
	if code != 2 || !strings.Contains(out, "127.0.0.2:1 is a backup") || !strings.Contains(out, a+": ") || !strings.Contains(out, b+": engine unknown, models unknown\n") || !strings.Contains(out, "at the same address as "+a) || !strings.Contains(out, "/v1/models answers 404; set worker models\n") || !strings.Contains(out, "problems: 6") {
		t.Errorf("check: code %d\n%s", code, out)
	}
}

// TestCommandsMeetReloads asks for the status while Caddy reloads.
func TestCommandsMeetReloads(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines))
	s.mustChat(t, ask("hello"))
	var reloads sync.WaitGroup
	reloads.Go(func() {
		for i := range 10 {
			if err := s.load(route(engines, fmt.Sprintf("max_body %d", 1000+i))); err != nil {
				t.Error(err)
			}
			time.Sleep(50 * time.Millisecond)
		}
	})
	for range 10 {
		if code, out := kvRouter(t, "status", "--address", s.admin); code != 0 {
			t.Errorf("code %d\n%s", code, out)
		}
	}
	reloads.Wait()
}

// TestPage reads the page and its state at the admin endpoint and on a site.
func TestPage(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, "kv_router_status /status\n"+route(engines, "worker * {\napi_key very-secret\n}"))
	s.mustChat(t, ask("a private prompt").streamed(), "X-Session-Id", "session-key", "X-Request-Id", "client-id")
	status, page, err := s.get(t.Context(), s.url+"/status")
	if err != nil || status != http.StatusOK || !strings.Contains(page, "<script>") {
		t.Fatalf("status %d, %v", status, err)
	}
	for _, loaded := range []string{" src=", "@import", "url("} {
		if strings.Contains(page, loaded) {
			t.Errorf("the page has %q, and must load nothing", loaded)
		}
	}
	if _, own, err := s.get(t.Context(), "http://"+s.admin+"/kv_router/"); err != nil || own != page {
		t.Errorf("the page of the admin endpoint differs: %v", err)
	}
	for _, path := range []string{"/status?state=0", "/status?choice=1", "/status?state=0&pool=default"} {
		status, state, err := s.get(t.Context(), s.url+path)
		if err != nil || status != http.StatusOK || !strings.Contains(state, engines[0].Addr()) {
			t.Errorf("%s: status %d, %v: %.200s", path, status, err, state)
		}
		for _, secret := range []string{"private", "session-key", "client-id", "very-secret", "key_hash", `"can_drain":true`} {
			if strings.Contains(state, secret) {
				t.Errorf("%s shows %s", path, secret)
			}
		}
	}
	if status, _, _ := s.get(t.Context(), s.url+"/status?state=0&pool=other"); status != http.StatusNotFound {
		t.Errorf("another pool: status %d", status)
	}
	if a := s.post(t.Context(), "/status?state=0", nil); a.status != http.StatusMethodNotAllowed {
		t.Errorf("POST: status %d", a.status)
	}
	_, state, _ := s.get(t.Context(), "http://"+s.admin+"/kv_router/?state=0")
	if !strings.Contains(state, `"can_drain":true`) || !strings.Contains(state, "client-id") {
		t.Errorf("the admin endpoint's state: %.300s", state)
	}
}

// TestOtherSitesCannotSteer sends what a browser sends for a form of another site.
func TestOtherSitesCannotSteer(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines))
	path := "/pools/default/workers/" + engines[0].Addr() + "/drain"
	for _, header := range [][]string{
		{"Sec-Fetch-Site", "cross-site"},
		{"Sec-Fetch-Site", "same-site"},
		{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate", "Referer", "http://" + s.admin + "/"},
		{"Origin", "http://evil.example"},
	} {
		if status, answer := s.api(t, http.MethodPost, path, nil, nil, header...); status != http.StatusForbidden {
			t.Errorf("%v: status %d %s", header, status, answer)
		}
	}
	if status, answer := s.api(t, http.MethodPost, path, nil, nil, "Origin", "http://"+s.admin, "Sec-Fetch-Site", "same-origin"); status != http.StatusOK {
		t.Errorf("its own page: status %d %s", status, answer)
	}
}

func write(t testing.TB, file, text string) {
	t.Helper()
	noError(t, os.WriteFile(file, []byte(text), 0o600))
}

// TestRunCommand runs a router without a configuration file.
func TestRunCommand(t *testing.T) {
	for args, want := range map[string]string{
		"": "name at least one engine", "--to x:1 --api-key a --api-key-file b": "use one of them", "--to x:1 --listen 8080": "must be like localhost:8080",
	} {
		if code, out := kvRouter(t, append([]string{"run", "--print"}, strings.Fields(args)...)...); code != 1 || !strings.Contains(out, want) {
			t.Errorf("%s: code %d, %s", args, code, out)
		}
	}
	for listen, want := range map[string]string{ // only there, and whatever Host says
		"localhost:8080": "http://:8080 {\n\tbind localhost\n", "http://[::1]:80": "http://:80 {\n\tbind ::1\n", "https://llm.example.com": "https://llm.example.com {\n\tkv_router_ready",
	} {
		if code, file := kvRouter(t, "run", "--print", "--to", "x:1", "--listen", listen); code != 0 || !strings.Contains(file, want) {
			t.Errorf("%s: code %d:\n%s", listen, code, file)
		}
	}
	engines := startEngines(t, 2, canned.Pace{})
	args := []string{"run", "--to", engines[0].Addr(), "--to", engines[1].Addr(), "--api-key", `a "b`, "--share", "valkey://127.0.0.1:1"}
	code, file := kvRouter(t, append(args, "--print", "--listen", ":8080")...)
	for _, want := range []string{"http://:8080 {", engines[0].Addr() + " " + engines[1].Addr(), "api_key `a \"b`", "share valkey:", "persist_config off"} {
		if code != 0 || !strings.Contains(file, want) {
			t.Fatalf("code %d, without %q:\n%s", code, want, file)
		}
	}
	s := startCaddy(t, strings.Replace(file[strings.Index(file, "\tkv_router_ready"):], "\n}\n", "", 1)) // what is in the site
	s.mustChat(t, ask("hello"))
	for _, want := range []string{"200 ready", "503 not ready: no worker can serve"} {
		eventually(t, want, func() bool {
			code, body, err := s.get(t.Context(), "http://"+s.addr+"/ready")
			return err == nil && fmt.Sprintf("%d %s", code, strings.TrimSpace(body)) == want
		})
		for _, e := range engines {
			e.Kill()
		}
	}
}
