package tests

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
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

// backupName is what by calls the backup.
const backupName = "the backup"

// by returns who answered. A backup's own headers do not reach clients.
func by(a answer) string {
	if a.header.Get("X-KV-Worker") == "99" {
		return backupName
	}
	return a.engine()
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
	if !a.ok() || by(a) != backupName || a.header.Get("X-KV-Reason") != "overflow" ||
		!strings.Contains(string(a.body), `"model":"canned"`) {
		t.Fatalf("status %d by %s, header %v: %s", a.status, by(a), a.header, a.body)
	}
	twice := []byte(`{"model":"expensive","cache_salt":"secret","messages":[{"role":"user","content":"hello"}],"model":"canned"}`)
	if a := o.post(t.Context(), "/v1/chat/completions", twice, secrets...); by(a) != backupName {
		t.Errorf("two models: status %d by %s", a.status, by(a))
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
	if a := o.chat(t.Context(), ask("third"), "X-Session-Id", "s"); !a.ok() || by(a) != o.own.Name() {
		t.Errorf("with a free engine: status %d by %s", a.status, by(a))
	}
	equal(t, o.backup.Requests(), 2, "requests at the backup")
	for _, r := range o.own.Journal() {
		if strings.Contains(r.Header.Get("Authorization"), "cloud") {
			t.Errorf("the engine got %s %s with the backup's key", r.Method, r.URI)
		}
	}
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
				if a := q.wait(t); !a.ok() || by(a) != o.own.Name() {
					t.Errorf("status %d by %s: %s", a.status, by(a), a.body)
				}
			}
			o.own.Kill()
			if a := o.chat(t.Context(), ask("fourth")); a.status != http.StatusServiceUnavailable || strings.Contains(string(a.body), "account") {
				t.Errorf("without any engine: status %d: %s", a.status, a.body)
			}
			equal(t, o.backup.Requests(), 1, "requests at the backup")
			if w := o.worker(t, o.backup.Addr()); w.Health.Available {
				t.Errorf("the backup counts as available")
			}
		})
	}
}

// TestClientsOwnKeyAtBackup passes the clients' keys on to a backup, which refuses one of them. That client gets the
// refusal once no engine has become free, and the others go on. Neither gets headers about an account.
func TestClientsOwnKeyAtBackup(t *testing.T) {
	passedOn := []string{"header Authorization {http.request.header.Authorization}"}
	o := startOverflowing(t, passedOn, "queue {\nmax_wait 200ms\n}")
	answer := func(w http.ResponseWriter, r *http.Request) {
		for _, name := range []string{"Set-Cookie", "X-Ratelimit-Remaining", "Openai-Organization", "Alt-Svc", "Server-Timing"} {
			w.Header().Set(name, "the account's")
		}
		w.Header().Set("Www-Authenticate", "Bearer")
		w.Header().Set("X-Request-Id", "r")
		w.Header().Set("Trailer", "X-Cost")
		w.Header().Set("Content-Type", "application/json")
		status := map[string]int{"Bearer good": 200, "Bearer bad": 401, "Bearer poor": 402, "Bearer alien": 403, "Bearer busy": 429}[r.Header.Get("Authorization")]
		w.WriteHeader(status)
		fmt.Fprintf(w, `{"status":%d,"model":"canned","choices":[{"index":0,"finish_reason":"stop","message":{"role":"assistant","content":"hello"}}]}`, status)
		w.Header().Set("X-Cost", "1")
	}
	o.backup.SetHandler(answer)
	first := o.occupy(t)
	for _, key := range []string{"bad", "good", "poor", "good", "alien", "good", "busy", "good"} {
		a := o.chat(t.Context(), ask("hello"), "Authorization", "Bearer "+key)
		if a.status == http.StatusOK != (key == "good") || !strings.Contains(string(a.body), fmt.Sprintf(`"status":%d`, a.status)) {
			t.Errorf("key %s: status %d: %s", key, a.status, a.body)
		}
		if a.header.Get("X-Request-Id") != "r" || a.header.Get("Www-Authenticate") == "" || strings.Contains(fmt.Sprint(a.header), "account's") ||
			a.header.Get("Trailer") != "" {
			t.Errorf("key %s: header %v", key, a.header)
		}
	}
	if !o.worker(t, o.backup.Addr()).Health.Available {
		t.Error("the backup is marked down")
	}
	o.gate.opened(t)
	first.wait(t)
	o = startOverflowing(t, passedOn)
	o.backup.SetHandler(answer)
	first = o.occupy(t)
	second := o.startChat(t, "second", "Authorization", "Bearer bad")
	o.wantWaiting(t, 1)
	o.gate.opened(t)
	for _, q := range []asked{first, second} {
		if a := q.wait(t); !a.ok() || by(a) != o.own.Name() {
			t.Errorf("status %d by %s: %s", a.status, by(a), a.body)
		}
	}
	o.slotsFree(t)
}

