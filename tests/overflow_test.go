package tests

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddyserver/caddy/v2"
)

// cloud returns the block of an engine that is a backup.
func cloud(e *canned.Engine, more ...string) string {
	return fmt.Sprintf("worker %s {\nrole backup\nid 99\nmodels canned\nheader Authorization \"Bearer {env.CLOUD_KEY}\"\n%s\n}",
		e.Addr(), strings.Join(more, "\n"))
}

// overflowing is a router before an engine of its own, with one slot, and a backup.
type overflowing struct {
	*server
	own, backup *canned.Engine
	gate        *gate // of own
}

func startOverflowing(t *testing.T, inCloud []string, block ...string) *overflowing {
	t.Setenv("CLOUD_KEY", "sk-cloud")
	engines := startEngines(t, 2, canned.Pace{})
	o := &overflowing{own: engines[0], backup: engines[1], gate: hold(engines[0])}
	block = append(block, fmt.Sprintf("worker %s {\nid 1\nmax_running 1\n}", o.own.Addr()), cloud(o.backup, inCloud...), "response_headers X-KV-")
	o.server = startCaddy(t, route(engines, block...))
	return o
}

// occupy fills the own engine.
func (o *overflowing) occupy(t *testing.T) asked {
	t.Helper()
	first := o.startChat(t, "first")
	eventually(t, "the own engine is full", func() bool { return o.gate.running.Load() == 1 })
	return first
}

// TestOverflowGoesToBackup has a request go to the backup while the only other engine is full, and the
// next one come back. Each of them gets its own keys, and the backup nothing else.
func TestOverflowGoesToBackup(t *testing.T) {
	o := startOverflowing(t, []string{"model example/canned"}, "trust pins priorities overrides tenants explain")
	first := o.occupy(t)
	secrets := []string{
		"Authorization", "Bearer sk-client", "X-Api-Key", "sk-client", "Cookie", "session=secret", "X-Session-Id", "s",
		"Traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "X-Tenant-Id", "alice", "Anthropic-Version", "2023-06-01",
	}
	c := ask("second")
	c.Nvext = []byte(`{"agent_hints":{"priority":3},"cache_salt":"x"}`)
	a := o.post(t.Context(), "/v1/chat/completions?key=sk-client", c.body(), secrets...)
	if !a.ok() || a.engine() != o.backup.Name() || a.header.Get("X-KV-Reason") != "overflow" ||
		!strings.Contains(string(a.body), `"model":"canned"`) {
		t.Fatalf("status %d by %s, header %v: %s", a.status, a.engine(), a.header, a.body)
	}
	twice := []byte(`{"model":"expensive","cache_salt":"secret","messages":[{"role":"user","content":"hello"}],"model":"canned"}`)
	if a := o.post(t.Context(), "/v1/chat/completions", twice, secrets...); a.engine() != o.backup.Name() {
		t.Errorf("two models: status %d by %s", a.status, a.engine())
	}
	for _, r := range o.backup.Journal() {
		names := make([]string, 0, len(r.Header))
		for name := range r.Header {
			names = append(names, name)
		}
		slices.Sort(names)
		want := []string{"Accept-Encoding", "Anthropic-Version", "Authorization", "Content-Length", "Content-Type", "User-Agent"}
		if !slices.Equal(names, want) || r.Header.Get("Authorization") != "Bearer sk-cloud" || r.URI != "/v1/chat/completions" || strings.Contains(string(r.Body), "nvext") ||
			strings.Contains(string(r.Body), "secret") || strings.Contains(string(r.Body), "expensive") || !strings.Contains(string(r.Body), `"model":"example/canned"`) {
			t.Errorf("the backup got %s %s %v %s", r.Method, r.URI, r.Header, r.Body)
		}
	}
	o.gate.pass(t, http.StatusOK)
	first.wait(t)
	o.gate.opened(t)
	if a := o.chat(t.Context(), ask("third"), "X-Session-Id", "s"); !a.ok() || a.engine() != o.own.Name() {
		t.Errorf("with a free engine: status %d by %s", a.status, a.engine())
	}
	if n := o.backup.Requests(); n != 2 {
		t.Errorf("the backup got %d requests", n)
	}
	for _, r := range o.own.Journal() {
		if strings.Contains(r.Header.Get("Authorization"), "cloud") {
			t.Errorf("the engine got %s %s with the backup's key", r.Method, r.URI)
		}
	}
}

