package main

import (
	"bytes"
	"cmp"
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
	"github.com/caddy-kvrouter/kvrouter/tests/process"
)

// contender is a router that is measured.
type contender struct {
	name    string
	traffic traffic
	// directive is what a Caddy's site consists of, with placeholders, and binary is that
	// Caddy; empty for the one that is measured.
	directive, binary string
	// command is another router's command line, with placeholders, and port
	// where it listens then; 0 for a free one.
	command string
	port    int

	url   string // where requests go
	admin string // a Caddy's admin address
	proc  *process.Process
}

const router = "kv_router {dials}"

// builtin returns the contenders that are always there.
func builtin() []*contender {
	return []*contender{
		{name: baseline, directive: "reverse_proxy {dials} {\n\t\tlb_policy round_robin\n\t}"},
		{name: "kv_router", directive: router},
		{name: "kv_router-session", directive: router, traffic: sessions},
		{name: "kv_router-tokens", directive: router, traffic: tokens},
		{name: "kv_router-queue", directive: router + " {\n\t\ttenant {http.request.remote.port}\n\t\tclass default {\n\t\t\tttft 10s\n\t\t}\n\t}"},
		{name: "kv_router-alias", directive: router + " {\n\t\tmodel " + modelName + " {\n\t\t\tto engine\n\t\t}\n\t}"},
	}
}

// external reads name=port=command. The name is one in tables, in lists, and of files.
func external(s string, taken []*contender) (*contender, error) {
	parts := strings.SplitN(s, "=", 3)
	if len(parts) != 3 || parts[0] == "" || strings.TrimSpace(parts[2]) == "" {
		return nil, fmt.Errorf("expected name=port=command, got %q", s)
	}
	port, err := strconv.ParseUint(parts[1], 10, 16)
	switch name := parts[0]; {
	case err != nil:
		return nil, fmt.Errorf("port %q: %w", parts[1], err)
	case slices.ContainsFunc(taken, func(c *contender) bool { return c.name == name }):
		return nil, fmt.Errorf("there is a %q already", name)
	case strings.HasPrefix(name, ".") || strings.ContainsAny(name, `/\,`):
		return nil, fmt.Errorf("%q cannot be a name", name)
	}
	return &contender{name: parts[0], port: int(port), command: parts[2]}, nil
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
func (c *contender) start(ctx context.Context, caddy, dir string, upstreams []string) error {
	own, err := os.MkdirTemp(dir, c.name) // not that of a process before, whose journal it would read
	if err != nil {
		return err
	}
	addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(c.port))
	if c.port == 0 {
		if addr, err = canned.FreeAddr(); err != nil {
			return err
		}
	}
	known := placeholders(addr, caddy, own, upstreams)
	cmd := exec.Command("/bin/sh", "-c", c.command) //nolint:gosec // the user's own
	if c.directive != "" {
		cmd, err = c.caddyCommand(caddy, own, known)
	} else {
		cmd.Args[2], err = expand(c.command, own, known)
	}
	if err != nil {
		return err
	}
	cmd.Env = append(os.Environ(), "XDG_CONFIG_HOME="+own, "XDG_DATA_HOME="+own)
	if c.proc, err = process.Start(cmd, filepath.Join(own, "output.log")); err != nil {
		return err
	}
	c.url = "http://" + addr
	if err := c.await(ctx); err != nil {
		c.proc.Stop()
		return err
	}
	return nil
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
	return exec.Command(cmp.Or(c.binary, caddy), "run", "--adapter", "caddyfile", "--config", file), nil //nolint:gosec // the user's own
}

// startTimeout is for the slowest of routers.
const startTimeout = 2 * time.Minute

// await waits until the router answers a request.
func (c *contender) await(ctx context.Context) error {
	body := []byte(`{"model":"` + modelName + `","stream":false,"messages":[{"role":"user","content":"Are you there?"}]}`)
	transport := &http.Transport{DisableKeepAlives: true}
	return c.proc.Await(ctx, startTimeout, func(ctx context.Context) error { return ask(ctx, transport, c.url+chatPath, body) })
}

func ask(ctx context.Context, transport http.RoundTripper, url string, body []byte) error {
	req, err := newRequest(ctx, url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err = io.Copy(io.Discard, resp.Body); err == nil && resp.StatusCode != http.StatusOK {
		err = errors.New(resp.Status)
	}
	return err
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
