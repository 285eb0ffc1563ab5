//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/prediction"
)

const (
	model = "tiny"
	// patience is for the start of vLLM, which takes minutes where Python must
	// compile it first.
	patience = 10 * time.Minute
	// grace is what a process gets to end by itself.
	grace = 20 * time.Second
)

// servers are engines and a Caddy before them.
type servers struct {
	engines       []string // addresses
	sources       []source // of the engines' KV events; none if they publish none
	router, admin string
	processes     []*process // the engines come first
	dir           string     // temporary; empty if there is none
}

// process is a server that was started here, in a process group of its own. If
// only their parent were killed, vLLM's children would live on.
type process struct {
	cmd   *exec.Cmd
	ended chan struct{}
}

func (o *options) start(ctx context.Context) (c *servers, err error) {
	c = new(servers)
	defer func() {
		if err != nil {
			c.stop()
		}
	}()
	if c.dir, err = os.MkdirTemp("", "kvrouter-vllm-"); err != nil {
		return c, err
	}
	if o.log == "" {
		o.log = c.dir
	}
	if err := os.MkdirAll(o.log, 0o700); err != nil {
		return c, err
	}
	if o.caddy == "" && !o.serve {
		o.caddy = filepath.Join(c.dir, "caddy")
		build := exec.CommandContext(ctx, "go", "build", "-o", o.caddy, "github.com/caddy-kvrouter/kvrouter/cmd/caddy")
		if out, err := build.CombinedOutput(); err != nil {
			return c, fmt.Errorf("building Caddy: %w\n%s", err, out)
		}
	}
	for i := range o.engines() {
		addr, err := freeAddr()
		if err != nil {
			return c, err
		}
		c.engines = append(c.engines, addr)
		if err := c.addSource(ctx, o); err != nil {
			return c, err
		}
		p, err := launch(o.vllm(c, i), o.logOf(i))
		if err != nil {
			return c, err
		}
		c.processes = append(c.processes, p)
	}
	for i := range c.engines {
		if err := c.awaitEngine(ctx, o, i); err != nil {
			return c, err
		}
	}
	if o.serve {
		return c, nil
	}
	return c, c.startCaddy(ctx, o)
}

func (o *options) logOf(i int) string { return filepath.Join(o.log, fmt.Sprintf("vllm%d.log", i)) }

// awaitEngine waits until engine i serves.
func (c *servers) awaitEngine(ctx context.Context, o *options, i int) error {
	if err := c.await(ctx, "http://"+c.engines[i]+"/health", c.processes[i]); err != nil {
		return fmt.Errorf("starting vLLM: %w; see %s", err, tail(o.logOf(i)))
	}
	return nil
}

// engines returns how many engines run.
func (o *options) engines() int {
	if o.ranks > 1 {
		return 1
	}
	return 2
}

// cores returns the core of each rank of engine i.
func (o *options) cores(i int) string {
	list := make([]string, o.ranks)
	for rank := range list {
		list[rank] = strconv.Itoa((i + rank) % runtime.NumCPU())
	}
	return strings.Join(list, "|")
}

// vllm returns the command of engine i.
func (o *options) vllm(c *servers, i int) *exec.Cmd {
	host, port, _ := strings.Cut(c.engines[i], ":")
	source, _ := filepath.Abs(filepath.Join("tests", "vllm"))
	cmd := exec.Command(filepath.Join(o.venv, "venv", "bin", "vllm"), "serve", filepath.Join(o.venv, "model"),
		"--served-model-name", model, "--host", host, "--port", port,
		"--load-format", "dummy", "--dtype", "float32", "--enforce-eager", "--max-model-len", "16384",
		"--block-size", strconv.Itoa(o.block), "--enable-prompt-tokens-details", "--logits-processors", "words:Words")
	if o.blocks > 0 {
		cmd.Args = append(cmd.Args, "--num-gpu-blocks-override", strconv.Itoa(o.blocks))
	}
	if o.ranks > 1 {
		cmd.Args = append(cmd.Args, "--data-parallel-size", strconv.Itoa(o.ranks))
	}
	if o.exact {
		cmd.Args = append(cmd.Args, o.exactArgs(c, i)...)
	}
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "PYTHONDONTWRITEBYTECODE=") { // or each start compiles vLLM
			cmd.Env = append(cmd.Env, v)
		}
	}
	cmd.Env = append(cmd.Env, "HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "VLLM_CPU_KVCACHE_SPACE=1",
		"VLLM_CPU_OMP_THREADS_BIND="+o.cores(i), "PYTHONPATH="+source)
	if o.exact {
		cmd.Env = append(cmd.Env, "VLLM_SERVER_DEV_MODE=1") // for /reset_prefix_cache
	}
	return cmd
}

// startCaddy starts the router, and waits until it knows the engines.
func (c *servers) startCaddy(ctx context.Context, o *options) error {
	var err error
	if c.router, err = freeAddr(); err != nil {
		return err
	}
	if c.admin, err = freeAddr(); err != nil {
		return err
	}
	file := filepath.Join(c.dir, "Caddyfile")
	text := fmt.Sprintf(`{
	admin %s
	persist_config off
	auto_https off
	default_bind 127.0.0.1
	storage file_system %q
}
http://%s {
	kv_router %s {
		%s
	}
}
`, c.admin, c.dir, c.router, strings.Join(c.engines, " "), prediction.Directive)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return err
	}
	log := filepath.Join(o.log, "caddy.log")
	cmd := exec.Command(o.caddy, "run", "--config", file, "--adapter", "caddyfile") //nolint:gosec // as the user says
	cmd.Env = append(os.Environ(), "HOME="+c.dir)
	p, err := launch(cmd, log)
	if err != nil {
		return err
	}
	c.processes = append(c.processes, p)
	// The first request makes the router ask the engines what they are.
	if err := c.await(ctx, "http://"+c.router+"/v1/models", p); err != nil {
		return fmt.Errorf("starting Caddy: %w; see %s", err, tail(log))
	}
	select {
	case <-time.After(3 * time.Second):
	case <-ctx.Done():
	}
	return ctx.Err()
}

// launch starts a server that writes its output to the end of a file.
func launch(cmd *exec.Cmd, file string) (*process, error) {
	out, err := os.OpenFile(file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600) //nolint:gosec // as the user says
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting %s: %w", cmd.Path, err)
	}
	p := &process{cmd, make(chan struct{})}
	go func() {
		_ = cmd.Wait() // how it ends does not matter
		close(p.ended)
	}()
	return p, nil
}

// await waits until a URL answers 200.
func (c *servers) await(ctx context.Context, url string, p *process) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		resp, err := http.DefaultClient.Do(req)
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-p.ended:
			return errors.New("it has ended")
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", url, ctx.Err())
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// stop ends what was started: first it asks, then it kills the process groups.
func (c *servers) stop() {
	end(c.processes...)
	os.RemoveAll(c.dir)
}

// end stops processes with all that they have started.
func end(processes ...*process) {
	for _, p := range processes {
		_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	}
	over, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	for _, p := range processes {
		select {
		case <-p.ended:
		case <-over.Done():
		}
		_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) // what is left of the group
	}
}

// tail returns the end of a file.
func tail(file string) string {
	b, _ := os.ReadFile(file)
	return fmt.Sprintf("the end of %s:\n%s", file, b[max(0, len(b)-2000):])
}

func freeAddr() (string, error) {
	ln, err := canned.Listen()
	if err != nil {
		return "", err
	}
	defer ln.Close()
	return ln.Addr().String(), nil
}