// TestOverflowWhileEnginesAreDown kills the only engine, and restarts it.
func TestOverflowWhileEnginesAreDown(t *testing.T) {
	o := startOverflowing(t, nil)
	o.gate.opened(t)
	if a := o.chat(t.Context(), ask("hello"), "X-Session-Id", "s"); a.engine() != o.own.Name() {
		t.Fatalf("status %d by %s", a.status, a.engine())
	}
	o.own.Kill()
	for range 5 {
		if a := o.chat(t.Context(), ask("hello").streamed(), "X-Session-Id", "s"); !a.ok() || a.engine() != o.backup.Name() {
			t.Fatalf("without an engine: status %d by %s: %s", a.status, a.engine(), a.body)
		}
	}
	if err := o.own.Restart(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the session comes back", func() bool {
		a := o.chat(t.Context(), ask("hello"), "X-Session-Id", "s")
		return a.ok() && a.engine() == o.own.Name()
	})
	o.booksAtZero(t)
}

// TestBackupThatRefuses has a backup refuse with 429 and Retry-After, or refuse the router's key. The client sees
// nothing of it and waits for an engine, and the backup is left alone.
func TestBackupThatRefuses(t *testing.T) {
	for _, status := range []int{http.StatusTooManyRequests, http.StatusUnauthorized} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			o := startOverflowing(t, nil)
			o.backup.SetHandler(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Retry-After", "60")
				w.WriteHeader(status)
				fmt.Fprint(w, `{"error":{"message":"account sk-cl***"}}`)
			})
			first := o.occupy(t)
			second := o.startChat(t, "second")
			o.wantWaiting(t, 1)
			third := o.startChat(t, "third")
			o.wantWaiting(t, 2)
			o.gate.opened(t)
			for _, q := range []asked{first, second, third} {
				if a := q.wait(t); !a.ok() || a.engine() != o.own.Name() {
					t.Errorf("status %d by %s: %s", a.status, a.engine(), a.body)
				}
			}
			o.own.Kill()
			if a := o.chat(t.Context(), ask("fourth")); a.status != http.StatusServiceUnavailable || strings.Contains(string(a.body), "account") {
				t.Errorf("without any engine: status %d: %s", a.status, a.body)
			}
			if n := o.backup.Requests(); n != 1 {
				t.Errorf("the backup got %d requests", n)
			}
			if w := o.worker(t, o.backup.Addr()); w.Health.Available {
				t.Errorf("the backup counts as available")
			}
		})
	}
}

// TestWhoMayOverflow keeps all but one tenant, and what matches nothing, from the backup.
func TestWhoMayOverflow(t *testing.T) {
	o := startOverflowing(t, []string{"match vars {http.kv_router.tenant} alice"}, "tenant {http.request.header.X-Tenant}", "queue {\nmax_wait 200ms\n}")
	first := o.occupy(t)
	for tenant, status := range map[string]int{"alice": http.StatusOK, "bob": http.StatusServiceUnavailable, "": http.StatusServiceUnavailable} {
		if a := o.chat(t.Context(), ask("hello"), "X-Tenant", tenant); a.status != status {
			t.Errorf("tenant %q: status %d by %s", tenant, a.status, a.engine())
		}
	}
	o.gate.pass(t, http.StatusOK)
	first.wait(t)
	o.own.Kill()
	if a := o.chat(t.Context(), ask("hello"), "X-Tenant", "bob"); a.ok() {
		t.Errorf("without an engine: status %d by %s", a.status, a.engine())
	}
	if n := o.backup.Requests(); n != 1 {
		t.Errorf("the backup got %d requests", n)
	}
}

