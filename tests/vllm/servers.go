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
	patience = 5 * time.Minute
	// grace is what a process gets to end by itself.
	grace = 20 * time.Second
)

// servers are two engines and a Caddy before them.
type servers struct {
	engines   []string // addresses
	router    string
	processes []*process
	dir       string // temporary; empty if there is none
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
	for i := range 2 {
		addr, err := freeAddr()
		if err != nil {
			return c, err
		}
		c.engines = append(c.engines, addr)
		if err := c.launch(o.vllm(addr, i), filepath.Join(o.log, fmt.Sprintf("vllm%d.log", i))); err != nil {
			return c, err
		}
	}
	for i, addr := range c.engines {
		if err := c.await(ctx, "http://"+addr+"/health", c.processes[i]); err != nil {
			return c, fmt.Errorf("starting vLLM: %w; see %s", err, tail(filepath.Join(o.log, fmt.Sprintf("vllm%d.log", i))))
		}
	}
	if o.serve {
		return c, nil
	}
	return c, c.startCaddy(ctx, o)
}

// vllm returns the command of engine i, which has core i.
func (o *options) vllm(addr string, i int) *exec.Cmd {
	host, port, _ := strings.Cut(addr, ":")
	source, _ := filepath.Abs(filepath.Join("tests", "vllm"))
	cmd := exec.Command(filepath.Join(o.venv, "venv", "bin", "vllm"), "serve", filepath.Join(o.venv, "model"),
		"--served-model-name", model, "--host", host, "--port", port,
		"--load-format", "dummy", "--dtype", "float32", "--enforce-eager", "--max-model-len", "16384",
		"--block-size", strconv.Itoa(o.block), "--enable-prompt-tokens-details", "--logits-processors", "words:Words")
	if o.blocks > 0 {
		cmd.Args = append(cmd.Args, "--num-gpu-blocks-override", strconv.Itoa(o.blocks))
	}
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "PYTHONDONTWRITEBYTECODE=") { // or each start compiles vLLM
			cmd.Env = append(cmd.Env, v)
		}
	}
	cmd.Env = append(cmd.Env, "HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "VLLM_CPU_KVCACHE_SPACE=1",
		"VLLM_CPU_OMP_THREADS_BIND="+strconv.Itoa(i), "PYTHONPATH="+source)
	return cmd
}

// startCaddy starts the router, and waits until it knows both engines.
func (c *servers) startCaddy(ctx context.Context, o *options) error {
	var admin string
	var err error
	if c.router, err = freeAddr(); err != nil {
		return err
	}
	if admin, err = freeAddr(); err != nil {
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
`, admin, c.dir, c.router, strings.Join(c.engines, " "), prediction.Directive)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return err
	}
	log := filepath.Join(o.log, "caddy.log")
	cmd := exec.Command(o.caddy, "run", "--config", file, "--adapter", "caddyfile") //nolint:gosec // as the user says
	cmd.Env = append(os.Environ(), "HOME="+c.dir)
	if err := c.launch(cmd, log); err != nil {
		return err
	}
	// The first request makes the router ask the engines what they are.
	p := c.processes[len(c.processes)-1]
	if err := c.await(ctx, "http://"+c.router+"/v1/models", p); err != nil {
		return fmt.Errorf("starting Caddy: %w; see %s", err, tail(log))
	}
	select {
	case <-time.After(3 * time.Second):
	case <-ctx.Done():
	}
	return ctx.Err()
}

// launch starts a server that writes its output to a file.
func (c *servers) launch(cmd *exec.Cmd, file string) error {
	out, err := os.Create(file)
	if err != nil {
		return err
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting %s: %w", cmd.Path, err)
	}
	p := &process{cmd, make(chan struct{})}
	go func() {
		_ = cmd.Wait() // how it ends does not matter
		close(p.ended)
	}()
	c.processes = append(c.processes, p)
	return nil
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
	for _, p := range c.processes {
		_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	}
	over, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	for _, p := range c.processes {
		select {
		case <-p.ended:
		case <-over.Done():
		}
		_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) // what is left of the group
	}
	os.RemoveAll(c.dir)
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
