// Package tests drives kv_router from outside: a real Caddy in this process,
// real sockets, canned engines behind it and real clients before it.
//
// The Caddy is one per process, so no test here runs in parallel with another in
// its process. TestMain has several of these.
package tests

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	_ "github.com/caddy-kvrouter/kvrouter"
	"github.com/caddy-kvrouter/kvrouter/tests/canned"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
)

// server is a Caddy that serves one site on loopback.
type server struct {
	url     string
	admin   string
	client  *http.Client
	log     string // the file of its log, JSON lines
	globals string
	addr    string
	version int // of the config last loaded
}

// startCaddy runs a Caddy until the test ends. Its site block holds the directives in
// site. Further global options may follow.
func startCaddy(t testing.TB, site string, globals ...string) *server {
	t.Helper()
	dir := t.TempDir()
	t.Setenv("XDG_DATA_HOME", dir) // for the journals
	s := newServer(t, dir, globals...)
	t.Cleanup(func() {
		s.client.CloseIdleConnections()
		if err := caddy.Stop(); err != nil {
			t.Errorf("stopping Caddy: %v", err)
		}
		s.findPanics(t)
		if t.Failed() {
			s.dumpLog(t)
		}
	})
	if err := s.reload(site); err != nil {
		t.Fatalf("starting Caddy: %v\n%s", err, s.caddyfile(site))
	}
	return s
}

// newServer returns a server that does not run yet, with its data in a folder.
func newServer(t testing.TB, dir string, globals ...string) *server {
	addr := freeAddr(t)
	return &server{
		url: "http://" + addr, addr: addr, admin: freeAddr(t), log: filepath.Join(dir, "caddy.log"),
		globals: fmt.Sprintf("storage file_system %s\n%s", dir, strings.Join(globals, "\n")),
		client:  &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64, DisableCompression: true}},
	}
}

func (s *server) caddyfile(site string) string {
	return fmt.Sprintf(`{
	admin %s
	persist_config off
	auto_https off
	default_bind 127.0.0.1
	log default {
		output file %s {
			roll_disabled
		}
	}
	%s
}
http://%s {
	respond /.config "%d"
	%s
}
`, s.admin, s.log, s.globals, s.addr, s.version, site)
}

// load gives the running Caddy a new site block. For a moment the listener of the old
// configuration still accepts connections, and drops some when it closes.
func (s *server) load(site string) error {
	s.version++
	cfg, err := adapt(s.caddyfile(site))
	if err != nil {
		return err
	}
	return caddy.Load(cfg, true)
}

// reload is load for tests without requests meanwhile. It returns when only the new
// configuration accepts connections.
func (s *server) reload(site string) error {
	if err := s.load(site); err != nil {
		return err
	}
	s.client.CloseIdleConnections()
	probe := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	// The kernel shares connections out among the listeners that are open.
	for inARow, deadline := 0, time.Now().Add(patience); inARow < 20; inARow++ {
		resp, err := probe.Get(s.url + "/.config")
		if err == nil {
			var body []byte
			body, err = io.ReadAll(resp.Body)
			resp.Body.Close()
			if err == nil && string(body) == strconv.Itoa(s.version) {
				continue
			}
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the config before still serves, or nothing does: %w", err)
		}
		inARow = -1
	}
	return nil
}

// mustReload reloads a configuration that is valid.
func (s *server) mustReload(t testing.TB, site string) {
	t.Helper()
	noError(t, s.reload(site))
}

func adapt(caddyfile string) ([]byte, error) {
	cfg, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(caddyfile), nil)
	return cfg, err
}

// findPanics fails the test if net/http recovered from a panic: the client of that request
// saw only a closed connection.
func (s *server) findPanics(t testing.TB) {
	data, err := os.ReadFile(s.log)
	if err != nil {
		t.Errorf("reading Caddy's log: %v", err)
	}
	if i := strings.Index(string(data), "panic serving"); i >= 0 {
		t.Errorf("a handler panicked: %.2000s", data[i:])
	}
}

// dumpLog logs the last warnings and errors of Caddy's log.
func (s *server) dumpLog(t testing.TB) {
	data, err := os.ReadFile(s.log)
	if err != nil {
		return
	}
	var lines []string
	for line := range strings.Lines(string(data)) {
		if !strings.Contains(line, `"level":"info"`) && !strings.Contains(line, "HTTP/") {
			lines = append(lines, line[:min(len(line), 600)])
		}
	}
	t.Logf("the end of Caddy's log:\n%s", strings.Join(lines[max(0, len(lines)-12):], "\n"))
}

// freeAddr returns a loopback address that nothing listens on.
func freeAddr(t testing.TB) string {
	t.Helper()
	ln := listen(t)
	defer ln.Close()
	return ln.Addr().String()
}

// startEngines starts n engines, named e1, e2 and so on, until the test ends.
func startEngines(t testing.TB, n int, pace canned.Pace) []*canned.Engine {
	t.Helper()
	engines := make([]*canned.Engine, n)
	for i := range engines {
		e, err := canned.Start(fmt.Sprintf("e%d", i+1))
		noError(t, err)
		e.SetPace(pace)
		t.Cleanup(e.Kill)
		engines[i] = e
	}
	return engines
}

// route returns the directive for engines of any kind, with the lines of its block.
func route[E interface{ Addr() string }](engines []E, block ...string) string {
	return "kv_router " + addresses(engines) + " {\n" + strings.Join(block, "\n") + "\n}"
}

// addresses returns those of engines, with spaces between them.
func addresses[E interface{ Addr() string }](engines []E) string {
	addrs := make([]string, len(engines))
	for i, e := range engines {
		addrs[i] = e.Addr()
	}
	return strings.Join(addrs, " ")
}

// noError ends the test if there was an error.
func noError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// equal fails the test if a value is not the wanted one.
func equal[V comparable](t testing.TB, got, want V, what string, args ...any) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %v, want %v", fmt.Sprintf(what, args...), got, want)
	}
}

// patience is how long tests wait for what must happen at some time. It is long because the machine may be busy.
const patience = time.Minute

// eventually waits until cond holds, and fails the test if it never does.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	within(t, patience, what, cond)
}

// right waits until wrong says nothing, and fails the test with what it said last.
func right(t testing.TB, wrong func() string) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		if said := wrong(); said == "" {
			return
		} else if time.Now().After(deadline) {
			t.Fatal(said)
		}
	}
}

// within waits until cond holds, and fails the test when it does not within d.
func within(t testing.TB, d time.Duration, what string, cond func() bool) {
	t.Helper()
	deadline := time.Now().Add(d)
	for !cond() {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", d, what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// get fetches a page of Caddy or of its admin endpoint.
func (s *server) get(ctx context.Context, url string) (int, string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, "", err
	}
	resp, err := s.client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(body), err
}

// connect returns a connection to the site, to write requests by hand. It is closed
// with the test.
func (s *server) connect(t testing.TB) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", s.addr)
	noError(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}

// inLong says that tests take their long form, which KVROUTER_LONG=1 asks for.
var inLong = os.Getenv("KVROUTER_LONG") == "1"

// span returns how long a part of a test takes: usually, and in its long form.
func span(usual, long time.Duration) time.Duration {
	if inLong {
		return long
	}
	return usual
}

// takesSeconds skips a test that takes seconds, if only quick ones are asked for.
func takesSeconds(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("takes seconds")
	}
}
