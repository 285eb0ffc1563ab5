package tests

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// pinned are the files with the versions of the clients to install.
var pinned = []string{"requirements.txt", "package.json", "package-lock.json"}

// unreachable matches the messages of pip and npm if they cannot reach their registry.
var unreachable = regexp.MustCompile(`(?i)NewConnectionError|ConnectTimeout|ReadTimeout|Max retries exceeded|name resolution|network is unreachable|` +
	`connection (was )?(refused|reset|broken|aborted)|ENOTFOUND|ECONNREFUSED|ECONNRESET|ETIMEDOUT|EAI_AGAIN|ENETUNREACH|ERR_SOCKET_TIMEOUT|network timeout`)

// toolsDir returns the folder of the installed clients. Other pinned versions have another
// folder.
func toolsDir(t *testing.T) string {
	t.Helper()
	base := os.Getenv("KVROUTER_TOOLS")
	if base == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			t.Skipf("there is no folder to install into: %v", err)
		}
		base = filepath.Join(cache, "kvrouter-tools")
	}
	hash := sha256.New()
	for _, name := range pinned {
		data, err := os.ReadFile(filepath.Join("clients", name))
		noError(t, err)
		fmt.Fprintf(hash, "%d %s", len(data), data)
	}
	dir := filepath.Join(base, fmt.Sprintf("clients-%x", hash.Sum(nil)[:6]))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Skipf("there is no folder to install into: %v", err)
	}
	return dir
}

// installed returns a folder in which the steps were completed once. It skips the test if
// the package registry cannot be reached.
func installed(t *testing.T, name string, steps func(dir string) [][]string) string {
	t.Helper()
	if os.Getenv("KVROUTER_CLIENTS") == "" {
		t.Skip("KVROUTER_CLIENTS=1 installs the official clients from PyPI and npm, into the user's cache")
	}
	dir := filepath.Join(toolsDir(t), name)
	if _, err := os.Stat(dir); err == nil {
		return dir
	}
	fresh, err := os.MkdirTemp(filepath.Dir(dir), name+"-")
	noError(t, err)
	defer os.RemoveAll(fresh)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	start := time.Now()
	for _, step := range steps(fresh) {
		switch out, err := command(ctx, fresh, step...); {
		case err == nil:
		case ctx.Err() != nil, unreachable.MatchString(out):
			t.Skipf("the package registry cannot be reached: %v: %v\n%s", step, err, out)
		case strings.Contains(out, "ensurepip"):
			t.Skipf("python3 has no venv: %s", out)
		default:
			t.Fatalf("installing: %v: %v\n%s", step, err, out)
		}
	}
	t.Logf("installed in %v", time.Since(start).Round(100*time.Millisecond))
	if err := os.Rename(fresh, dir); err != nil {
		if _, there := os.Stat(dir); there != nil { // and not another process's
			t.Fatal(err)
		}
	}
	return dir
}

