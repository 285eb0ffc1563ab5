package tests

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// announce opens a connection on which a chat of length bytes is announced, and
// its first bytes are sent.
func (s *server) announce(t *testing.T, length int, first []byte) net.Conn {
	t.Helper()
	c := s.connect(t)
	fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", s.addr, length)
	if _, err := c.Write(first); err != nil {
		t.Fatal(err)
	}
	return c
}

// longChat is a chat of about size bytes.
func longChat(size int) []byte { return ask(strings.Repeat("word ", size/5)).body() }

// TestAnnouncedBodiesTakeNoMemory has many clients announce bodies of 600,000
// bytes and send one byte. A guarded pool, which must read each body, still
// serves others.
func TestAnnouncedBodiesTakeNoMemory(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines, "worker "+engines[0].Addr()+" {\nengine dynamo\n}", trust("tenants")))
	s.mustChat(t, ask("hi"))
	const each = 16 << 10 // bytes that a body takes of which almost nothing has arrived
	const n = 1000
	clients := make([]net.Conn, n)
	for i := range clients {
		clients[i] = s.announce(t, 600_000, []byte("{"))
	}
	eventually(t, "all bodies to be counted", func() bool { return s.bodyBytes(t) >= int64(n*each) })
	equal(t, s.bodyBytes(t), int64(n*each), "bytes of bodies of %d clients that sent a byte", n)
	for range 5 {
		a := s.post(t.Context(), "/v1/chat/completions", longChat(600_000), trusted...)
		if a.err != nil || a.status != http.StatusOK {
			t.Fatalf("meanwhile: status %d, error %v, %.200s", a.status, a.err, a.body)
		}
	}
	for _, c := range clients {
		c.Close()
	}
	eventually(t, "all to be let go of", func() bool { return s.bodyBytes(t) == 0 })
	s.booksAtZero(t)
}

// TestBoundsFollowTheMemoryLimit has clients leave long uploads unfinished in a process with a
// limit, and asks an open path to read one.
func TestBoundsFollowTheMemoryLimit(t *testing.T) {
	t.Setenv("GOMEMLIMIT", "256MiB")
	engines := startEngines(t, 2, canned.Pace{})
	s := newChild(t)
	s.start(t, route(engines))
	const length, most, short = 20 << 20, 64 << 20, 512 << 10 // a quarter of the limit, and what short beginnings may take above it
	var p struct {
		Settings struct {
			Index  int64 `json:"index_memory_bytes"`
			Bodies int64 `json:"request_bodies_memory_bytes"`
		}
	}
	if _, text := s.api(t, http.MethodGet, defaultPool, nil, &p); p.Settings.Index != most/2 || p.Settings.Bodies != most {
		t.Errorf("bounds of the index and of bodies: %s", text)
	}
	body := longChat(length)
	c := s.connect(t)
	fmt.Fprintf(c, "GET /health HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", s.addr, len(body))
	go func() { _, _ = c.Write(body[:len(body)-1]) }()
	held := int64(0)
	for i := range 6 {
		c := s.announce(t, len(body), nil)
		go func() { _, _ = c.Write(body[:len(body)-1]) }()
		eventually(t, "a body to arrive", func() bool {
			now := s.bodyBytes(t)
			held = max(held, now)
			streamed := s.scrape(t).value("caddy_kv_router_fallbacks_total", `reason="memory"`)
			return now/length+int64(streamed) == int64(i+1)
		})
	}
	if held > most+short {
		t.Errorf("%d bytes of bodies were in memory, may be %d", held, most+short)
	}
	s.mustChat(t, ask("meanwhile"))
}

