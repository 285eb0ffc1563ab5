package tests

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// persist is the option that keeps sessions over a restart.
const persist = "affinity {\n\tpersist 1s\n}"

// talk is a conversation across a restart.
type talk struct {
	chat    chat
	session string // empty: the client sends no key
	rng     *rand.Rand
	home    string // the worker of the last turn
	run     int32  // in which that turn was
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
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
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
	k.home, k.run = a.header.Get("X-Kv-Worker"), run
	r.done.Add(1)
}

// count adds a turn to its figures.
func (r *restart) count(k *talk, run int32, a *answer) {
	if k.home == "" {
		return
	}
	when, keyed := "in one run", "no key"
	if run != k.run {
		when = "after the restart"
	}
	if k.session != "" {
		keyed = "with key"
	}
	var doc struct {
		Usage struct {
			Prompt  int `json:"prompt_tokens"`
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	if err := json.Unmarshal(a.body, &doc); err != nil {
		r.t.Error(err)
	}
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
	f.predicted, f.cached, f.prompt = f.predicted+predicted, f.cached+doc.Usage.Details.Cached, f.prompt+doc.Usage.Prompt
}

// of returns the figures of turns.
func (r *restart) of(name string) *figures {
	if f := r.kinds[name]; f != nil {
		return f
	}
	return new(figures)
}

// interrupt holds conversations, and restarts Caddy after half of their turns.
func interrupt(t *testing.T, conversations int, option string, how syscall.Signal) *restart {
	t.Helper()
	var engines []*engine.Engine
	for range 4 {
		engines = append(engines, startSimulated(t, engine.Config{Blocks: 32768}))
	}
	site := simulated(engines, "response_headers X-KV-", option)
	r := &restart{child: newChild(t), t: t, kinds: make(map[string]*figures)}
	r.start(t, site)
	talks, turns := newTalks(conversations), 6
	r.pause = time.Minute / time.Duration(conversations*turns) // half of them take four seconds and more
	var wg sync.WaitGroup
	wg.Go(func() { r.converse(talks, turns) })
	eventually(t, 5*time.Minute, "half of the turns", func() bool { return int(r.done.Load()) >= conversations*turns/2 })
	r.end(how)
	r.runs.Add(1)
	r.start(t, site)
	wg.Wait()
	return r
}

// TestRestartInTheMiddle restarts Caddy in the middle of live conversations, with and without
// snapshots, by a signal and by kill -9. With snapshots, conversations go on at home, and
// the router predicts what the engines have cached.
func TestRestartInTheMiddle(t *testing.T) {
	conversations := 80
	if inLong {
		conversations = 1000
	}
	for _, c := range []struct {
		name, option string
		how          syscall.Signal
	}{
		{"SIGTERM, persist", persist, syscall.SIGTERM},
		{"kill -9, persist", persist, syscall.SIGKILL},
		{"SIGTERM", "", syscall.SIGTERM},
		{"kill -9", "", syscall.SIGKILL},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := interrupt(t, conversations, c.option, c.how)
			var b strings.Builder
			for _, name := range []string{"in one run, with key", "after the restart, with key", "in one run, no key", "after the restart, no key"} {
				fmt.Fprintf(&b, "%-28s %v\n", name, r.of(name))
			}
			t.Logf("%d conversations, %s\n%s", conversations, c.name, b.String())
			if c.option == "" {
				if n := r.of("after the restart, with key").predicted + r.of("after the restart, no key").predicted; n != 0 {
					t.Errorf("%d cached tokens are predicted without a snapshot", n)
				}
				return
			}
			tolerance := 10
			if c.how == syscall.SIGKILL { // the last snapshot lacks the last turns
				tolerance = 4
			}
			for _, keyed := range []string{"with key", "no key"} {
				f := r.of("after the restart, " + keyed)
				if f.turns == 0 || f.share() < 0.9 {
					t.Errorf("%s: after the restart %.1f %% of %d turns are at home, want 90 %%", keyed, 100*f.share(), f.turns)
				}
				if off := max(f.predicted-f.cached, f.cached-f.predicted); off > f.cached/tolerance {
					t.Errorf("%s: after the restart %d cached tokens are predicted and %d reported", keyed, f.predicted, f.cached)
				}
			}
		})
	}
}

// TestEngineRestartsMeanwhile restarts one of two engines while Caddy is down. Its cache model
// is not restored; the other's is.
func TestEngineRestartsMeanwhile(t *testing.T) {
	engines := []*engine.Engine{startSimulated(t, engine.Config{}), startSimulated(t, engine.Config{})}
	site := simulated(engines, persist, "policy round_robin")
	c := newChild(t)
	c.start(t, site)
	for i := range 8 {
		c.mustChat(t, simChat(fmt.Sprint(i, strings.Repeat(" some text", 400))))
	}
	for _, e := range engines {
		eventually(t, 10*time.Second, "the engine to be known", func() bool { w := c.told(t, e); return w.Engine.Told.Started != nil && w.Cache.Cached > 3000 })
	}
	c.end(syscall.SIGTERM)
	time.Sleep(1100 * time.Millisecond) // an engine reports its start in seconds
	engines[0].Kill()
	if err := engines[0].Restart(); err != nil {
		t.Fatal(err)
	}
	c.start(t, site)
	eventually(t, 10*time.Second, "the cache model of the other engine", func() bool { return c.told(t, engines[1]).Cache.Cached > 3000 })
	eventually(t, 10*time.Second, "the engine to be asked", func() bool { return c.told(t, engines[0]).Engine.Told.Started != nil })
	eventually(t, 5*time.Second, "no cached tokens on the engine that has restarted", func() bool { return c.told(t, engines[0]).Cache.Cached == 0 })
}

// TestRefusedConfigurationWritesNothing loads configurations with persist that Caddy rejects.
func TestRefusedConfigurationWritesNothing(t *testing.T) {
	named := "affinity {\n\tpersist 1s {\n\t\trouter here\n\t}\n}"
	e := startSimulated(t, engine.Config{})
	s := startCaddy(t, simulated([]*engine.Engine{e}))
	dir := strings.TrimSuffix(s.log, "/caddy.log")
	s.mustChat(t, simChat("hello"))
	broken := "\nreverse_proxy /elsewhere 127.0.0.1:1 {\n\ttransport http {\n\t\ttls_trust_pool file /nonexistent/ca.pem\n\t}\n}"
	if err := s.load(simulated([]*engine.Engine{e}, named) + broken); err == nil {
		t.Fatal("the configuration is accepted")
	}
	time.Sleep(1500 * time.Millisecond)
	if n := snapshotFiles(t, dir); n != 0 {
		t.Errorf("%d files of snapshots", n)
	}
	if err := s.reload(simulated([]*engine.Engine{e}, named)); err != nil {
		t.Fatal(err)
	}
	eventually(t, 10*time.Second, "a snapshot", func() bool { return snapshotFiles(t, dir) >= 2 })
	eventually(t, 5*time.Second, "the age of the snapshot in the metrics", func() bool {
		status, text, err := s.get(t.Context(), "http://"+s.admin+"/metrics")
		return err == nil && status == http.StatusOK && strings.Contains(text, "caddy_kv_router_snapshot_age_seconds")
	})
}
