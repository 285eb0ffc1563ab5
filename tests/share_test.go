package tests

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
	"github.com/caddy-kvrouter/kvrouter/tests/valkey"
	"github.com/tidwall/gjson"
)

func startValkey(t testing.TB, options ...string) *valkey.Server {
	t.Helper()
	v, err := valkey.Start(options...)
	noError(t, err)
	t.Cleanup(v.Stop)
	return v
}

// startRouters starts routers that share a server.
func startRouters(t testing.TB, n int, engines []*engine.Engine, share string, block ...string) []*child {
	t.Helper()
	routers := make([]*child, n)
	for i := range routers {
		routers[i] = newChild(t)
		routers[i].start(t, route(engines, append(block, share)...))
	}
	for _, r := range routers {
		r.awaitRouters(t, n-1)
	}
	return routers
}

type sharing struct {
	Connected bool    `json:"connected"`
	Error     string  `json:"error"`
	Late      float64 `json:"late_ms"`
	Routers   []struct {
		Live    bool   `json:"live"`
		Refused string `json:"refused"`
		Told    int    `json:"reported_requests"`
	} `json:"routers"`
}

// sharing returns how the router shares.
func (s *server) sharing(t testing.TB) sharing {
	t.Helper()
	var p struct{ Share sharing }
	s.api(t, http.MethodGet, defaultPool, nil, &p)
	return p.Share
}

func (s *server) awaitRouters(t testing.TB, n int) {
	t.Helper()
	eventually(t, fmt.Sprint(n, " other routers"), func() bool {
		state, live := s.sharing(t), 0
		for _, r := range state.Routers {
			if r.Live && r.Refused == "" {
				live++
			}
		}
		return state.Connected && live == n
	})
}

// othersRequests returns how many requests of others a router counts on all workers.
func (s *server) othersRequests(t testing.TB) (n int) {
	t.Helper()
	for _, w := range s.workers(t) {
		for _, r := range w.Ranks {
			n += r.Load.Others
		}
	}
	return n
}

// cached returns the tokens of a prompt that the engine had, and all of them.
func (a *answer) cached() (cached, prompt int) {
	usage := gjson.GetBytes(a.body, "usage")
	return int(usage.Get("prompt_tokens_details.cached_tokens").Int()), int(usage.Get("prompt_tokens").Int())
}

