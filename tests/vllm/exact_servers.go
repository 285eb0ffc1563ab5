//go:build unix

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/exactness"
)

const (
	adapter = "adapter" // the model's name with the LoRA adapter
	topic   = "kv-events"
)

// source is where the first rank of an engine publishes its KV events. Each further one has the
// next port.
type source struct {
	endpoint, replay string
}

// setExact sets what -exact has other defaults for.
func (o *options) setExact() {
	if o.blocks == 0 {
		o.blocks = exactBlocks
	}
	switch {
	case o.events != "":
	case o.ranks > 1: // vLLM gives a path to one rank only
		o.events = "tcp"
	default:
		o.events = "ipc"
	}
}

// addSource chooses where the next engine publishes, as -events says.
func (c *servers) addSource(ctx context.Context, o *options) error {
	i := len(c.sources)
	switch o.events {
	case "":
		return nil
	case "ipc":
		if o.ranks > 1 {
			return errors.New("-events ipc: vLLM publishes at a path only with one rank")
		}
		at := func(name string) string { return fmt.Sprintf("ipc://%s/%s%d", c.dir, name, i) }
		c.sources = append(c.sources, source{endpoint: at("events"), replay: at("replay")})
	case "tcp":
		of := source{}
		for _, to := range []*string{&of.endpoint, &of.replay} {
			addr, err := freeAddrs(o.ranks)
			if err != nil {
				return err
			}
			*to = "tcp://" + addr
		}
		of.endpoint = strings.Replace(of.endpoint, "127.0.0.1", "*", 1) // vLLM connects to an address without an asterisk
		c.sources = append(c.sources, of)
	default:
		return fmt.Errorf("-events must be ipc or tcp, got %q", o.events)
	}
	if i > 0 {
		return nil
	}
	make := exec.CommandContext(ctx, filepath.Join(o.venv, "venv", "bin", "python"), "tests/vllm/lora.py", c.lora())
	if out, err := make.CombinedOutput(); err != nil {
		return fmt.Errorf("making the LoRA adapter: %w\n%s", err, out)
	}
	return nil
}

func (c *servers) lora() string { return filepath.Join(c.dir, "lora") }

// freeAddrs returns the first of n free addresses with successive ports.
func freeAddrs(n int) (string, error) {
	for first, found := 0, 0; ; {
		addr, err := freeAddr()
		if err != nil {
			return "", err
		}
		_, s, _ := net.SplitHostPort(addr)
		port, _ := strconv.Atoi(s)
		if found++; port != first+found-1 {
			first, found = port, 1
		}
		if found == n {
			return net.JoinHostPort("127.0.0.1", strconv.Itoa(first)), nil
		}
	}
}

// exactArgs are the arguments of an engine that publishes KV events.
func (o *options) exactArgs(c *servers, i int) []string {
	config, _ := json.Marshal(map[string]any{
		"enable_kv_cache_events": true, "publisher": "zmq", "topic": topic,
		"endpoint": c.sources[i].endpoint, "replay_endpoint": c.sources[i].replay,
	})
	return []string{
		"--kv-events-config", string(config),
		"--enable-lora", "--max-lora-rank", "8", "--lora-modules", adapter + "=" + c.lora(),
	}
}

// stopEngine ends engine i.
func (c *servers) stopEngine(i int) { end(c.processes[i]) }

// startEngine starts engine i again, and waits until it serves.
func (c *servers) startEngine(ctx context.Context, o *options, i int) error {
	p, err := launch(o.vllm(c, i), o.logOf(i))
	if err != nil {
		return err
	}
	c.processes[i] = p
	return c.awaitEngine(ctx, o, i)
}

// resetCache makes engine i forget its KV cache. The engine refuses while a request runs.
func (c *servers) resetCache(ctx context.Context, i int) error {
	for range 50 {
		body, err := exactness.Call(ctx, http.MethodPost, "http://"+c.engines[i]+"/reset_prefix_cache")
		if err != nil || !strings.Contains(string(body), "false") {
			return err
		}
		time.Sleep(100 * time.Millisecond)
	}
	return errors.New("the engine does not reset its KV cache")
}
