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