// TestRoutersActAsOne has conversations, sessions, loads and drains go on over several routers.
func TestRoutersActAsOne(t *testing.T) {
	takesSeconds(t)
	v := startValkey(t)
	engines := startFleet(t, 3, loaded(engine.Config{BlockSize: 32, Step: engine.StepModel{Base: 2}}))
	site := "share " + v.URL()
	routers := startRouters(t, 2, engines, site, "response_headers X-KV-", "affinity {\n\tmode hard\n}")
	a, b := routers[0], routers[1]
	rng := rand.New(rand.NewPCG(1, 1)) //nolint:gosec // a test
	turn := func(r *child, c *chat, header ...string) answer {
		t.Helper()
		c.MaxTokens = 16
		c.Messages = append(c.Messages, message{"user", prose(rng, 3000, 4000)})
		got := r.mustChat(t, *c, header...)
		c.Messages = append(c.Messages, message{"assistant", got.text})
		return got
	}
	// knows waits until a router knows which engine has most of a chat, and the worker of its session, if any.
	// Until the router knows that no engine is busy, it may choose another one.
	knows := func(r *child, c *chat, header ...string) {
		t.Helper()
		least := tokens(c.Messages) / 2
		eventually(t, "the other router to know of it", func() bool {
			var x struct {
				Home       struct{ Dial string }
				Candidates []struct {
					Overlap int `json:"overlap_tokens"`
				}
			}
			r.api(t, http.MethodPost, defaultPool+"/explain?path=/v1/chat/completions", c.body(), &x, header...)
			for _, one := range x.Candidates {
				if one.Overlap > least {
					return r.othersRequests(t) == 0 && (header == nil || x.Home.Dial != "")
				}
			}
			return false
		})
	}
	turn(b, &chat{Model: "sim-8b"}) // the first one shows how long tokens are
	for i := range 9 {
		c := chat{Model: "sim-8b"}
		first := turn(routers[i%2], &c)
		knows(routers[(i+1)%2], &c)
		second := turn(routers[(i+1)%2], &c)
		if home, now := first.header.Get("X-Kv-Worker"), second.header.Get("X-Kv-Worker"); home != now {
			t.Errorf("a conversation went from worker %s to %s", home, now)
		}
		var predicted int
		_, _ = fmt.Sscan(second.header.Get("X-Kv-Predicted-Cached-Tokens"), &predicted)
		if cached, prompt := second.cached(); max(predicted-cached, cached-predicted) > 64 || 3*cached < prompt {
			t.Errorf("%d tokens are cached, and %d were predicted, of %d", cached, predicted, prompt)
		}
	}
	session := []string{"X-Session-Id", "one"}
	c := chat{Model: "sim-8b"}
	first := turn(a, &c, session...)
	knows(b, &c, session...)
	c = chat{Model: "sim-8b"} // nothing but the session leads back
	if got := turn(b, &c, session...); got.header.Get("X-Kv-Worker") != first.header.Get("X-Kv-Worker") || got.header.Get("X-Kv-Session-State") != "bound" {
		t.Errorf("the session's home is %s, and the turn went to %s: %s", first.header.Get("X-Kv-Worker"), got.header.Get("X-Kv-Worker"), got.header.Get("X-Kv-Session-State"))
	}

	a.api(t, http.MethodPost, defaultPool+"/workers/"+engines[2].Addr()+"/drain", nil, new(any))
	drains := func(r *child) func() bool {
		return func() bool {
			var w struct{ Draining bool }
			r.api(t, http.MethodGet, defaultPool+"/workers/"+engines[2].Addr(), nil, &w)
			return w.Draining
		}
	}
	eventually(t, "the drain at the other router", drains(b))
	third := newChild(t)
	third.start(t, route(engines, site, "affinity {\n\tmode hard\n}"))
	third.awaitRouters(t, 2)
	eventually(t, "the drain at the one that joins", drains(third))
	b.api(t, http.MethodPost, defaultPool+"/workers/"+engines[2].Addr()+"/undrain", nil, new(any))
	eventually(t, "the end of the drain", func() bool { return !drains(a)() && !drains(third)() })

	long := c
	long.MaxTokens = 4000
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	for range 5 {
		go a.chat(ctx, long)
	}
	eventually(t, "the load of the other router", func() bool { return b.othersRequests(t) == 5 && third.othersRequests(t) == 5 })
	a.end(syscall.SIGKILL)
	eventually(t, "no load of a dead router", func() bool { return b.othersRequests(t) == 0 && third.othersRequests(t) == 0 })

	other := newChild(t)
	other.start(t, route(engines, site, "affinity {\n\tmode hard\n}\nindex {\n\ttext_block 128\n}"))
	eventually(t, "a router with other blocks to be refused", func() bool {
		list := other.sharing(t).Routers
		return len(list) > 0 && strings.Contains(list[0].Refused+list[len(list)-1].Refused, "text_block")
	})
	turn(other, &chat{Model: "sim-8b"})
}

// postConfig has the router load its configuration again.
func (c *child) postConfig(t testing.TB) {
	t.Helper()
	cfg, err := os.ReadFile(filepath.Join(c.dir, "caddy.json"))
	noError(t, err)
	admin := &server{url: "http://" + c.admin, client: http.DefaultClient}
	if a := admin.post(t.Context(), "/load", cfg, "Cache-Control", "must-revalidate"); a.status != http.StatusOK { // else Caddy does nothing
		t.Error("reload:", a.status, a.err)
	}
}

// loadedRouters is conversations that go on over routers at random.
type loadedRouters struct {
	t               *testing.T
	stop            atomic.Bool
	all             sync.WaitGroup
	mu              sync.Mutex
	failed, n       int
	cached, prompts int
	slowest         time.Duration
	took            time.Duration
	routers         []*child
}