// TestManifoldRequestsLeaveBoundedTraces sends requests with thousands of models,
// paths and new header values, and fewer under the race detector. Each has its own session.
// The state that remains must have its configured size. The metrics must have no
// more series, and the admin API no longer pages, than after the first few
// requests.
func TestManifoldRequestsLeaveBoundedTraces(t *testing.T) {
	takesSeconds(t)
	const maxSessions, indexMemory = 1000, 8 << 20
	requests := int64(12_000)
	if underRace {
		requests = 2000
	}
	terse := func() string { return serveRaw(t, inferencesOnly(sendAs("application/json", withUsage))) }
	s := startCaddy(t, fmt.Sprintf("kv_router %s %s {\nindex {\nmemory %d\n}\naffinity {\nmax_sessions %d\n}\nresponse_headers X-KV-\n}",
		terse(), terse(), indexMemory, maxSessions), "metrics")
	s.send(t, 500) // of everything a little
	before, heap := s.scrape(t), heapInUse()
	s.send(t, requests)
	after, heapAfter := s.scrape(t), heapInUse()

	if grown := len(after) - len(before); grown > 10 {
		t.Errorf("%d series before, %d after: %v", len(before), len(after), newSeries(before, after))
	}
	t.Logf("%d series before, %d after; heap %d KiB before, %d KiB after; index %v bytes, %v sessions", len(before), len(after),
		heap>>10, heapAfter>>10, after.value("caddy_kv_router_index_bytes"), after.value(sessions))
	if n := after.value("caddy_kv_router_index_bytes"); n > indexMemory {
		t.Errorf("the index has %v bytes, may have %d", n, indexMemory)
	}
	if n := after.value(sessions); n > maxSessions {
		t.Errorf("%v sessions, may be %d", n, maxSessions)
	}
	if bound := heap + indexMemory + maxSessions*1024 + 24<<20; heapAfter > bound {
		t.Errorf("the heap grew from %d to %d bytes, may come to %d", heap, heapAfter, bound)
	}
	s.booksAtZero(t)
	s.checkPages(t)
}

// newSeries returns some of the new series.
func newSeries(before, after metrics) (names []string) {
	for name := range after {
		if _, was := before[name]; !was && len(names) < 20 {
			names = append(names, name)
		}
	}
	return names
}

// checkPages checks that no answer of the admin API grows with the traffic.
func (s *server) checkPages(t *testing.T) {
	t.Helper()
	for path, most := range map[string]int{
		"/pools": 8 << 10, defaultPool: 8 << 10, defaultPool + "/workers": 16 << 10,
		defaultPool + "/sessions": 64 << 10, defaultPool + "/sessions?limit=1000": 512 << 10,
	} {
		if status, body := s.api(t, http.MethodGet, path, nil, nil); status != http.StatusOK || len(body) > most {
			t.Errorf("GET %s: status %d, %d bytes, want at most %d", path, status, len(body), most)
		}
	}
}

// oddMethods are methods that a client may send.
var oddMethods = []string{"GET", "PUT", "BREW", "PROPFIND", "X", "OPTIONS", "LONGMETHODNAMEOFNOUSETOANYBODY"}

// send makes n requests, with 16 clients.
func (s *server) send(t *testing.T, n int64) {
	t.Helper()
	var next, bad atomic.Int64
	atOnce(16, func(int) {
		for i := next.Add(1); i <= n; i = next.Add(1) {
			if a := s.sendOne(t, int(i)); a.err != nil || a.status >= 500 {
				if bad.Add(1) == 1 {
					t.Errorf("request %d: status %d, error %v", i, a.status, a.err)
				}
			}
		}
	})
	if n := bad.Load(); n > 0 {
		t.Errorf("%d requests failed", n)
	}
}

// sendOne makes the ith request. Most are chats; one in sixteen has an odd
// method, one in sixteen a path that no API has, one in sixteen is malformed.
func (s *server) sendOne(t *testing.T, i int) answer {
	method, path := http.MethodPost, "/v1/chat/completions"
	body := fmt.Sprintf(`{"model":"model-%d","messages":[{"role":"user","content":"%x %x %x %x %x %x %x %x"}]}`, i,
		rand.Uint64(), rand.Uint64(), rand.Uint64(), rand.Uint64(), rand.Uint64(), rand.Uint64(), rand.Uint64(), rand.Uint64())
	switch i % 16 {
	case 1:
		method, body = oddMethods[i/16%len(oddMethods)], ""
	case 2:
		path = fmt.Sprint("/path/", i)
	case 3:
		path = fmt.Sprintf("/deployments/d%d/chat/completions", i)
	case 4:
		body = body[:len(body)/2]
	}
	header := []string{"X-Session-Id", fmt.Sprint("session-", i)}
	bogus := fmt.Sprint("bogus-", i)
	for _, name := range []string{"X-Dynamo-Worker-Instance-Id", "X-Data-Parallel-Rank", "X-Request-Id", "Traceparent", "User-Agent", "Authorization", "X-" + bogus} {
		header = append(header, name, bogus)
	}
	return s.sendBy(t, method, path, body, header...)
}

