package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// contender is a router that is measured, or none.
type contender struct {
	name    string
	traffic traffic
	// directive is what a Caddy's site consists of, with placeholders.
	directive string
	// command is another router's command line, with placeholders, and port
	// where it listens then; 0 for a free one.
	command string
	port    int

	urls  []string // where requests go
	admin string   // a Caddy's admin address
	proc  *process // nil where there is no router
	over  bool     // it has ended too early
}

// builtin returns the contenders that are always there.
func builtin() []*contender {
	const router = "kv_router {dials}"
	return []*contender{
		{name: "direct"},
		{name: baseline, directive: "reverse_proxy {dials} {\n\t\tlb_policy round_robin\n\t}"},
		{name: "kv_router", directive: router},
		{name: "kv_router-session", directive: router, traffic: sessions},
		{name: "kv_router-header", directive: router, traffic: headers},
		{name: "kv_router-tokens", directive: router, traffic: tokens},
	}
}

func contenderNames(list []*contender) []string {
	names := make([]string, 0, len(list))
	for _, c := range list {
		names = append(names, c.name)
	}
	return names
}

// external reads name=port=command.
func external(s string) (*contender, error) {
	parts := strings.SplitN(s, "=", 3)
	if len(parts) != 3 || parts[0] == "" || strings.TrimSpace(parts[2]) == "" {
		return nil, fmt.Errorf("with: expected name=port=command, got %q", s)
	}
	port, err := strconv.ParseUint(parts[1], 10, 16)
	if err != nil {
		return nil, fmt.Errorf("with: port %q: %w", parts[1], err)
	}
	return &contender{name: parts[0], port: int(port), command: parts[2]}, nil
}

// checkName tells what is wrong with the name of a further contender: it is one
// in tables, in lists, and of files.
func checkName(name string, taken []*contender) error {
	switch {
	case slices.Contains(contenderNames(taken), name):
		return fmt.Errorf("with: there is a %q already", name)
	case name == "." || name == ".." || strings.ContainsAny(name, `/\,`+"\n"):
		return fmt.Errorf("with: %q cannot be a name", name)
	}
	return nil
}

// surroundings are what contenders run in.
type surroundings struct {
	caddy, dir string
	upstreams  []string
	watchdog   *watchdog
}

const site = `{
	admin {admin}
	persist_config off
	auto_https off
	storage file_system {dir}
	log {
		level WARN
	}
}
http://127.0.0.1:{port} {
	bind 127.0.0.1
	{directive}
}
`

// start starts the router and waits until it answers.
func (c *contender) start(ctx context.Context, in *surroundings) error {
	if c.directive == "" && c.command == "" {
		for _, u := range in.upstreams {
			c.urls = append(c.urls, "http://"+u)
		}
		return nil
	}
	own := filepath.Join(in.dir, "contenders", c.name)
	if err := os.MkdirAll(own, 0o700); err != nil {
		return err
	}
	addr, err := c.listenAddr()
	if err != nil {
		return err
	}
	known := placeholders(addr, in.caddy, own, in.upstreams)
	cmd := exec.Command("/bin/sh", "-c", c.command)
	if c.directive != "" {
		cmd, err = c.caddyCommand(in.caddy, own, known)
	} else {
		cmd.Args[2], err = expand(c.command, own, known)
	}
	if err != nil {
		return err
	}
	cmd.Env = append(os.Environ(), "XDG_CONFIG_HOME="+own, "XDG_DATA_HOME="+own)
	if c.proc, err = startProcess(cmd, in.watchdog); err != nil {
		return err
	}
	c.urls = []string{"http://" + addr}
	if err := c.await(ctx); err != nil {
		c.stop()
		return err
	}
	return nil
}

func (c *contender) listenAddr() (string, error) {
	if c.port != 0 {
		return net.JoinHostPort("127.0.0.1", strconv.Itoa(c.port)), nil
	}
	return canned.FreeAddr()
}