func startLoad(t *testing.T, routers []*child, clients int) *loadedRouters {
	l := &loadedRouters{t: t, routers: routers}
	for i := range clients {
		l.all.Go(func() {
			rng := rand.New(rand.NewPCG(9, uint64(i))) //nolint:gosec // a test
			for !l.stop.Load() {
				c := chat{Model: "sim-8b", Messages: []message{{"system", prose(rng, 1500, 3000)}}}
				for range 6 {
					l.turn(&c, rng)
					time.Sleep(time.Duration(rng.IntN(100)) * time.Millisecond)
				}
			}
		})
	}
	return l
}

func (l *loadedRouters) turn(c *chat, rng *rand.Rand) {
	c.Messages = append(c.Messages, message{"user", prose(rng, 200, 800)})
	l.mu.Lock()
	r := l.routers[rng.IntN(len(l.routers))]
	l.mu.Unlock()
	begun := time.Now()
	a := r.chat(l.t.Context(), *c)
	for i := 0; a.err != nil && i < 100; i++ { // Caddy resets some connections while it reloads
		time.Sleep(10 * time.Millisecond)
		a = r.chat(l.t.Context(), *c)
	}
	took := time.Since(begun)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.n++
	l.took += took
	l.slowest = max(l.slowest, took)
	if !a.ok() {
		l.failed++
		l.t.Log("status", a.status, a.err, string(a.body))
		return
	}
	cached, prompt := a.cached()
	l.cached, l.prompts = l.cached+cached, l.prompts+prompt
	c.Messages = append(c.Messages, message{"assistant", a.text})
}

// row returns the figures since the last row.
func (l *loadedRouters) row() (text string, failed int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	text = fmt.Sprintf("%5d requests, %d failed, hits %5.1f %%, mean %4.0f ms, longest %5.0f ms",
		l.n, l.failed, 100*float64(l.cached)/float64(max(l.prompts, 1)), float64(l.took.Milliseconds())/float64(max(l.n, 1)), float64(l.slowest.Milliseconds()))
	failed = l.failed
	l.failed, l.n, l.cached, l.prompts, l.slowest, l.took = 0, 0, 0, 0, 0, 0
	return text, failed
}

