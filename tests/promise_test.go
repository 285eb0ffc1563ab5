package tests

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// startComputing starts two engines that compute about one prompt of 2,500 words in a step, in 0.2 s. Answers
// are short.
func startComputing(t *testing.T) (engines [2]*engine.Engine, addrs string) {
	t.Helper()
	for i := range engines {
		e, err := engine.Start(engine.Config{Name: fmt.Sprintf("e%d", i+1), AnswerTokens: 4})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Close)
		engines[i], addrs = e, addrs+" "+e.Addr()
	}
	return engines, addrs
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

// TestOverloadRefusesWhatWouldBeLate has more requests come at once than the engines can serve in time. Those
// that would be late are refused, and counted. How many of the others are in time depends on the machine.
func TestOverloadRefusesWhatWouldBeLate(t *testing.T) {
	takesSeconds(t)
	_, addrs := startComputing(t)
	s := startCaddy(t, fmt.Sprintf("kv_router %s {\ntenant {header.X-Org}\nclass default {\nttft 1s\nlate refuse\n}\n}", addrs))
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
	var state struct {
		Classes []struct {
			Class   string `json:"class"`
			Refused int    `json:"refused_requests"`
		} `json:"classes"`
	}
	s.api(t, http.MethodGet, defaultPool+"/state", nil, &state)
	if len(state.Classes) != 1 || state.Classes[0].Class != "default" || state.Classes[0].Refused != refusals {
		t.Errorf("classes %v, want %d refused", state.Classes, refusals)
	}
	s.wantFigures(t, before, []figure{{promises, []string{`class="default"`, `outcome="refused"`}, float64(refusals)}})
}

// TestOneTenantDoesNotStarveOthers has 24 clients of a tenant send long prompts to two engines, beside short ones of
// others. It counts how many long prompts are answered while a short one waits: without a queue, with one, and with those
// of two routers.
func TestOneTenantDoesNotStarveOthers(t *testing.T) {
	takesSeconds(t)
	beside := func(hold string, n int, share string) int64 {
		engines, addrs := startComputing(t)
		answered := func() (sum int64) {
			for _, e := range engines {
				for _, r := range e.Journal() {
					if r.Outcome == engine.Finished && r.Header.Get("X-Org") == "flood" {
						sum++
					}
				}
			}
			return sum
		}
		site := fmt.Sprintf("kv_router %s {\ntenant {header.X-Org}\nqueue {\nhold %s\n}\n%s\n}", addrs, hold, share)
		routers := make([]*child, n)
		for i := range routers {
			routers[i] = newChild(t)
			routers[i].start(t, site)
		}
		for i := 0; n > 1 && i < n; i++ {
			routers[i].awaitRouters(t, n-1)
		}
		for i := range 24 { // the router learns what a prompt takes
			routers[i%n].mustChat(t, essay(500), "X-Org", fmt.Sprint(i%2))
		}
		ctx, stop := context.WithCancel(t.Context())
		var flood, others sync.WaitGroup
		for i := range 24 {
			flood.Go(func() {
				for ctx.Err() == nil {
					routers[i%n].chat(t.Context(), essay(2500), "X-Org", "flood")
				}
			})
		}
		eventually(t, "the flood", func() bool { return answered() >= 4 })
		const tenants, each = 5, 2
		var sum atomic.Int64
		for i := range tenants {
			others.Go(func() {
				for k := range each {
					before := answered()
					routers[(i+k)%n].chat(t.Context(), essay(10), "X-Org", fmt.Sprint("short", i))
					sum.Add(answered() - before)
				}
			})
		}
		others.Wait()
		stop()
		flood.Wait()
		return sum.Load() / tenants / each
	}
	off, one, two := beside("off", 1, ""), beside("auto", 1, ""), beside("auto", 2, "share "+startValkey(t).URL())
	t.Logf("a prompt waits for %d of the flood without a queue, %d with one, and %d with two", off, one, two)
	if 2*one > off || 2*two > off {
		t.Error("one tenant starves the others")
	}
}
