package tests

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// rss returns the bytes of this process, clients and engines included, that are
// in the system's memory. The race detector keeps memory of its own beside them:
// with it, Go's own count tells.
func rss(t testing.TB) int64 {
	t.Helper()
	if underRace {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.Sys - m.HeapReleased)
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Skip("there is no /proc")
	}
	_, rest, _ := bytes.Cut(status, []byte("VmRSS:"))
	kib, err := strconv.ParseInt(strings.Fields(string(rest))[0], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return kib << 10
}

// count returns how many clients a test has: usually, and in its long form.
func count(usual, long int) int {
	if inLong {
		return long
	}
	return usual
}

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
	n, before := count(1000, 5000), rss(t)
	clients := make([]net.Conn, n)
	for i := range clients {
		clients[i] = s.announce(t, 600_000, []byte("{"))
	}
	eventually(t, 20*time.Second, "all bodies to be counted", func() bool { return s.bodyBytes(t) >= int64(n*each) })
	if got := s.bodyBytes(t); got != int64(n*each) {
		t.Errorf("%d clients that sent a byte take %d bytes of bodies, want %d", n, got, n*each)
	}
	for range 5 {
		a := s.post(t.Context(), "/v1/chat/completions", longChat(600_000), trusted...)
		if a.err != nil || a.status != http.StatusOK {
			t.Fatalf("meanwhile: status %d, error %v, %.200s", a.status, a.err, a.body)
		}
	}
	t.Logf("%d clients: %d KiB of bodies counted, %d KiB more resident", n, s.bodyBytes(t)>>10, (rss(t)-before)>>10)
	for _, c := range clients {
		c.Close()
	}
	eventually(t, 20*time.Second, "all to be let go of", func() bool { return s.bodyBytes(t) == 0 })
	s.booksAtZero(t)
}

// TestMemoryReturnsAfterABurst has many bodies of 600 KB in memory at a time,
// and none afterwards.
func TestMemoryReturnsAfterABurst(t *testing.T) {
	n := count(250, 2500)
	var arrived atomic.Int64
	goOn := make(chan struct{})
	engine := serveRaw(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		if r.Method == http.MethodPost {
			arrived.Add(1)
			<-goOn
		}
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"choices":[]}`)
	})
	s := startCaddy(t, "kv_router "+engine)
	s.get(t.Context(), s.url+"/v1/models") // what is made once is there
	body, start := longChat(600_000), rss(t)
	var clients sync.WaitGroup
	for range n {
		c := s.announce(t, len(body), nil)
		clients.Go(func() {
			defer c.Close()
			if _, err := c.Write(body); err != nil {
				t.Error(err)
			}
			if resp, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || resp.StatusCode != http.StatusOK {
				t.Errorf("answer %v, error %v", resp, err)
			}
		})
	}
	eventually(t, 60*time.Second, "all bodies to arrive", func() bool { return arrived.Load() >= int64(n) })
	counted, burst := s.bodyBytes(t), rss(t)
	close(goOn)
	clients.Wait()
	eventually(t, 5*time.Second, "the bodies to be let go of", func() bool { return s.bodyBytes(t) == 0 })
	over, after := time.Now(), rss(t)
	enough := start + (burst-start)/10
	eventually(t, time.Minute, "the memory to return", func() bool { return rss(t) <= enough })
	t.Logf("%d uploads: resident %d MiB before, %d MiB meanwhile with %d MiB of bodies counted, %d MiB at the end, %d MiB %.0f s later",
		n, start>>20, burst>>20, counted>>20, after>>20, rss(t)>>20, time.Since(over).Seconds())
}

// TestStalledUploadsGiveTheirMemoryBack has clients that fill more than half of
// the memory for bodies and then stall. It needs 2 GiB of memory.
func TestStalledUploadsGiveTheirMemoryBack(t *testing.T) {
	if !inLong {
		t.Skip("takes 2 GiB of memory")
	}
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines))
	sent := make([]byte, 63<<20)
	var clients []net.Conn
	for range 18 {
		clients = append(clients, s.announce(t, 64<<20-1, sent))
	}
	if got := s.bodyBytes(t); got < 1<<30 {
		t.Fatalf("%d bytes of bodies are counted, want more than 1 GiB", got)
	}
	begun := time.Now()
	for _, c := range clients {
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		if resp.StatusCode != http.StatusRequestTimeout || !strings.Contains(string(b), "body_unreadable") {
			t.Errorf("status %d, body %s", resp.StatusCode, b)
		}
	}
	if d := time.Since(begun); d > 40*time.Second {
		t.Errorf("stalled uploads ended after %v", d)
	}
	eventually(t, 5*time.Second, "the bodies to be let go of", func() bool { return s.bodyBytes(t) == 0 })
	s.mustChat(t, ask("hi"))
	s.booksAtZero(t)
}