// TestShareFaults harms the server in all ways under load. No request fails, and afterwards the
// routers share again.
func TestShareFaults(t *testing.T) {
	takesSeconds(t)
	v := startValkey(t)
	if !v.Real {
		t.Skip("there is no Valkey or Redis server on this machine")
	}
	engines := startFleet(t, 4, engine.Config{Blocks: 32768})
	routers := startRouters(t, 3, engines, "share "+v.URL())
	ask := func(words ...string) {
		t.Helper()
		if answer, err := v.Ask(words...); err != nil || strings.HasPrefix(answer, "-") {
			t.Error(words, answer, err)
		}
	}
	load := startLoad(t, routers, 12)
	defer load.all.Wait()
	defer load.stop.Store(true)
	lasts := span(1500*time.Millisecond, 4*time.Second)
	for _, c := range []struct {
		name       string
		harm, mend func()
	}{
		{"nothing", func() {}, func() {}},
		{"killed, and started empty", v.Kill, func() {
			if err := v.Restart(); err != nil {
				t.Error(err)
			}
		}},
		{"flushed", func() { ask("FLUSHALL") }, func() {}},
		{"stopped by SIGSTOP", func() { _ = v.Signal(syscall.SIGSTOP) }, func() { _ = v.Signal(syscall.SIGCONT) }},
		{"200 ms late", func() {
			for deadline := time.Now().Add(lasts); time.Now().Before(deadline); time.Sleep(210 * time.Millisecond) {
				ask("CLIENT", "PAUSE", "200")
			}
		}, func() {}},
		{"routers reloaded twice a second", func() {
			for range 4 {
				time.Sleep(lasts / 5)
				for _, r := range routers {
					r.postConfig(t)
				}
			}
		}, func() {}},
		{"memory full", func() { ask("CONFIG", "SET", "maxmemory", "1") }, func() { ask("CONFIG", "SET", "maxmemory", "0") }},
		{"a password that the routers do not have", func() {
			ask("CONFIG", "SET", "requirepass", "x")
			if _, err := v.AskAs("x", "CLIENT", "KILL", "TYPE", "normal"); err != nil {
				t.Error(err)
			}
		}, func() {
			conn, err := v.AskAs("x", "CONFIG", "SET", "requirepass", "")
			if err != nil {
				t.Error(conn, err)
			}
		}},
		{"something else under the key", func() {
			ask("DEL", "kv_router:{default}:journal")
			ask("SET", "kv_router:{default}:journal", "text")
		}, func() { ask("DEL", "kv_router:{default}:journal") }},
		{"garbage in the stream", func() {
			for i := range 200 {
				ask("XADD", "kv_router:{default}:journal", "*", "r", "12345678", "n", fmt.Sprint(i+1), "e", strings.Repeat("\x08\x00\x00\x00", i))
				ask("XADD", "kv_router:{default}:journal", "*", "other", "fields")
			}
		}, func() {}},
	} {
		begun := time.Now()
		c.harm()
		time.Sleep(time.Until(begun.Add(lasts)))
		row, failed := load.row()
		t.Logf("%-42s %s", c.name, row)
		c.mend()
		if failed > 0 {
			t.Errorf("%s: %d requests failed", c.name, failed)
		}
		for _, r := range routers {
			r.awaitRouters(t, 2)
		}
		load.row()
	}
	load.mu.Lock()
	load.routers = routers[1:]
	load.mu.Unlock()
	time.Sleep(500 * time.Millisecond) // what is under way
	routers[0].end(syscall.SIGKILL)
	eventually(t, "no load of a dead router", func() bool {
		routers[1].awaitRouters(t, 1)
		return true
	})
	if row, failed := load.row(); failed > 0 {
		t.Error("a router killed:", row)
	} else {
		t.Logf("%-42s %s", "one of three routers killed", row)
	}
}

// forwarder is an address that leads to a server, as a balancer's does. Connections stay where they are.
type forwarder struct {
	addr string
	to   atomic.Pointer[string]
}

func startForwarder(t *testing.T, to string) *forwarder {
	t.Helper()
	ln := listen(t)
	t.Cleanup(func() { _ = ln.Close() })
	f := &forwarder{addr: ln.Addr().String()}
	f.to.Store(&to)
	go func() {
		for {
			client, err := ln.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", *f.to.Load())
			if err != nil {
				_ = client.Close()
				continue
			}
			go pipe(client, server)
			go pipe(server, client)
		}
	}()
	return f
}

// pipe copies from one connection to another one until either ends.
func pipe(to, from net.Conn) {
	_, _ = io.Copy(to, from)
	_, _ = to.Close(), from.Close()
}

// TestFailoverBehindOneAddress has the server of share refuse to write, while the address leads to
// another one. Connections to the old server live on.
func TestFailoverBehindOneAddress(t *testing.T) {
	first, second := startValkey(t), startValkey(t)
	at := startForwarder(t, first.Addr)
	e := startSimulated(t, engine.Config{})
	s := startCaddy(t, route([]*engine.Engine{e}, "share redis://"+at.addr+"/0"))
	s.mustChat(t, simChat("hello"))
	s.awaitRouters(t, 0)
	at.to.Store(&second.Addr)
	noError(t, first.Demote())
	// The connection gets UNBLOCKED for a read that waits, which says nothing of a failover, and READONLY for the next
	// write. A router that heeds the latter has its stream at the other server.
	eventually(t, "the stream at the new primary", func() bool {
		answer, err := second.Ask("EXISTS", "kv_router:{default}:journal")
		return err == nil && strings.Contains(answer, "1")
	})
	s.awaitRouters(t, 0)
}
