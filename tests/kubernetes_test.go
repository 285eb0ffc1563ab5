package tests

import (
	"cmp"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/endpointslices"
	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/kubernetes"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// kubeCluster is an API server, and engines that are pods.
type kubeCluster struct {
	*kubernetes.Server
	source string // the Caddyfile's
	pods   int
	ports  map[int]bool // of all pods so far
}

func startCluster(t *testing.T) *kubeCluster {
	t.Helper()
	c := &kubeCluster{Server: kubernetes.StartServer(), ports: make(map[int]bool)}
	t.Cleanup(c.Close)
	t.Cleanup(c.CloseClientConnections)
	files := t.TempDir()
	ca, token := filepath.Join(files, "ca"), filepath.Join(files, "token")
	write(t, ca, string(c.CA()))
	write(t, token, "")
	c.source = fmt.Sprintf("dynamic endpointslices models/vllm {\napi %s\nca_file %s\ntoken_file %s\n}", c.URL, ca, token)
	return c
}

// follow returns whether the source lists a pod. Sources of one Service share what they know.
func (c *kubeCluster) follow(t *testing.T) func(*livePod) bool {
	t.Helper()
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	source := new(endpointslices.Upstreams)
	noError(t, source.UnmarshalCaddyfile(caddyfile.NewTestDispenser(strings.TrimPrefix(c.source, "dynamic "))))
	noError(t, source.Provision(ctx))
	t.Cleanup(func() {
		cancel()
		_ = source.Cleanup()
	})
	r := httptest.NewRequestWithContext(ctx, http.MethodGet, "/", nil)
	return func(p *livePod) bool {
		ups, err := source.GetUpstreams(r)
		return err == nil && slices.ContainsFunc(ups, func(up *reverseproxy.Upstream) bool { return up.Dial == p.Addr() })
	}
}

// livePod is an engine that is a pod.
type livePod struct {
	*canned.Engine
	pod  string
	port int
}

// start starts a pod that loads its model.
func (c *kubeCluster) start(t *testing.T, pace canned.Pace) *livePod {
	t.Helper()
	c.pods++
	name := fmt.Sprintf("pod-%d", c.pods)
	e, err := canned.StartAt(name, "127.0.0.1:0")
	noError(t, err)
	t.Cleanup(e.Kill)
	number := int(netip.MustParseAddrPort(e.Addr()).Port())
	if c.ports[number] { // the worker at this address refuses connections, as far as the router knows
		return c.start(t, pace)
	}
	c.ports[number] = true
	e.SetPace(pace)
	p := &livePod{e, name, number}
	c.set(p, kubernetes.Loading)
	return p
}

func (c *kubeCluster) set(e *livePod, state kubernetes.Condition) {
	c.Set(e.pod, "127.0.0.1", e.port, state)
}

// remove ends a pod.
func (c *kubeCluster) remove(e *livePod) {
	e.Kill()
	c.Delete(e.pod)
}

// figure returns the sum of a metric's series.
func (s *server) figure(t *testing.T, name string) float64 {
	t.Helper()
	n, _ := s.scrape(t).sum(name)
	return n
}

// TestRollingUpdates replaces pods one by one under load, while watches end in each way. No request
// fails. A new pod serves soon after it is ready, and an old one has nothing to do at its end.
// KVROUTER_UPDATES is the number of pods to replace.
func TestRollingUpdates(t *testing.T) {
	takesSeconds(t)
	updates, _ := strconv.Atoi(cmp.Or(os.Getenv("KVROUTER_UPDATES"), "20"))
	c := startCluster(t)
	pace := canned.Pace{Words: 12, PerWord: 5 * time.Millisecond}
	var pods []*livePod
	for range 4 {
		pods = append(pods, c.start(t, pace))
		c.set(pods[len(pods)-1], kubernetes.Ready)
	}
	s := startCaddy(t, "kv_router {\nreverse_proxy {\n"+c.source+"\n}\n}")
	var served atomic.Int64
	over := make(chan struct{})
	var clients sync.WaitGroup
	for i := range 12 {
		clients.Go(func() {
			for turn := 0; ; turn++ {
				select {
				case <-over:
					return
				default:
				}
				session := fmt.Sprintf("client-%d-%d", i, turn/5)
				a := s.chat(t.Context(), ask(session+strings.Repeat(" and some words", turn%5)).streamed(), "X-Session-Id", session)
				if !a.ok() {
					t.Errorf("update %d: status %d, error %v, body %.200q", c.pods, a.status, a.err, a.body)
					return
				}
				served.Add(1)
			}
		})
	}
	lists := c.follow(t)
	var listed, used, left []time.Duration
	next := c.start(t, pace)
	for n := range updates {
		if n%5 == 4 {
			c.EndWatches(map[bool]string{true: `{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired"}}`}[n%2 == 0])
		}
		fresh, old := next, pods[0]
		next = c.start(t, pace)
		c.set(fresh, kubernetes.Ready)
		ready := time.Now()
		eventually(t, "the new pod is an upstream", func() bool { return lists(fresh) })
		listed = append(listed, time.Since(ready))
		eventually(t, "the new pod serves", func() bool { return fresh.Requests() > 0 })
		used = append(used, time.Since(ready))
		c.set(old, kubernetes.Terminating)
		ends := time.Now()
		idle := 0 // checks in a row
		eventually(t, "the old pod has nothing to do", func() bool {
			if idle++; old.Active() > 0 {
				idle = 0
			}
			return idle >= 3
		})
		left = append(left, time.Since(ends))
		if next.Requests() > 0 { // though later changes have reached the router
			t.Error("a pod that is not ready got a request")
		}
		c.remove(old)
		pods = append(pods[1:], fresh)
		if t.Failed() {
			break
		}
	}
	close(over)
	clients.Wait()
	s.booksAtZero(t)
	t.Logf("%d updates, %d requests", updates, served.Load())
	for what, took := range map[string][]time.Duration{
		"new pod ready until listed": listed, "new pod ready until its first request": used, "old pod terminating until idle": left,
	} {
		slices.Sort(took)
		t.Logf("%s: median %s, 99 %% %s, most %s", what, took[len(took)/2], took[len(took)*99/100], took[len(took)-1])
	}
	if most := listed[len(listed)-1]; most > 2500*time.Millisecond {
		t.Errorf("a new pod was listed %s after it was ready", most)
	}
}

// TestScaleToZeroAndBack ends all pods. Requests wait for the next one, and metrics say how many.
// Plain reverse_proxy has no queue.
func TestScaleToZeroAndBack(t *testing.T) {
	c := startCluster(t)
	s := startCaddy(t, "handle /plain/* {\nreverse_proxy {\n"+c.source+"\n}\n}\nkv_router {\nqueue {\nmax_wait 1h\nmax_waiting 6\n}\nreverse_proxy {\n"+c.source+"\n}\n}")
	if n, found := s.scrape(t).sum(waitingRequests); n != 0 || !found { // a scaler must see a zero
		t.Errorf("before the first request %g wait, known: %v", n, found)
	}
	for range 2 {
		answers := make(chan answer)
		for i := range 6 {
			go func() { answers <- s.chat(t.Context(), ask(fmt.Sprint("waits ", i))) }()
		}
		eventually(t, "six wait", func() bool { return s.figure(t, waitingRequests) == 6 })
		if a := s.chat(t.Context(), ask("one too many")); a.status != http.StatusTooManyRequests || !strings.Contains(string(a.body), "there are no workers now, and 6 requests wait") {
			t.Errorf("status %d, %s", a.status, a.body)
		}
		if status, _, err := s.get(t.Context(), s.url+"/v1/models"); err != nil || status != http.StatusServiceUnavailable {
			t.Errorf("a request that runs on no engine: status %d, error %v, want 503", status, err)
		}
		e := c.start(t, canned.Pace{})
		c.set(e, kubernetes.Ready)
		for range 6 {
			if a := <-answers; !a.ok() || a.engine() != e.pod {
				t.Errorf("status %d, error %v, %s, engine %s", a.status, a.err, a.body, a.engine())
			}
		}
		if status, _, err := s.get(t.Context(), s.url+"/plain/v1/models"); err != nil || status == http.StatusServiceUnavailable {
			t.Errorf("plain reverse_proxy: status %d, error %v", status, err)
		}
		c.set(e, kubernetes.Terminating)
		s.mustChat(t, ask("only a terminating one is left"))
		c.remove(e)
		eventually(t, "no pod is left", func() bool {
			status, _, err := s.get(t.Context(), s.url+"/plain/v1/models")
			return err == nil && status == http.StatusServiceUnavailable
		})
	}
	s.booksAtZero(t)
}