// TestClientsCannotReachBackups has clients with all grants name the backup in each way, and ask for what it must not get.
func TestClientsCannotReachBackups(t *testing.T) {
	o := startOverflowing(t, nil, "trust pins priorities overrides tenants explain", "queue {\nmax_wait 100ms\n}")
	first := o.occupy(t)
	chats := []struct {
		nvext, model string
		header       []string
	}{
		{nvext: `{"backend_instance_id":99}`},
		{nvext: `{"decode_worker_id":99}`},
		{nvext: `{"prefill_worker_id":99,"decode_worker_id":99}`},
		{nvext: `{"dp_rank":0}`},
		{nvext: `{"allowed_worker_ids":[99]}`},
		{nvext: `{"allowed_worker_ids":[1,99]}`},
		{nvext: `{"routing_constraints":{"required_taints":["cloud"]}}`},
		{nvext: `{"annotations":["query_instance_id:"]}`},
		{header: []string{"X-Worker-Instance-Id", "99"}},
		{header: []string{"X-Dynamo-Worker-Instance-Id", "99"}},
		{header: []string{"X-Dp-Rank", "0"}},
		{model: "gpt-5-pro"},
		{model: "canned:adapter"},
	}
	for _, stage := range []string{"full", "dead"} {
		for _, v := range chats {
			c := ask("hello")
			if c.Nvext = []byte(v.nvext); v.nvext == "" {
				c.Nvext = nil
			}
			if v.model != "" {
				c.Model = v.model
			}
			if a := o.chat(t.Context(), c, v.header...); a.engine() == o.backup.Name() || strings.Contains(string(a.body), `worker_id":99`) {
				t.Errorf("%s, %+v: status %d by %s: %s", stage, v, a.status, a.engine(), a.body)
			}
		}
		if stage == "full" {
			o.gate.opened(t)
			first.wait(t)
		}
		for _, path := range []string{"/tokenize", "/generate", "/v1/score", "/v1/audio/transcriptions", "/flush_cache", "/wake_up", "/v1/anything"} {
			if a := o.post(t.Context(), path, []byte(`{"model":"canned"}`), "Authorization", "Bearer sk-client"); a.engine() == o.backup.Name() {
				t.Errorf("%s, %s: status %d by %s", stage, path, a.status, a.engine())
			}
		}
		for _, path := range []string{"/v1/models", "/v1/models/canned", "/health", "/metrics", "/v1/responses/resp_1"} {
			if a := o.request(t.Context(), http.MethodGet, path, nil, "X-Worker-Instance-Id", "99"); a.engine() == o.backup.Name() {
				t.Errorf("%s, GET %s: status %d by %s", stage, path, a.status, a.engine())
			}
		}
		o.own.Kill()
	}
	if n := o.backup.Requests(); n != 0 {
		t.Errorf("the backup got %d requests: %+v", n, o.backup.Journal())
	}
}

// TestOverflowUnderLoad has clients keep two engines busy that die and come back. Only
// streams that these have begun may break.
func TestOverflowUnderLoad(t *testing.T) {
	takesSeconds(t)
	t.Setenv("CLOUD_KEY", "sk-cloud")
	engines := startEngines(t, 3, canned.Pace{FirstToken: 20 * time.Millisecond, PerWord: time.Millisecond})
	own, backup := engines[:2], engines[2]
	s := startCaddy(t, route(engines, fmt.Sprintf("worker %s {\nmax_running 2\n}", own[0].Addr()), fmt.Sprintf("worker %s {\nmax_running 2\n}", own[1].Addr()), cloud(backup, "max_running 4")))
	var served, overflowed, broken atomic.Int64
	stop := make(chan struct{})
	var clients sync.WaitGroup
	for i := range 8 {
		clients.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				c := ask(fmt.Sprintf("client %d, request %d", i, n))
				c.Stream = n%2 == 0
				a := s.chat(t.Context(), c, "X-Session-Id", fmt.Sprint(i))
				if c.Stream && strings.Contains(string(a.body), "stream_broken") {
					broken.Add(1)
				} else if !a.ok() {
					t.Errorf("status %d, %v: %.200s", a.status, a.err, a.body)
				}
				served.Add(1)
				if a.engine() == backup.Name() {
					overflowed.Add(1)
				}
			}
		})
	}
	for _, e := range []*canned.Engine{own[0], own[1]} {
		before := served.Load()
		eventually(t, "requests are served", func() bool { return served.Load() > before+50 })
		e.Kill()
		before = served.Load()
		eventually(t, "requests are served without it", func() bool { return served.Load() > before+50 })
	}
	for _, e := range own {
		if err := e.Restart(); err != nil {
			t.Fatal(err)
		}
	}
	seen := own[0].Requests() + own[1].Requests()
	eventually(t, "the engines are used again", func() bool { return own[0].Requests()+own[1].Requests() > seen+50 })
	close(stop)
	clients.Wait()
	if n := broken.Load(); n > 4 {
		t.Errorf("%d streams broke", n)
	}
	if overflowed.Load() == 0 || overflowed.Load() == served.Load() {
		t.Errorf("the backup served %d of %d requests", overflowed.Load(), served.Load())
	}
	s.slotsFree(t)
}

