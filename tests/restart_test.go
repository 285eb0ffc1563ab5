package tests

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/cluster"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// talk is a conversation across a restart.
type talk struct {
	chat    chat
	session string // empty: the client sends no key
	rng     *rand.Rand
	home    string    // the worker of the last turn
	run     int32     // in which that turn was
	ended   time.Time // that turn
}

// figures sum up turns that follow another one.
type figures struct {
	turns, atHome, predicted, cached, prompt int
}

func (f *figures) share() float64 { return float64(f.atHome) / float64(max(f.turns, 1)) }

func (f *figures) String() string {
	return fmt.Sprintf("%4d turns, %5.1f %% at home, %8d tokens predicted, %8d cached, of %8d", f.turns, 100*f.share(), f.predicted, f.cached, f.prompt)
}

// restart is conversations that a restart interrupts.
type restart struct {
	*child
	t     *testing.T
	runs  atomic.Int32 // starts of Caddy
	done  atomic.Int32 // turns
	known time.Time    // the journal has what ended before
	mu    sync.Mutex
	kinds map[string]*figures
	pause time.Duration // of a client after each turn
}

// newTalks returns conversations, of which every second has a session key.
func newTalks(n int) []*talk {
	list := make([]*talk, n)
	for i := range list {
		rng := rand.New(rand.NewPCG(7, uint64(i))) //nolint:gosec // a test
		list[i] = &talk{rng: rng, chat: chat{Model: "sim-8b", Messages: []message{{"system", prose(rng, 1500, 3000)}}}}
		if i%2 == 0 {
			list[i].session = fmt.Sprintf("session-%d", i)
		}
	}
	return list
}

// converse takes the conversations through their turns, with eight clients. Clients repeat
// what the restart breaks.
func (r *restart) converse(talks []*talk, turns int) {
	queue := make(chan *talk, len(talks)*turns)
	for range turns {
		for _, k := range talks {
			queue <- k
		}
	}
	close(queue)
	var clients sync.WaitGroup
	for range 8 {
		clients.Go(func() {
			for k := range queue {
				r.turn(k)
				time.Sleep(r.pause)
			}
		})
	}
	clients.Wait()
}

func (r *restart) turn(k *talk) {
	k.chat.Messages = append(k.chat.Messages, message{"user", prose(k.rng, 200, 800)})
	var header []string
	if k.session != "" {
		header = []string{"X-Session-Id", k.session}
	}
	var a answer
	var run int32
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		run = r.runs.Load()
		if a = r.chat(r.t.Context(), k.chat, header...); a.ok() {
			break
		}
	}
	if !a.ok() {
		r.t.Errorf("status %d, error %v", a.status, a.err)
		return
	}
	r.count(k, run, &a)
	k.chat.Messages = append(k.chat.Messages, message{"assistant", a.text})
	k.home, k.run, k.ended = a.header.Get("X-Kv-Worker"), run, time.Now()
	r.done.Add(1)
}

// count adds a turn to its figures.
func (r *restart) count(k *talk, run int32, a *answer) {
	if k.home == "" {
		return
	}
	when, keyed := "in one run", "no key"
	if run != k.run {
		if when = "after the restart"; k.ended.After(r.known) {
			when = "at the restart"
		}
	}
	if k.session != "" {
		keyed = "with key"
	}
	cached, prompt := a.cached(r.t)
	var predicted int
	_, _ = fmt.Sscan(a.header.Get("X-Kv-Predicted-Cached-Tokens"), &predicted)
	r.mu.Lock()
	defer r.mu.Unlock()
	name := when + ", " + keyed
	f := r.kinds[name]
	if f == nil {
		f = new(figures)
		r.kinds[name] = f
	}
	f.turns++
	if a.header.Get("X-Kv-Worker") == k.home {
		f.atHome++
	}
	f.predicted, f.cached, f.prompt = f.predicted+predicted, f.cached+cached, f.prompt+prompt
}

