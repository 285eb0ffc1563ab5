package tests

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// startComputing starts engines that compute about one prompt of 2,500 words in a step, in 0.2 s. Answers
// are short.
func startComputing(t *testing.T, n int) (addrs string) {
	t.Helper()
	for i := range n {
		e, err := engine.Start(engine.Config{Name: fmt.Sprintf("e%d", i+1), AnswerTokens: 4})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Close)
		addrs += " " + e.Addr()
	}
	return addrs
}

// essay returns a streamed chat of unlike words.
func essay(words int) chat {
	var b strings.Builder
	for range words {
		fmt.Fprintf(&b, "w%04d ", rand.IntN(10000))
	}
	c := simChat(b.String()).streamed()
	c.MaxTokens = 2
	return c
}

// timed sends a chat and returns how long the first byte of the answer's body took.
func (s *server) timed(t testing.TB, c chat, header ...string) (a answer, took time.Duration) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.url+"/v1/chat/completions", bytes.NewReader(c.body()))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	began := time.Now()
	resp, err := s.client.Do(req)
	if err != nil {
		return answer{err: err}, 0
	}
	body := bufio.NewReader(resp.Body)
	_, _ = body.Peek(1)
	took = time.Since(began)
	resp.Body = struct {
		io.Reader
		io.Closer
	}{body, resp.Body}
	return read(resp), took
}

// TestOverloadRefusesWhatWouldBeLate has more requests come at once than the engines can serve in time. Those
// that would be late are refused, and counted. How many of the others are in time depends on the machine.
func TestOverloadRefusesWhatWouldBeLate(t *testing.T) {
	takesSeconds(t)
	s := startCaddy(t, fmt.Sprintf("kv_router %s {\ntenant {header.X-Org}\nclass default {\nttft 1s\nlate refuse\n}\n}", startComputing(t, 2)))
	for i := range 15 { // 10 promises are compared before any request is refused
		s.mustChat(t, essay(500), "X-Org", fmt.Sprint(i%4))
	}
	bodies := make([]string, 40) // eight seconds of work
	for i := range bodies {
		bodies[i] = string(essay(5000).body())
	}
	const promises = "caddy_kv_router_promises_total"
	before := s.scrape(t)
	var all []asked
	for i, body := range bodies {
		all = append(all, s.start(t, atChat, body, "X-Org", fmt.Sprint(i%4)))
	}
	refusals := 0
	for _, q := range all {
		a := q.wait(t)
		if a.ok() {
			continue
		}
		refusals++
		wantError(t, "late", a, http.StatusTooManyRequests, "ttft_unattainable", "the first token is predicted in", "class default", "try again later")
		if after, err := strconv.Atoi(a.header.Get("Retry-After")); err != nil || after < 1 {
			t.Errorf("Retry-After %q", a.header.Get("Retry-After"))
		}
	}
	if t.Logf("%d of %d refused", refusals, len(all)); refusals == 0 {
		t.Error("nothing was refused")
	}
	s.wantFigures(t, before, []figure{{promises, []string{`class="default"`, `outcome="refused"`}, float64(refusals)}})
}

// TestOneTenantDoesNotStarveOthers has 24 clients of a tenant send long prompts to two engines, beside short ones of
// others. There is no queue, then one, then those of two routers.
func TestOneTenantDoesNotStarveOthers(t *testing.T) {
	takesSeconds(t)
	beside := func(hold string, n int, share string) time.Duration {
		site := fmt.Sprintf("kv_router %s {\ntenant {header.X-Org}\nqueue {\nhold %s\n}\n%s\n}", startComputing(t, 2), hold, share)
		routers := make([]*child, n)
		for i := range routers {
			routers[i] = newChild(t)
			routers[i].start(t, site)
		}
		for i := 0; n > 1 && i < n; i++ {
			routers[i].awaitRouters(t, n-1)
		}
		for i := range 24 { // the router learns what a prompt takes
			routers[i%n].timed(t, essay(500), "X-Org", fmt.Sprint(i%2))
		}
		ctx, stop := context.WithCancel(t.Context())
		var flood, others sync.WaitGroup
		for i := range 24 {
			flood.Go(func() {
				for ctx.Err() == nil {
					routers[i%n].timed(t, essay(2500), "X-Org", "flood")
				}
			})
		}
		time.Sleep(500 * time.Millisecond)
		const tenants, each = 5, 4
		var sum atomic.Int64
		for i := range tenants {
			others.Go(func() {
				for k := range each {
					_, took := routers[(i+k)%n].timed(t, essay(10), "X-Org", fmt.Sprint("short", i))
					sum.Add(int64(took))
				}
			})
		}
		others.Wait()
		stop()
		flood.Wait()
		return time.Duration(sum.Load() / tenants / each)
	}
	off, one, two := beside("off", 1, ""), beside("auto", 1, ""), beside("auto", 2, "share "+startValkey(t).URL())
	t.Logf("first tokens of the others come after %v without a queue, %v with one, and %v with two", off, one, two)
	if 2*one > off || 2*two > off {
		t.Error("one tenant starves the others")
	}
}
