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

// overload sends essays of four tenants at random times, 18 a second, where 12 can be served. It returns how many got their
// first token in time or late, and what the others got.
func (s *server) overload(t *testing.T, d, target time.Duration) (in, late int, others []answer) {
	rnd := rand.New(rand.NewPCG(1, 2))
	var mu sync.Mutex
	var all sync.WaitGroup
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(time.Duration(rnd.ExpFloat64() * float64(time.Second) / 18)) {
		org := fmt.Sprint(rnd.IntN(4))
		all.Go(func() {
			a, took := s.timed(t, essay(2500), "X-Org", org)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case !a.ok():
				others = append(others, a)
			case took <= target:
				in++
			default:
				late++
			}
		})
	}
	all.Wait()
	return in, late, others
}

// TestOverloadRefusesWhatWouldBeLate has requests come half as fast again as the engines can serve them. Those
// that would be late are refused, and counted. How many of the others are in time depends on the machine.
func TestOverloadRefusesWhatWouldBeLate(t *testing.T) {
	takesSeconds(t)
	s := startCaddy(t, fmt.Sprintf("kv_router %s {\ntenant {header.X-Org}\nclass default {\nttft 1s\nlate refuse\n}\n}", startComputing(t, 2)))
	for i := range 15 { // 10 promises are compared before any request is refused
		s.timed(t, essay(2500), "X-Org", fmt.Sprint(i%4))
	}
	in, late, others := s.overload(t, span(4*time.Second, 20*time.Second), time.Second)
	t.Logf("%d in time, %d late, %d refused", in, late, len(others))
	for _, a := range others {
		wantError(t, "late", a, http.StatusTooManyRequests, "ttft_unattainable", "the first token is predicted in", "class default", "try again later")
		if after, err := strconv.Atoi(a.header.Get("Retry-After")); err != nil || after < 1 {
			t.Errorf("Retry-After %q", a.header.Get("Retry-After"))
		}
	}
	refused, _ := s.scrape(t).sum("caddy_kv_router_promises_total", `class="default"`, `outcome="refused"`)
	if int(refused) != len(others) || refused == 0 {
		t.Errorf("%d refused, and %v counted", len(others), refused)
	}
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