// TestOverflowByTime has requests overflow whose first token is predicted late, although an engine is idle.
func TestOverflowByTime(t *testing.T) {
	long := ask(strings.Repeat("a long prompt ", 2000))
	for after, by := range map[string]int{"1ms": 1, "10m": 0} {
		o := startOverflowing(t, nil, "queue {\noverflow_after "+after+"\n}")
		o.gate.opened(t)
		name := []string{o.own.Name(), o.backup.Name()}[by]
		if a := o.chat(t.Context(), long); !a.ok() || a.engine() != name {
			t.Errorf("after %s: status %d by %s", after, a.status, a.engine())
		}
		o.slotsFree(t)
	}
}

// TestRouterAsksBackupNothing has a raw server be the backup, which sees each connection.
func TestRouterAsksBackupNothing(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	var seen atomic.Int64
	backup := httptest.NewUnstartedServer(http.NotFoundHandler())
	backup.Config.ConnState = func(net.Conn, http.ConnState) { seen.Add(1) }
	backup.Start()
	defer backup.Close()
	dial := backup.Listener.Addr().String()
	s := startCaddy(t, fmt.Sprintf("kv_router %s %s {\nworker * {\napi_key sk-own\nengine_load\n}\nworker %s {\nrole backup\nmodels canned\n}\n}", engines[0].Addr(), dial, dial))
	eventually(t, "the engine is probed", func() bool { return s.worker(t, engines[0].Addr()).Health.Available })
	if status, text := s.api(t, http.MethodPost, "/pools/default/call?path=/v1/load_lora_adapter", nil, nil); status != http.StatusOK || strings.Contains(text, dial) {
		t.Errorf("call: status %d: %s", status, text)
	}
	if status, text := s.api(t, http.MethodPost, "/pools/default/call?path=/v1/load_lora_adapter&worker="+dial, nil, nil); !strings.Contains(text, "no configuration") {
		t.Errorf("call of the backup: status %d: %s", status, text)
	}
	if a := s.mustChat(t, ask("hello")); a.engine() != engines[0].Name() {
		t.Errorf("answered by %s", a.engine())
	}
	if n := seen.Load(); n != 0 {
		t.Errorf("the backup saw %d changes of connections", n)
	}
}

// TestReloadsKeepFromBackups has a configuration with a backup that no longer serves, and one that does not serve yet. For
// the pool, their backup is an engine.
func TestReloadsKeepFromBackups(t *testing.T) {
	o := startOverflowing(t, nil)
	first := o.occupy(t)
	without := route([]*canned.Engine{o.own}, fmt.Sprintf("worker %s {\nid 1\nmax_running 7\n}", o.own.Addr()))
	if err := o.reload(without); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the pool has the new settings", func() bool {
		most := o.worker(t, o.own.Addr()).Load.Max
		return most != nil && *most == 7
	})
	o.own.Kill()
	if a := first.wait(t); a.ok() {
		t.Errorf("the request before the reload: status %d by %s", a.status, a.engine())
	}
	if err := o.own.Restart(); err != nil {
		t.Fatal(err)
	}
	o.own.SetHandler(nil)
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	rejected, err := adapt(o.caddyfile(route([]*canned.Engine{o.own, o.backup}, cloud(o.backup))) + fmt.Sprintf("http://%s {\nrespond hi\n}\n", taken.Addr()))
	if err != nil {
		t.Fatal(err)
	}
	var clients sync.WaitGroup
	defer clients.Wait()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	for range 4 {
		clients.Go(func() {
			for ctx.Err() == nil {
				o.client.CloseIdleConnections() // else the old listener's connections serve all
				o.request(ctx, http.MethodGet, "/v1/anything", nil, "Authorization", "Bearer sk-client")
			}
		})
	}
	for range 15 {
		if caddy.Load(rejected, true) == nil {
			t.Fatal("Caddy accepts a listener on a port that is taken")
		}
		time.Sleep(10 * time.Millisecond)
	}
	for _, r := range o.backup.Journal() {
		t.Errorf("the backup got %s %s %v", r.Method, r.URI, r.Header)
	}
}