// interrupt holds conversations, and restarts Caddy after half of their turns. They go where most of them is
// cached, which no delay of a busy machine changes.
func interrupt(t *testing.T, conversations int, how syscall.Signal, lacks time.Duration) *restart {
	t.Helper()
	var engines []*engine.Engine
	for range 4 {
		engines = append(engines, startSimulated(t, engine.Config{Blocks: 32768}))
	}
	site := simulated(engines, "response_headers X-KV-", "policy warmest")
	r := &restart{child: newChild(t), t: t, kinds: make(map[string]*figures)}
	r.start(t, site)
	talks, turns := newTalks(conversations), 6
	r.pause = time.Minute / time.Duration(conversations*turns)
	var wg sync.WaitGroup
	wg.Go(func() { r.converse(talks, turns) })
	within(t, 5*time.Minute, "half of the turns", func() bool { return int(r.done.Load()) >= conversations*turns/2 })
	r.known = time.Now().Add(-lacks)
	r.end(how)
	r.runs.Add(1)
	r.start(t, site)
	wg.Wait()
	return r
}

// TestRestartInTheMiddle restarts Caddy in the middle of live conversations, by a signal and
// by kill -9. Conversations go on at home as otherwise, and the router predicts what the
// engines have cached.
func TestRestartInTheMiddle(t *testing.T) {
	takesSeconds(t)
	const conversations = 200
	for _, c := range []struct {
		name  string
		how   syscall.Signal
		lacks time.Duration // at most, of what ended last
	}{
		{"SIGTERM", syscall.SIGTERM, 0},
		{"kill -9", syscall.SIGKILL, time.Second}, // a tenth, if the machine is not busy
	} {
		t.Run(c.name, func(t *testing.T) {
			r := interrupt(t, conversations, c.how, c.lacks)
			for name, f := range r.kinds {
				t.Logf("%-28s %v", name, f)
			}
			for _, keyed := range []string{"with key", "no key"} {
				f, before := r.kinds["after the restart, "+keyed], r.kinds["in one run, "+keyed]
				if f == nil || f.turns < 20 || f.atHome != f.turns || before.atHome != before.turns {
					t.Fatalf("%s: after the restart are at home: %v; otherwise %v", keyed, f, before)
				}
				if off := max(f.predicted-f.cached, f.cached-f.predicted); off > f.cached/10 {
					t.Errorf("%s: after the restart %d cached tokens are predicted and %d reported", keyed, f.predicted, f.cached)
				}
			}
		})
	}
}

// TestRefusedConfigurationWritesNothing loads configurations with a journal that Caddy rejects.
func TestRefusedConfigurationWritesNothing(t *testing.T) {
	e := startSimulated(t, engine.Config{})
	s := startCaddy(t, simulated([]*engine.Engine{e}, "journal off"))
	dir := strings.TrimSuffix(s.log, "/caddy.log")
	file := filepath.Join(dir, "some", "file")
	named := "journal {\n\tfile " + file + "\n}"
	s.mustChat(t, simChat("hello"))
	if err := s.load(simulated([]*engine.Engine{e}, named) + rejected); err == nil {
		t.Fatal("the configuration is accepted")
	}
	time.Sleep(500 * time.Millisecond)
	for _, name := range []string{file, filepath.Join(dir, "caddy", "kv_router")} {
		if _, err := os.Stat(name); err == nil {
			t.Errorf("%s is there", name)
		}
	}
	s.mustReload(t, simulated([]*engine.Engine{e}, named))
	eventually(t, "the journal in the metrics", func() bool {
		status, text, err := s.get(t.Context(), "http://"+s.admin+"/metrics")
		return err == nil && status == http.StatusOK && strings.Contains(text, "caddy_kv_router_journal_bytes")
	})
	if _, err := os.Stat(file); err != nil {
		t.Error(err)
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
	c := &child{dir: dir, server: &server{admin: freeAddr(t), addr: freeAddr(t), log: filepath.Join(dir, "caddy.log")}}
	c.url = "http://" + c.addr
	c.globals = "storage file_system " + dir + "/storage"
	c.client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64, DisableCompression: true}}
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
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(c.dir, "caddy.json")
	if err = os.WriteFile(file, cfg, 0o600); err != nil {
		t.Fatal(err)
	}
	c.cmd = exec.Command(os.Args[0]) //nolint:gosec // this program
	c.cmd.Env = append(os.Environ(), childConfig+"="+file, "XDG_DATA_HOME="+c.dir, "XDG_CONFIG_HOME="+c.dir)
	output, err := os.Create(filepath.Join(c.dir, "output"))
	if err != nil {
		t.Fatal(err)
	}
	defer output.Close()
	c.cmd.Stdout, c.cmd.Stderr = output, output
	if err = c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
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