// TestGivenBackBodiesAreLetGoOf has a backup that delays reading the body that the router
// handed back. The body counts as memory until then, or until the client leaves.
func TestGivenBackBodiesAreLetGoOf(t *testing.T) {
	goOn := make(chan struct{})
	got := make(chan int64, 1)
	backup := serveRaw(t, func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-goOn:
			if n, err := io.Copy(io.Discard, r.Body); err == nil { // else it is that of the client which left
				got <- n
			}
		case <-r.Context().Done():
		}
	})
	s := startCaddy(t, "kv_router "+freeAddr(t)+"\nhandle_errors {\nreverse_proxy "+backup+"\n}")
	body := string(ask(strings.Repeat("word ", 16<<20/5)).body())
	counted := func(t *testing.T, least int64) {
		t.Helper()
		eventually(t, "the body is counted", func() bool { return s.bodyBytes(t) >= least })
	}
	gone := func(t *testing.T) {
		t.Helper()
		eventually(t, "the body is let go of", func() bool { return s.bodyBytes(t) == 0 })
	}
	t.Run("ClientLeaves", func(t *testing.T) {
		q := s.start(t, "/v1/chat/completions", body)
		counted(t, int64(len(body)))
		q.leave()
		gone(t)
	})
	t.Run("BackupReads", func(t *testing.T) {
		q := s.start(t, "/v1/chat/completions", body)
		counted(t, int64(len(body)))
		close(goOn)
		equal(t, <-got, int64(len(body)), "bytes at the backup")
		if a := q.wait(t); a.status != http.StatusOK {
			t.Errorf("status %d", a.status)
		}
		gone(t)
	})
	t.Run("NobodyReads", func(t *testing.T) {
		s.mustReload(t, "kv_router "+freeAddr(t)+"\nhandle_errors {\nrespond ours\n}")
		if a := s.post(t.Context(), "/v1/chat/completions", []byte(body)); string(a.body) != "ours" {
			t.Errorf("status %d, error %v, body %q", a.status, a.err, a.body)
		}
		gone(t)
	})
}

// TestBodiesReadByTheProxyAreLetGoOf configures the proxy to read the request's
// body itself, for its buffers or for another handler. The body's memory must not
// stay in use after the request.
func TestBodiesReadByTheProxyAreLetGoOf(t *testing.T) {
	drain := func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, withUsage)
	}
	eng, backup := serveRaw(t, drain), serveRaw(t, drain)
	for name, block := range map[string]string{
		"HandleResponse":      "handle_response {\nreverse_proxy " + backup + "\n}",
		"HandleResponseFails": "handle_response {\nerror 503\n}",
		"RequestBuffers":      "request_buffers 1MB",
	} {
		t.Run(name, func(t *testing.T) {
			s := startCaddy(t, "handle /v1/* {\nkv_router {\nreverse_proxy "+eng+" {\n"+block+"\n}\n}\n}\nhandle_errors {\nreverse_proxy "+backup+"\n}")
			body := ask(strings.Repeat("word ", 20000)).body()
			for range 3 {
				if a := s.post(t.Context(), "/v1/chat/completions", body); a.status != http.StatusOK {
					t.Errorf("status %d, error %v", a.status, a.err)
				}
			}
			eventually(t, "the bodies are let go of", func() bool { return s.bodyBytes(t) == 0 })
		})
	}
}
