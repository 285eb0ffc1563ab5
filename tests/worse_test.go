package tests

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// TestNobodyIsTurnedAwayWhileAWorkerHasRoom has one of two engines rated down and
// being let back with one request, and the other one full: those who would be
// turned away go to the first one, whether they have waited or cannot.
func TestNobodyIsTurnedAwayWhileAWorkerHasRoom(t *testing.T) {
	for name, queue := range map[string]string{"Late": "max_wait 300ms", "Overflow": "max_waiting 1\nmax_wait 20s"} {
		t.Run(name, func(t *testing.T) {
			engines := startEngines(t, 2, canned.Pace{})
			s := startCaddy(t, route(engines, "policy round_robin", maxRunning(4), "queue {\n"+queue+"\n}"))
			engines[1].FailNext(1, refusal)
			for i := range 2 { // one of them meets the refusal
				s.mustChat(t, ask(fmt.Sprint("before ", i)))
			}
			gates := []*gate{holdInferences(engines[0]), holdInferences(engines[1])}
			time.Sleep(600 * time.Millisecond) // the mark is over, its window is not
			var all []asked
			for i := range 8 {
				all = append(all, s.startChat(t, fmt.Sprint("request ", i)))
				if i < 5 {
					eventually(t, 5*time.Second, "they have room", func() bool { return gates[0].running.Load()+gates[1].running.Load() == int64(i)+1 })
				}
			}
			eventually(t, 5*time.Second, "nobody is left with nothing", func() bool {
				return gates[0].running.Load()+gates[1].running.Load() >= 7
			})
			gates[0].opened(t)
			gates[1].opened(t)
			for i, q := range all {
				if a := q.wait(t); !a.ok() {
					t.Errorf("request %d: status %d, error %v, body %q", i, a.status, a.err, a.body)
				}
			}
			s.slotsFree(t)
		})
	}
}

// TestWorseWorkersAreNotThoseThatDrain has nothing left but the operator's wish.
func TestWorseWorkersAreNotThoseThatDrain(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, maxRunning(1), "worker "+engines[1].Addr()+" {\ndrain\n}", "queue {\nmax_wait 300ms\n}"))
	g := holdInferences(engines[0])
	served := s.startChat(t, "one")
	runs(t, g, 1)
	wantTurnedAway(t, s.chat(t.Context(), ask("two")), http.StatusServiceUnavailable, "queue_timeout", "server_error")
	g.opened(t)
	if a := served.wait(t); !a.ok() {
		t.Errorf("status %d, error %v", a.status, a.err)
	}
	s.slotsFree(t)
}

// TestUploadsOvertakeNobody has a request whose body comes slowly, and others
// that wait meanwhile: it comes after them.
func TestUploadsOvertakeNobody(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{})
	s := startCaddy(t, route(engines, maxRunning(1)))
	g := holdInferences(engines[0])
	conn, err := net.Dial("tcp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	body := ask("request slow").body()
	fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", s.addr, len(body), body[:10])
	time.Sleep(100 * time.Millisecond) // it has begun before them
	all := []asked{s.startChat(t, "request 0")}
	runs(t, g, 1)
	for i := 1; i < 4; i++ {
		all = append(all, s.startChat(t, fmt.Sprint("request ", i)))
		s.wantWaiting(t, i)
	}
	if _, err := conn.Write(body[10:]); err != nil {
		t.Fatal(err)
	}
	s.wantWaiting(t, 4)
	for range 5 {
		g.pass(t, http.StatusOK)
	}
	for i, q := range all {
		if a := q.wait(t); !a.ok() {
			t.Errorf("request %d: status %d, error %v", i, a.status, a.err)
		}
	}
	if _, err := io.ReadAtLeast(conn, make([]byte, 12), 12); err != nil {
		t.Error(err)
	}
	var order []string
	for _, r := range engines[0].Journal() {
		if _, rest, ok := strings.Cut(string(r.Body), "request "); ok {
			order = append(order, rest[:1])
		}
	}
	if got := strings.Join(order, ""); got != "0123s" {
		t.Errorf("served in the order %s", got)
	}
	s.slotsFree(t)
}
