//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/exactness"
)

// The network namespace has no other servers.
const (
	model      = "tiny"
	blockSize  = 16
	routerAddr = "127.0.0.1:8000"
	adminAddr  = "127.0.0.1:2019"
	firstPort  = 8001
	firstEvent = 5557
)

// servers are two simulators and a Caddy before them.
type servers struct {
	*options
	maps      bool
	processes [3]*process // Caddy is the last
}

type process struct {
	cmd   *exec.Cmd
	ended chan struct{}
}

func (s *servers) engines() []string {
	return []string{fmt.Sprintf("127.0.0.1:%d", firstPort), fmt.Sprintf("127.0.0.1:%d", firstPort+1)}
}

func (s *servers) start(ctx context.Context) error {
	for i := range 2 {
		if err := s.begin(ctx, i); err != nil {
			return err
		}
	}
	text := fmt.Sprintf(`{
	admin %s
	persist_config off
	auto_https off
}
http://%s {
	kv_router %s {
		%s
		worker %s {
			kv_events tcp://127.0.0.1:%d {
				listen
			}
		}
		worker %s {
			kv_events tcp://127.0.0.1:%d {
				listen
			}
		}
	}
}
`, adminAddr, routerAddr, strings.Join(s.engines(), " "), exactness.Directive, s.engines()[0], firstEvent, s.engines()[1], firstEvent+1)
	file := filepath.Join(s.dir, "Caddyfile")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return err
	}
	cmd := exec.Command(s.caddy, "run", "--config", file, "--adapter", "caddyfile") //nolint:gosec // as the user says
	cmd.Env = append(os.Environ(), "HOME="+s.dir)
	return s.launch(ctx, 2, cmd, "caddy.log", "http://"+routerAddr+"/v1/models")
}

// begin starts engine i, as one rank of data-parallel engines. With several ranks in one
// process, all publish at one endpoint, each with sequence numbers of its own.
func (s *servers) begin(ctx context.Context, i int) error {
	cmd := exec.Command(s.sim, "--model", model, "--port", fmt.Sprint(firstPort+i), //nolint:gosec // as the user says
		"--data-parallel-rank", fmt.Sprint(i), "--force-dummy-tokenizer", "--enable-kvcache", "--max-model-len", "16384",
		"--block-size", fmt.Sprint(blockSize), "--kv-cache-size", fmt.Sprint(s.blocks),
		"--zmq-endpoint", fmt.Sprintf("tcp://127.0.0.1:%d", firstEvent+i))
	if s.maps {
		cmd.Args = append(cmd.Args, "--use-vllm-map-event-format")
	}
	cmd.Env = append(os.Environ(), "POD_IP=127.0.0.1")
	return s.launch(ctx, i, cmd, fmt.Sprintf("sim%d.log", i), "http://"+s.engines()[i]+"/health")
}

// launch starts a server that writes to the end of a log, and waits until it answers.
func (s *servers) launch(ctx context.Context, i int, cmd *exec.Cmd, name, url string) error {
	out, err := os.OpenFile(filepath.Join(s.dir, name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting %s: %w", cmd.Path, err)
	}
	p := &process{cmd, make(chan struct{})}
	go func() {
		_ = cmd.Wait() // how it ends does not matter
		close(p.ended)
	}()
	s.processes[i] = p
	for begun := time.Now(); time.Since(begun) < patience; time.Sleep(50 * time.Millisecond) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		if resp, err := http.DefaultClient.Do(req); err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-p.ended:
			return errors.New(name + ": the server has ended")
		case <-ctx.Done():
			return ctx.Err()
		default:
		}
	}
	return errors.New(name + ": the server does not answer")
}

// end stops server i.
func (s *servers) end(i int) {
	p := s.processes[i]
	if p == nil {
		return
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	select {
	case <-p.ended:
	case <-time.After(patience):
		_ = p.cmd.Process.Kill()
	}
	s.processes[i] = nil
}

func (s *servers) stop() {
	for i := range s.processes {
		s.end(i)
	}
}