func placeholders(addr, caddy, own string, upstreams []string) map[string]string {
	_, port, _ := net.SplitHostPort(addr)
	known := map[string]string{
		"{port}": port, "{dir}": own, "{caddy}": caddy,
		"{dials}": strings.Join(upstreams, " "), "{upstreams}": "http://" + strings.Join(upstreams, " http://"),
	}
	for i, u := range upstreams {
		known["{upstream"+strconv.Itoa(i+1)+"}"] = u
	}
	return known
}

// expand fills in the placeholders. {config:file} stands for the path of a copy
// of the file in which they are filled in, too.
func expand(s, own string, known map[string]string) (string, error) {
	for {
		before, rest, found := strings.Cut(s, "{config:")
		file, after, closed := strings.Cut(rest, "}")
		if !found || !closed {
			break
		}
		template, err := os.ReadFile(filepath.Clean(file))
		if err != nil {
			return "", err
		}
		filled := filepath.Join(own, filepath.Base(file))
		if err := os.WriteFile(filled, []byte(fill(string(template), known)), 0o600); err != nil { //nolint:gosec // the user names the file
			return "", err
		}
		s = before + filled + after
	}
	return fill(s, known), nil
}

func fill(s string, known map[string]string) string {
	for name, value := range known {
		s = strings.ReplaceAll(s, name, value)
	}
	return s
}

// caddyCommand writes the Caddyfile of a Caddy and returns how to run it.
func (c *contender) caddyCommand(caddy, own string, known map[string]string) (*exec.Cmd, error) {
	var err error
	if c.admin, err = canned.FreeAddr(); err != nil {
		return nil, err
	}
	known["{admin}"] = c.admin
	text := fill(strings.ReplaceAll(site, "{directive}", c.directive), known)
	file := filepath.Join(own, "Caddyfile")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return nil, err
	}
	return exec.Command(caddy, "run", "--adapter", "caddyfile", "--config", file), nil
}

// startTimeout is for the slowest of routers.
const startTimeout = 2 * time.Minute

// await waits until the router answers a request.
func (c *contender) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	body := []byte(`{"model":"` + modelName + `","stream":false,"messages":[{"role":"user","content":"Are you there?"}]}`)
	transport := &http.Transport{DisableKeepAlives: true}
	for {
		status, err := ask(ctx, transport, c.urls[0]+chatPath, body)
		switch {
		case err == nil && status == http.StatusOK:
			return nil
		case err == nil:
			err = fmt.Errorf("status %d", status)
		}
		if ctx.Err() != nil || c.proc.ended() {
			return errors.Join(fmt.Errorf("it does not answer: %w", err), errors.New(c.proc.output()))
		}
		wait(ctx, 50*time.Millisecond)
	}
}

func ask(ctx context.Context, transport http.RoundTripper, url string, body []byte) (int, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer sk-bench")
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, err
}

// died says that the router has ended, with its last words.
func (c *contender) died() error { return fmt.Errorf("%s %w: %s", c.name, errEnded, c.proc.output()) }

// stop ends the router.
func (c *contender) stop() {
	if c.proc != nil {
		c.proc.stop()
	}
}

// pid returns the router's process, 0 if there is none.
func (c *contender) pid() int {
	if c.proc == nil {
		return 0
	}
	return c.proc.pid()
}

// buildCaddy builds the Caddy with kv_router.
func buildCaddy(ctx context.Context, dir string) (string, error) {
	file := filepath.Join(dir, "build", "caddy")
	cmd := exec.CommandContext(ctx, "go", "build", "-o", file, "github.com/caddy-kvrouter/kvrouter/cmd/caddy")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building caddy: %w\n%s", err, out)
	}
	return file, nil
}

// fetchProfile writes one of a Caddy's profiles to a file.
func fetchProfile(ctx context.Context, admin, profile, file string) error {
	url := fmt.Sprintf("http://%s/debug/pprof/%s", admin, profile)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d: %.200s", resp.StatusCode, data)
	}
	return os.WriteFile(file, data, 0o600)
}
