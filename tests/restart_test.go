package tests

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/journal"

	"github.com/caddy-kvrouter/kvrouter/tests/cluster"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// talk is a conversation across a restart.
type talk struct {
	chat   chat
	header []string
	rng    *rand.Rand
	home   string // the worker of the last turn
}

// newTalks returns conversations, of which every second has a session key.
func newTalks(n int) []*talk {
	list := make([]*talk, n)
	for i := range list {
		rng := rand.New(rand.NewPCG(7, uint64(i))) //nolint:gosec // a test
		list[i] = &talk{rng: rng, chat: chat{Model: "sim-8b", Messages: []message{{"system", prose(rng, 1500, 3000)}}}}
		if i%2 == 0 {
			list[i].header = []string{"X-Session-Id", fmt.Sprint("session-", i)}
		}
	}
	return list
}

// TestRestartInTheMiddle restarts Caddy in the middle of conversations, by a signal and
// by kill -9. Conversations go on at home, and the router predicts what the engines have cached. They go where most of
// them is cached, which no delay of a busy machine changes.
func TestRestartInTheMiddle(t *testing.T) {
	takesSeconds(t)
	const conversations, turns = 80, 3
	for _, how := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		t.Run(how.String(), func(t *testing.T) {
			site := route(startFleet(t, 4, engine.Config{Blocks: 32768}), "response_headers X-KV-", "policy warmest")
			c, talks := newChild(t), newTalks(conversations)
			var predicted, cached atomic.Int64
			turn := func(k *talk) {
				k.chat.Messages = append(k.chat.Messages, message{"user", prose(k.rng, 200, 800)})
				a := c.chat(t.Context(), k.chat, k.header...)
				at := a.header.Get("X-Kv-Worker")
				if !a.ok() || k.home != "" && at != k.home {
					t.Errorf("status %d, error %v, at worker %s, the turn before at %s", a.status, a.err, at, k.home)
					return
				}
				has, _ := a.cached()
				said, _ := strconv.Atoi(a.header.Get("X-Kv-Predicted-Cached-Tokens"))
				cached.Add(int64(has))
				predicted.Add(int64(said))
				k.home, k.chat.Messages = at, append(k.chat.Messages, message{"assistant", a.text})
			}
			converse := func() {
				for range turns {
					atOnce(8, func(client int) {
						for i := client; i < len(talks); i += 8 {
							turn(talks[i])
						}
					})
				}
			}
			c.start(t, site)
			converse()
			eventually(t, "all to be in the journal", func() bool {
				n, _, err := journal.Trace(filepath.Join(c.dir, "caddy", "kv_router", "default.journal"), io.Discard)
				return err == nil && n == conversations*turns
			})
			c.end(how)
			c.start(t, site)
			// Requests wait half a second for it, which may be too short on a busy machine.
			eventually(t, "the journal to be restored", func() bool { return c.logged(t, "the journal is restored") > 0 })
			predicted.Store(0)
			cached.Store(0)
			converse()
			p, has := predicted.Load(), cached.Load()
			if t.Logf("%d cached tokens are predicted, %d reported", p, has); max(p-has, has-p) > has/10 {
				t.Errorf("after the restart %d cached tokens are predicted and %d reported", p, has)
			}
		})
	}
}

// TestRefusedConfigurationWritesNothing loads configurations with a journal that Caddy rejects.
func TestRefusedConfigurationWritesNothing(t *testing.T) {
	e := startSimulated(t, engine.Config{})
	s := startCaddy(t, route([]*engine.Engine{e}, "journal off"))
	dir := strings.TrimSuffix(s.log, "/caddy.log")
	refused, file := filepath.Join(dir, "some", "refused"), filepath.Join(dir, "some", "file")
	named := func(file string) string { return route([]*engine.Engine{e}, "journal {\n\tfile "+file+"\n}") }
	s.mustChat(t, simChat("hello"))
	if err := s.load(named(refused) + rejected); err == nil {
		t.Fatal("the configuration is accepted")
	}
	s.mustReload(t, named(file)) // a pool opens one journal after the other
	eventually(t, "the journal in the metrics", func() bool {
		status, text, err := s.get(t.Context(), "http://"+s.admin+"/metrics")
		return err == nil && status == http.StatusOK && strings.Contains(text, "caddy_kv_router_journal_bytes")
	})
	if _, err := os.Stat(file); err != nil {
		t.Error(err)
	}
	for _, name := range []string{refused, filepath.Join(dir, "caddy", "kv_router")} {
		if _, err := os.Stat(name); err == nil {
			t.Errorf("%s is there", name)
		}
	}
}

// childConfig names the file with the JSON of a Caddy that this program runs instead of the
// tests.
const childConfig = "KV_ROUTER_TEST_CHILD"

// runChild runs a Caddy until it is told to end.
func runChild(file string) {
	fmt.Fprintln(os.Stderr, cluster.Serve(file))
	os.Exit(1)
}

// child is a Caddy in a process of its own, which can be killed.
type child struct {
	*server
	dir string // of its data
	cmd *exec.Cmd
}

// newChild returns a Caddy that is not started yet.
func newChild(t testing.TB) *child {
	t.Helper()
	dir := t.TempDir()
	c := &child{dir: dir, server: newServer(t, dir)}
	t.Cleanup(func() {
		c.end(syscall.SIGKILL)
		c.client.CloseIdleConnections()
		c.findPanics(t)
		if t.Failed() {
			c.dumpLog(t)
		}
	})
	return c
}

// start starts the process, and waits until it serves.
func (c *child) start(t testing.TB, site string) {
	t.Helper()
	cfg, err := adapt(c.caddyfile(site))
	noError(t, err)
	file := filepath.Join(c.dir, "caddy.json")
	noError(t, os.WriteFile(file, cfg, 0o600))
	c.cmd = exec.Command(os.Args[0]) //nolint:gosec // this program
	c.cmd.Env = append(os.Environ(), childConfig+"="+file, "XDG_DATA_HOME="+c.dir, "XDG_CONFIG_HOME="+c.dir)
	output, err := os.Create(filepath.Join(c.dir, "output"))
	noError(t, err)
	defer output.Close()
	c.cmd.Stdout, c.cmd.Stderr = output, output
	noError(t, c.cmd.Start())
	eventually(t, "Caddy to serve", func() bool {
		status, _, err := c.get(context.Background(), c.url+"/.config")
		return err == nil && status == http.StatusOK
	})
}

// end ends the process, if it runs.
func (c *child) end(how syscall.Signal) {
	if c.cmd == nil {
		return
	}
	_ = c.cmd.Process.Signal(how)
	_ = c.cmd.Wait()
	c.cmd = nil
	c.client.CloseIdleConnections()
}
