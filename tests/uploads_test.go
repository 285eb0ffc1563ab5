package tests

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// TestUploadsAreCounted has clients stop in the middle of their bodies. These
// bytes count as memory until the clients leave.
func TestUploadsAreCounted(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines, "max_body 2MiB"))
	const sent = 1 << 20
	var clients []net.Conn
	for _, length := range []int{2 * sent, 4 * sent} { // the latter is streamed through
		for _, path := range []string{"/v1/chat/completions", "/tokenize"} {
			c := s.connect(t)
			clients = append(clients, c)
			fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", path, s.addr, length)
			if _, err := c.Write(make([]byte, sent)); err != nil {
				t.Fatal(err)
			}
		}
	}
	eventually(t, 5*time.Second, "the first body to be counted", func() bool { n := s.bodyBytes(t); return n >= sent && n <= 4*sent })
	for _, c := range clients {
		c.Close()
	}
	eventually(t, 5*time.Second, "all to be let go of", func() bool { return s.bodyBytes(t) == 0 })
	s.booksAtZero(t)

	chunked := func(path string, size int) {
		t.Helper()
		a := s.post(t.Context(), path, []byte(strings.Repeat(" ", size)+"{}"), "Content-Type", "application/json")
		if a.err != nil {
			t.Fatal(a.err)
		}
	}
	for _, size := range []int{10, sent, 3 * sent} {
		chunked("/v1/chat/completions", size)
		chunked("/tokenize", size)
	}
	eventually(t, 5*time.Second, "all to be let go of", func() bool { return s.bodyBytes(t) == 0 })
}

// TestRefusedBodiesAreLetGo has requests that are refused after their bodies were
// read.
func TestRefusedBodiesAreLetGo(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines, "trust pins explain", "worker * {\nmodels canned\n}"))
	for name, c := range map[string]chat{
		"malformed nvext": wishing("x", `{"dp_rank":"x"}`),
		"no such worker":  wishing("x", `{"backend_instance_id":7}`),
		"query":           wishing("x", `{"annotations":["query_instance_id"]}`),
		"no such model":   {Model: "other", Messages: []message{{"user", "x"}}},
	} {
		if a := s.chat(t.Context(), c); a.err != nil || name != "query" && a.status/100 != 4 {
			t.Errorf("%s: status %d, error %v", name, a.status, a.err)
		}
		if n := s.bodyBytes(t); n != 0 {
			t.Errorf("%s: %d bytes stay on the books", name, n)
		}
	}
	a := s.post(t.Context(), "/invocations", []byte(`{"prompt":"x","nvext":{"annotations":["query_instance_id"]}}`), "Content-Type", "application/json")
	if a.status != 400 || !strings.Contains(string(a.body), "query_instance_id") {
		t.Errorf("a query at a path that is not read: status %d, %.300s", a.status, a.body)
	}
}