// TestBackupThatHangs has a backup accept requests and never answer, and then break off in its answers. With a free
// engine, streams go there, and only what a client has seen of a stream is lost.
func TestBackupThatHangs(t *testing.T) {
	o := startOverflowing(t, nil, "timeouts {\nfirst_token 1s\n}")
	o.backup.SetHandler(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	first := o.occupy(t)
	second := o.start(t, "/v1/chat/completions", string(ask("second").streamed().body()))
	eventually(t, "the backup hangs", func() bool { return o.backup.Requests() == 1 })
	o.gate.opened(t)
	for _, q := range []asked{first, second} {
		if a := q.wait(t); !a.ok() || by(a) != o.own.Name() {
			t.Errorf("status %d by %s: %s", a.status, by(a), a.body)
		}
	}
	o.slotsFree(t)
	o.own.Kill()
	o.backup.SetHandler(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, "data: {\"model\":\"canned\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"half\"}}]}\n\ndata: {\"mod")
		_ = http.NewResponseController(w).Flush()
		canned.CloseConn(w, false)
	})
	if a := o.chat(t.Context(), ask("third").streamed()); by(a) != backupName || strings.Count(string(a.body), "half") != 1 ||
		!strings.Contains(string(a.body), "stream_broken") || strings.Contains(string(a.body), "DONE") || a.err == nil {
		t.Errorf("status %d by %s, %v: %s", a.status, by(a), a.err, a.body)
	}
	o.slotsFree(t)
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
			if a := o.chat(t.Context(), c, v.header...); by(a) == backupName || strings.Contains(string(a.body), `worker_id":99`) {
				t.Errorf("%s, %+v: status %d by %s: %s", stage, v, a.status, by(a), a.body)
			}
		}
		if stage == "full" {
			o.gate.opened(t)
			first.wait(t)
		}
		for _, path := range []string{"/tokenize", "/generate", "/v1/score", "/v1/audio/transcriptions", "/flush_cache", "/wake_up", "/v1/anything"} {
			if a := o.post(t.Context(), path, []byte(`{"model":"canned"}`), "Authorization", "Bearer sk-client"); by(a) == backupName {
				t.Errorf("%s, %s: status %d by %s", stage, path, a.status, by(a))
			}
		}
		for _, path := range []string{"/v1/models", "/v1/models/canned", "/health", "/metrics", "/v1/responses/resp_1"} {
			if a := o.request(t.Context(), http.MethodGet, path, nil, "X-Worker-Instance-Id", "99"); by(a) == backupName {
				t.Errorf("%s, GET %s: status %d by %s", stage, path, a.status, by(a))
			}
		}
		for _, path := range []string{"/v1/realtime?model=canned", "/v1/responses?model=canned", "/v1/chat/completions?model=canned"} {
			if a := o.request(t.Context(), http.MethodGet, path, nil, "Connection", "Upgrade", "Upgrade", "websocket"); by(a) == backupName {
				t.Errorf("%s, an upgrade of %s: status %d by %s", stage, path, a.status, by(a))
			}
		}
		o.own.Kill()
	}
	equal(t, o.backup.Requests(), 0, "requests at the backup, %+v", o.backup.Journal())
}

// TestOverflowUnderLoad has clients keep three engines busy that die and come back. There are a backup, which is
// only for one tenant, and a fourth engine, which sleeps. Only streams that an engine has begun may break.
func TestOverflowUnderLoad(t *testing.T) {
	takesSeconds(t)
	t.Setenv("CLOUD_KEY", "sk-cloud")
	backup := startEngines(t, 1, canned.Pace{FirstToken: 20 * time.Millisecond, PerWord: time.Millisecond})[0]
	own := startFleet(t, 4, engine.Config{Model: "canned", AnswerTokens: 200, WakeTime: 200 * time.Millisecond})
	sleeper := own[3]
	s := startCaddy(t, fmt.Sprintf("kv_router %s %s {\ntenant {http.request.header.X-Tenant}\nresponse_headers X-KV-\nworker * {\nmax_running 2\nwake\n}\n%s\n}",
		addresses(own), backup.Addr(), cloud(backup, "max_running 4", "match vars {http.kv_router.tenant} alice")))
	for _, e := range own {
		s.awaitType(t, e.Addr(), "vllm")
	}
	var served, overflowed, broken atomic.Int64
	stop := make(chan struct{})
	var clients sync.WaitGroup
	defer clients.Wait()
	ended := sync.OnceFunc(func() { close(stop) })
	defer ended()
	for i := range 12 {
		tenant := []string{"alice", "bob", ""}[i%3]
		clients.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				c := ask(fmt.Sprintf("secret of %q: client %d, request %d", tenant, i, n))
				c.Stream = n%2 == 0
				a := s.chat(t.Context(), c, "X-Session-Id", fmt.Sprint(i), "X-Tenant", tenant)
				if c.Stream && strings.Contains(string(a.body), "stream_broken") {
					broken.Add(1)
				} else if !a.ok() {
					t.Errorf("tenant %q: status %d, %v: %.200s", tenant, a.status, a.err, a.body)
				}
				served.Add(1)
				if by(a) == backupName {
					overflowed.Add(1)
				}
			}
		})
	}
	requests := func(of ...*engine.Engine) (n int) {
		for _, e := range of {
			all, _ := posts(e)
			n += all
		}
		return n
	}
	more := func(what string, count func() int, n int) {
		before := count()
		eventually(t, what, func() bool { return count() > before+n })
	}
	all := func() int { return int(served.Load()) }
	// as docs/operations.md says
	s.api(t, http.MethodPost, defaultPool+"/workers/"+sleeper.Addr()+"/drain", nil, nil)
	eventually(t, "the engine is idle", func() bool { return s.worker(t, sleeper.Addr()).Load.Requests == 0 })
	putToSleep(t, s, sleeper, 2)
	s.api(t, http.MethodPost, defaultPool+"/workers/"+sleeper.Addr()+"/undrain", nil, nil)
	for _, e := range own[:3] {
		more("requests are served", all, 40)
		e.Kill()
	}
	more("the last engine is woken and used", func() int { return requests(sleeper) }, 20)
	for _, e := range own[:3] {
		revive(t, e)
		more("the engine is used again", func() int { return requests(e) }, 20)
	}
	ended()
	clients.Wait()
	if n := broken.Load(); n > 3*2 { // what the engines ran when they died
		t.Errorf("%d streams broke", n)
	}
	if n := overflowed.Load(); n == 0 || n == served.Load() {
		t.Errorf("the backup served %d of %d requests", n, served.Load())
	}
	for _, r := range backup.Journal() {
		if text := string(r.Body); !strings.Contains(text, `secret of \"alice\"`) {
			t.Errorf("the backup got %s", text)
		}
	}
	if n := held(sleeper); n > 0 {
		t.Errorf("the engine got %d requests in its sleep", n)
	}
	s.slotsFree(t)
	t.Logf("%d requests, %d by the backup, %d broke", served.Load(), overflowed.Load(), broken.Load())
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
	equal(t, seen.Load(), 0, "changes of connections at the backup")
}

