package tests

import (
	"bytes"
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// TestClientThatLeavesIsNoticed lets clients leave at each stage of an answer.
// The engine must notice within a second, to stop computing, and nothing may
// stay booked.
func TestClientThatLeavesIsNoticed(t *testing.T) {
	for _, v := range []struct {
		name   string
		pace   canned.Pace
		fault  canned.Fault
		stream bool
		events int // read before leaving
	}{
		{name: "BeforeTheHeader", fault: canned.Fault{Kind: canned.HangBeforeHeader}, stream: true},
		{name: "BeforeTheFirstToken", pace: canned.Pace{FirstToken: 30 * time.Second}, stream: true},
		{name: "InMidStream", pace: canned.Pace{Words: 1000, PerWord: 20 * time.Millisecond}, stream: true, events: 5},
		{name: "BeforeAnAnswerThatIsNotStreamed", pace: canned.Pace{FirstToken: 30 * time.Second}},
	} {
		t.Run(v.name, func(t *testing.T) {
			engines := startEngines(t, 2, v.pace)
			for _, e := range engines {
				e.SetFault(v.fault)
			}
			s := startCaddy(t, route(engines))
			c := ask("are you still there?")
			c.Stream = v.stream
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			read := make(chan struct{})
			gone := make(chan struct{})
			go func() {
				defer close(gone)
				s.readEvents(ctx, c, v.events, read)
			}()
			active := func() int { return engines[0].Active() + engines[1].Active() }
			eventually(t, 5*time.Second, "an engine has the request", func() bool { return active() == 1 })
			if v.events > 0 {
				select {
				case <-read:
				case <-time.After(5 * time.Second):
					t.Fatal("the stream does not come")
				}
			}
			if n := s.scrape(t).value(leases); n != 1 {
				t.Errorf("%v leases while the engine computes, want 1", n)
			}
			leave()
			left := time.Now()
			<-gone
			eventually(t, 3*time.Second, "the engine notices", func() bool { return active() == 0 })
			j := append(engines[0].Journal(), engines[1].Journal()...)
			if len(j) != 1 || j[0].Left.IsZero() {
				t.Fatalf("%d requests at the engines, the first left at %v", len(j), j[0].Left)
			}
			if d := j[0].Left.Sub(left); d > time.Second {
				t.Errorf("the engine noticed after %v", d)
			}
			s.booksAtZero(t)
			if d := time.Since(left); d > 1500*time.Millisecond {
				t.Errorf("the books were at zero only after %v", d)
			}
			// The engine is no worse for it.
			for _, e := range engines {
				e.SetFault(canned.Fault{})
				e.SetPace(canned.Pace{})
			}
			s.mustChat(t, ask("and now?"))
		})
	}
}

// readEvents reads a chat's answer, closes read when n events have come, and
// goes on until ctx ends.
func (s *server) readEvents(ctx context.Context, c chat, n int, read chan<- struct{}) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url+"/v1/chat/completions", bytes.NewReader(c.body()))
	if err != nil {
		return
	}
	resp, err := s.client.Do(req)
	if err != nil {
		return
	}
	defer resp.Body.Close()
	buf := make([]byte, 4096)
	events := 0
	for {
		k, err := resp.Body.Read(buf)
		before := events
		events += bytes.Count(buf[:k], []byte("data: "))
		if before < n && events >= n {
			close(read)
		}
		if err != nil {
			return
		}
	}
}

// TestManyClientsThatLeaveLeaveNothing has clients leave at random moments.
func TestManyClientsThatLeaveLeaveNothing(t *testing.T) {
	engines := startEngines(t, 4, canned.Pace{Words: 30, FirstToken: 10 * time.Millisecond, PerWord: time.Millisecond})
	s := startCaddy(t, route(engines))
	done := make(chan bool)
	for i := range 16 {
		go func() {
			for n := range 20 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+(i*20+n)%50)*time.Millisecond)
				c := ask("quick")
				c.Stream = n%2 == 0
				done <- s.chat(ctx, c).ok()
				cancel()
			}
		}()
	}
	whole := 0
	for range 16 * 20 {
		if <-done {
			whole++
		}
	}
	t.Logf("%d of 320 clients stayed to the end", whole)
	s.booksAtZero(t)
	a := s.mustChat(t, ask("still there?"))
	t.Logf("answered by %s", a.engine())
}