// command runs a program and returns its output. It ignores the user's settings for the
// clients.
func command(ctx context.Context, dir string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Dir = dir
	cmd.WaitDelay = 5 * time.Second
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "OPENAI_") && !strings.HasPrefix(v, "ANTHROPIC_") {
			cmd.Env = append(cmd.Env, v)
		}
	}
	cmd.Env = append(cmd.Env, "NO_PROXY=127.0.0.1", "no_proxy=127.0.0.1", "PYTHONDONTWRITEBYTECODE=1", "PYTHONUTF8=1")
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// need skips the test if a program is missing or too old. tooOld matches versions that the
// clients do not run on.
func need(t *testing.T, program, tooOld string) {
	t.Helper()
	path, err := exec.LookPath(program)
	if err != nil {
		t.Skipf("there is no %s: %v", program, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	version, err := command(ctx, "", path, "--version")
	if err != nil || tooOld != "" && regexp.MustCompile(tooOld).MatchString(version) {
		t.Skipf("%s is not fit for the clients: version %q, error %v", program, strings.TrimSpace(version), err)
	}
}

// clientsSite starts two working engines, one that dies in streams, one that refuses, one that is full, and
// a Caddy with inject_usage. Streams that wait get comments. At /late they get these before a refusal.
func clientsSite(t *testing.T) (s *server, engines []*canned.Engine, leave func()) {
	t.Helper()
	const keepalive = "keepalive 3ms"
	engines = startEngines(t, 5, canned.Pace{Header: 30 * time.Millisecond, PerWord: 4 * time.Millisecond})
	engines[2].SetFault(canned.Fault{Kind: canned.DieMidStream, Words: 5})
	engines[3].SetFault(canned.Fault{Kind: canned.Status, Status: 400, Body: `{"error":{"message":"no","type":"BadRequestError","code":"late"}}`})
	g := hold(engines[4])
	s = startCaddy(t, strings.Join([]string{
		"handle_path /late/* {", route(engines[3:4], "pool late", keepalive), "}",
		"handle_path /broken/* {", route(engines[2:3], "pool broken"), "}",
		"handle_path /down/* {", "kv_router " + freeAddr(t) + " {\npool down\n}", "}",
		"handle_path /full/* {", route(engines[4:], "pool full", maxRunning(1), "class default {\nttft 100ms\nlate refuse\n}"), "}",
		route(engines[:2], "inject_usage", "response_headers X-KV-", keepalive),
	}, "\n"))
	full := s.start(t, "/full/v1/chat/completions", string(ask("for ever").body()))
	eventually(t, "the engine to be full", func() bool { return g.running.Load() == 1 })
	return s, engines[:4], full.leave
}

// runClients runs a script of clients and checks what the engines received.
func runClients(t *testing.T, dir string, args ...string) {
	t.Helper()
	s, engines, leave := clientsSite(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	start := time.Now()
	out, err := command(ctx, dir, append(args, s.url, "http://"+engines[0].Addr())...)
	if err != nil || !strings.HasSuffix(strings.TrimSpace(out), "all good") {
		t.Fatalf("%v: %v\n%s", args, errors.Join(err, ctx.Err()), out)
	}
	versions, _, _ := strings.Cut(out, "\n")
	t.Logf("%s: %v", versions, time.Since(start).Round(100*time.Millisecond))
	for _, e := range engines {
		for _, r := range e.Journal() {
			key := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
			if key != "sk-none" || r.Method == http.MethodPost && !strings.HasPrefix(r.URI, "/v1/") {
				t.Errorf("an engine got %s %s with the key %q", r.Method, r.URI, key)
			}
		}
	}
	if engines[1].Requests() == 0 || engines[2].Requests() == 0 {
		t.Error("not all engines were asked through kv_router")
	}
	leave()
	s.booksAtZero(t)
}

// TestOfficialPythonClients runs OpenAI's and Anthropic's clients for Python.
func TestOfficialPythonClients(t *testing.T) {
	if testing.Short() {
		t.Skip("it installs packages")
	}
	need(t, "python3", `Python ([12]|3\.\d)\.`)
	script, requirements := absolute(t, "check.py"), absolute(t, "requirements.txt")
	dir := installed(t, "python", func(dir string) [][]string {
		return [][]string{
			{"python3", "-m", "venv", dir},
			{
				filepath.Join(dir, "bin", "python3"), "-m", "pip", "install", "--quiet", "--no-input",
				"--disable-pip-version-check", "--retries", "1", "--timeout", "20", "-r", requirements,
			},
		}
	})
	runClients(t, "", filepath.Join(dir, "bin", "python3"), script)
}

// TestOfficialNodeClients runs OpenAI's and Anthropic's clients for Node.
func TestOfficialNodeClients(t *testing.T) {
	if testing.Short() {
		t.Skip("it installs packages")
	}
	need(t, "node", `^v1?\d\.`)
	need(t, "npm", "")
	dir := installed(t, "node", func(dir string) [][]string {
		copyTo(t, dir, "package.json", "package-lock.json")
		return [][]string{{"npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries", "1", "--fetch-timeout", "20000"}}
	})
	// Node looks for packages beside the script.
	here := t.TempDir()
	copyTo(t, here, "check.mjs")
	noError(t, os.Symlink(filepath.Join(dir, "node_modules"), filepath.Join(here, "node_modules")))
	runClients(t, here, "node", "check.mjs")
}

// absolute returns the path of a file of the clients.
func absolute(t *testing.T, name string) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join("clients", name))
	noError(t, err)
	if _, err := os.Stat(path); err != nil { // which has the test run again when it has changed
		t.Fatal(err)
	}
	return path
}

// copyTo copies files of the clients.
func copyTo(t *testing.T, dir string, names ...string) {
	t.Helper()
	for _, name := range names {
		data, err := os.ReadFile(filepath.Join("clients", name))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), data, 0o600)
		}
		noError(t, err)
	}
}