// TestReloadsKeepFromBackups has a configuration with a backup that no longer serves, and one that does not serve yet. For
// the pool, their backup is an engine.
func TestReloadsKeepFromBackups(t *testing.T) {
	o := startOverflowing(t, nil)
	first := o.occupy(t)
	without := route([]*canned.Engine{o.own}, fmt.Sprintf("worker %s {\nid 1\nmax_running 7\n}", o.own.Addr()))
	o.mustReload(t, without)
	eventually(t, "the pool has the new settings", func() bool {
		most := o.worker(t, o.own.Addr()).Load.Max
		return most != nil && *most == 7
	})
	o.own.Kill()
	if a := first.wait(t); a.ok() {
		t.Errorf("the request before the reload: status %d by %s", a.status, by(a))
	}
	revive(t, o.own)
	o.own.SetHandler(nil)
	site := route([]*canned.Engine{o.own, o.backup}, cloud(o.backup))
	o.meetRejected(t, site, func(ctx context.Context) {
		o.request(ctx, http.MethodGet, "/v1/anything", nil, "Authorization", "Bearer sk-client")
	}, func() {})
	for _, r := range o.backup.Journal() {
		t.Errorf("the backup got %s %s %v", r.Method, r.URI, r.Header)
	}
}

// TestReloadsLeaveNothingRunning reloads ten times with a backup, public names and an engine that is woken. Requests
// for all of them come between.
func TestReloadsLeaveNothingRunning(t *testing.T) {
	t.Setenv("CLOUD_KEY", "sk-cloud")
	backup := startEngines(t, 1, canned.Pace{})[0]
	engines := []*engine.Engine{
		startSimulated(t, engine.Config{Name: "own", Model: "canned"}), startSimulated(t, engine.Config{Name: "sleeper", Model: "other"}),
	}
	postSleep(t, engines[1], 1)
	site := func(n int) string {
		return fmt.Sprintf("kv_router %s %s %s {\nmodel public {\nto canned\n}\nmodel late {\nto other\n}\n%s\nresponse_headers X-KV-\nqueue {\noverflow_after 1ms\n}\nworker * {\nwake\nmax_running %d\n}\n}",
			engines[0].Addr(), engines[1].Addr(), backup.Addr(), cloud(backup), 2+n%2)
	}
	s := startCaddy(t, site(0))
	eventually(t, "the router knows that an engine sleeps", func() bool { return s.worker(t, engines[1].Addr()).State == "asleep" })
	s.awaitType(t, engines[0].Addr(), "vllm")
	level := 0
	for n := range 12 {
		s.mustReload(t, site(n))
		s.client.CloseIdleConnections() // the old listener's connections serve all
		for _, model := range []string{"public", "late"} {
			c := ask(strings.Repeat("a long prompt ", 2000))
			c.Model = model
			s.mustChat(t, c)
		}
		if n == 1 {
			level = runtime.NumGoroutine()
		}
	}
	s.slotsFree(t)
	eventually(t, "goroutines as before", func() bool { s.client.CloseIdleConnections(); return runtime.NumGoroutine() <= level })
	if backup.Requests() == 0 || !slices.Equal(calls(engines[1]), []string{engine.WakePath}) {
		t.Errorf("the backup got %d requests, and the engine was woken by %v", backup.Requests(), calls(engines[1]))
	}
}
