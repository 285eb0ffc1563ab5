package tests

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/tidwall/gjson"
)

// tenantStanding is how a tenant's limits stand, as the admin API shows it.
type tenantStanding struct {
	Tenant  string `json:"tenant"`
	Running int    `json:"running"`
	Refused int    `json:"refused"`
	Limits  []struct {
		Limit string `json:"limit"`
		Used  int64  `json:"used"`
	} `json:"limits"`
}

// standings returns how the limits of tenants stand, by name.
func (s *server) standings(t testing.TB) map[string]tenantStanding {
	t.Helper()
	var p struct {
		Limits struct {
			Top []tenantStanding `json:"top"`
		} `json:"limits"`
	}
	s.api(t, http.MethodGet, defaultPool, nil, &p)
	of := make(map[string]tenantStanding)
	for _, one := range p.Limits.Top {
		of[one.Tenant] = one
	}
	return of
}

// used returns how much of each limit a tenant has used.
func (s *server) used(t testing.TB, tenant string) (list []int64) {
	t.Helper()
	for _, l := range s.standings(t)[tenant].Limits {
		list = append(list, l.Used)
	}
	return list
}

const byHeader = "tenant {http.request.header.X-Key}"

// TestLimits has tenants reach their limits.
func TestLimits(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tenants.json")
	noError(t, os.WriteFile(file, []byte(`{"free": {"limits": []}, "few": {"limits": ["requests 1 per month", "tokens 100k per day"]}}`), 0o600))
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, route(engines, byHeader, "class batch {\nmatch header X-Class batch\nlimit requests 1 per day\n}",
		"limit tokens 10k per day", "limit requests 3 per 1h", "limit file "+file))

	// what the engine reports is charged, and the headers say what remains
	var total int64
	for i := range 3 {
		a := s.mustChat(t, ask("hello"), "X-Key", "a")
		usage := gjson.GetBytes(a.body, "usage")
		total += usage.Get("prompt_tokens").Int() + usage.Get("completion_tokens").Int()
		for name, want := range map[string]string{
			"X-Ratelimit-Limit-Requests": "3", "X-Ratelimit-Remaining-Requests": strconv.Itoa(2 - i), "X-Ratelimit-Limit-Tokens": "10000",
		} {
			equal(t, a.header.Get(name), want, "%s", name)
		}
		reset, err := time.ParseDuration(a.header.Get("X-Ratelimit-Reset-Requests"))
		if want := time.Duration(i+1) * 20 * time.Minute; err != nil || reset > want || reset < want-time.Minute {
			t.Errorf("the requests come back in %v, want %v", reset, want)
		}
	}
	right(t, func() string {
		if used := s.used(t, "a"); len(used) != 2 || used[0] != total || used[1] < 2 || used[1] > 3 {
			return fmt.Sprintf("used %v, want %d tokens and 3 requests", used, total)
		}
		return ""
	})

	// a refused request reaches no worker, in each API's shape
	served, _ := spread(engines)
	for path, want := range map[string]string{
		"/v1/chat/completions": `"type":"rate_limit_error","param":null,"code":"rate_limit_exceeded"`,
		"/v1/messages":         `{"type":"error","error":{"message":`,
		"/generate":            `"code":"rate_limit_exceeded"`,
	} {
		a := s.post(t.Context(), path, ask("hello").body(), "X-Key", "a")
		wait, err := strconv.Atoi(a.header.Get("Retry-After"))
		if a.status != http.StatusTooManyRequests || err != nil || wait < 1 || wait > 20*60 || !bytes.Contains(a.body, []byte(want)) {
			t.Errorf("%s: status %d, Retry-After %s, %s", path, a.status, a.header.Get("Retry-After"), a.body)
		}
		if !bytes.Contains(a.body, []byte("requests 3 per 1h")) || a.header.Get("X-Ratelimit-Remaining-Requests") != "0" {
			t.Errorf("%s: %s, %v", path, a.body, a.header)
		}
	}
	if now, _ := spread(engines); !slices.Equal(now, served) {
		t.Errorf("%v requests reached engines, %v before", now, served)
	}
	equal(t, s.standings(t)["a"].Refused, 3, "refused requests")

	// others have limits of their own
	for range 5 {
		s.mustChat(t, ask("hello"), "X-Key", "free")
	}
	status := func(header ...string) int { return s.chat(t.Context(), ask("hello"), header...).status }
	for i, want := range []int{200, 429} {
		for _, header := range [][]string{{"X-Key", "few"}, {"X-Key", "a", "X-Class", "batch"}, {"X-Key", "free", "X-Class", "batch"}} {
			equal(t, status(header...), want, "status of request %d of %v", i, header)
		}
	}
	long := ask(strings.Repeat("a long prompt ", 20_000))
	if a := s.chat(t.Context(), long, "X-Key", "b"); a.status != 429 || a.header.Get("Retry-After") != "" {
		t.Errorf("status %d, Retry-After %q", a.status, a.header.Get("Retry-After"))
	}

	// what asks no engine to compute is not limited
	if a := s.request(t.Context(), http.MethodGet, "/v1/models", http.NoBody, "X-Key", "a"); a.status != 200 {
		t.Errorf("models: %d", a.status)
	}

	// the figures survive a reload, and the file is read again
	noError(t, os.WriteFile(file, []byte(`{"a": {"limits": ["requests 5 per 1h"]}}`), 0o600))
	s.mustReload(t, route(engines, byHeader, "limit tokens 10k per day", "limit file "+file))
	if got := []int{status("X-Key", "a"), status("X-Key", "a"), status("X-Key", "a")}; fmt.Sprint(got) != "[200 200 429]" {
		t.Errorf("after the reload: %v", got)
	}
	s.booksAtZero(t)
}

// TestLimitsOfOddRequests charges requests that end in other ways than with a usage.
func TestLimitsOfOddRequests(t *testing.T) {
	engines := startEngines(t, 1, canned.Pace{Words: 40})
	s := startCaddy(t, route(engines, byHeader, "limit tokens 100k per day", "limit requests 1000 per day", "limit concurrent 2"))
	prompt := strings.Repeat("some words of a prompt ", 100)
	charged := func(name string, least, most, requests int64) {
		t.Helper()
		eventually(t, "the end of "+name, func() bool { return s.standings(t)[name].Running == 0 })
		if used := s.used(t, name); used == nil && requests == 0 {
			return
		} else if len(used) != 3 || used[0] < least || used[0] > most || used[1] != requests {
			t.Errorf("%s: used %v, want %d to %d tokens and %d requests", name, used, least, most, requests)
		}
	}

	// without usage, what was seen counts
	s.mustChat(t, ask(prompt).streamed(), "X-Key", "unreported")
	charged("unreported", 600, 1000, 1)

	// a tenant that aborts all its streams is charged for them
	engines[0].SetPace(canned.Pace{Words: 4000, PerWord: time.Millisecond})
	for range 5 {
		ctx, leave := context.WithCancel(t.Context())
		resp := s.mustOpen(ctx, t, atChat, ask(prompt).streamed().body(), "X-Key", "aborts")
		_, _ = io.ReadFull(resp.Body, make([]byte, 4000))
		leave()
		eventually(t, "its end", func() bool { return s.standings(t)["aborts"].Running == 0 })
	}
	charged("aborts", 5*600, 5*4000, 5)

	// a client that leaves before the first token pays for the prompt
	engines[0].SetPace(canned.Pace{FirstToken: time.Minute})
	ctx, leave := context.WithCancel(t.Context())
	left, got := make(chan answer), engines[0].Requests()
	go func() { left <- s.chat(ctx, ask(prompt).streamed(), "X-Key", "leaves") }()
	eventually(t, "the request at the engine", func() bool { return engines[0].Requests() > got })
	leave()
	<-left
	charged("leaves", 500, 900, 1)

	// no more than two at once
	ctx, leave = context.WithCancel(t.Context())
	for range 2 {
		go func() { left <- s.chat(ctx, ask(prompt).streamed(), "X-Key", "many") }()
	}
	eventually(t, "two requests", func() bool { return s.standings(t)["many"].Running == 2 })
	if a := s.chat(t.Context(), ask("hello"), "X-Key", "many"); a.status != 429 || a.header.Get("Retry-After") != "1" {
		t.Errorf("the third request: %d, Retry-After %q", a.status, a.header.Get("Retry-After"))
	}
	leave()
	<-left
	<-left
	charged("many", 1000, 1800, 2)

	// an engine's refusal is a request without tokens, and without an engine nothing counts
	engines[0].SetFault(canned.Fault{Kind: canned.Status, Status: 400, Body: `{"error":{"message":"bad"}}`})
	s.chat(t.Context(), ask(prompt), "X-Key", "bad")
	charged("bad", 0, 0, 1)
	engines[0].Kill()
	s.chat(t.Context(), ask(prompt), "X-Key", "unserved")
	charged("unserved", 0, 0, 0)
	s.booksAtZero(t)
}

// TestLimitsOfRouters sends 4,000 requests of 40 tenants, or in its long form 10,000 of 100, over two routers that share a server. One of
// them is killed on the way, and started again. No tenant gets much more than its limit of a day, and the
// routers agree on what was used.
func TestLimitsOfRouters(t *testing.T) {
	takesSeconds(t)
	const each, perDay = 100, 50
	tenants := int(span(40, 100))
	v := startValkey(t)
	engines := startEngines(t, 2, canned.Pace{Words: 8, FirstToken: 2 * time.Millisecond})
	site := route(engines, byHeader, fmt.Sprintf("limit requests %d per day", perDay), "limit tokens 1M per day", "limit concurrent 50", "share "+v.URL())
	routers := []*child{newChild(t), newChild(t)}
	for _, r := range routers {
		r.start(t, site)
	}
	for _, r := range routers {
		r.awaitRouters(t, 1)
	}

	granted := make([]atomic.Int64, tenants)
	tokens := make([]atomic.Int64, tenants)
	var lost atomic.Int64
	queue := make(chan int, tenants*each)
	order := rand.New(rand.NewPCG(1, 1)).Perm(tenants * each) //nolint:gosec // a test
	for _, n := range order {
		queue <- n
	}
	close(queue)
	var clients sync.WaitGroup
	for i := range 16 {
		clients.Go(func() {
			for n := range queue {
				who := n % tenants
				a := routers[(i+n)%2].chat(t.Context(), ask(fmt.Sprint("request ", n)), "X-Key", fmt.Sprint("t", who))
				switch {
				case a.ok():
					granted[who].Add(1)
					usage := gjson.GetBytes(a.body, "usage")
					tokens[who].Add(usage.Get("prompt_tokens").Int() + usage.Get("completion_tokens").Int())
				case a.status != http.StatusTooManyRequests:
					lost.Add(1) // the router was down
				}
			}
		})
	}
	for len(queue) > tenants*each*3/4 {
		time.Sleep(10 * time.Millisecond)
	}
	routers[1].end(syscall.SIGKILL)
	for len(queue) > tenants*each*5/8 {
		time.Sleep(10 * time.Millisecond)
	}
	routers[1].start(t, site)
	clients.Wait()

	routers[1].awaitRouters(t, 1)
	for _, r := range routers { // and what is over is over everywhere
		eventually(t, "the end of all requests", func() bool {
			for _, one := range r.standings(t) {
				if one.Running != 0 {
					return false
				}
			}
			return true
		})
	}
	var sum, most int64
	for who := range tenants {
		n := granted[who].Load()
		sum, most = sum+n, max(most, n)
		if n > perDay+12 {
			t.Errorf("tenant %d: %d requests were granted, the limit is %d", who, n, perDay)
		}
	}
	t.Logf("%d granted, at most %d to one tenant of %d; %d found the router down", sum, most, perDay, lost.Load())
	if sum < int64(tenants*perDay*9/10) {
		t.Errorf("only %d requests were granted", sum)
	}
	for i, r := range routers { // a router asks the server for what the other one has counted
		right(t, func() (wrong string) {
			for name, one := range r.standings(t) {
				who, err := strconv.Atoi(strings.TrimPrefix(name, "t"))
				if err != nil {
					continue
				}
				requests, used := one.Limits[0].Used, one.Limits[1].Used
				if requests < granted[who].Load()-8 || requests > granted[who].Load()+16 || used < tokens[who].Load()*3/4 {
					wrong += fmt.Sprintf("\nrouter %d: tenant %d has used %d requests and %d tokens, and was granted %d and %d", i, who, requests, used, granted[who].Load(), tokens[who].Load())
				}
			}
			return wrong
		})
	}

	// both are started anew, without their server: each knows the day from its own journal
	for _, r := range routers {
		r.end(syscall.SIGTERM)
	}
	v.Stop()
	site = strings.ReplaceAll(site, "share "+v.URL(), "")
	for i, r := range routers {
		r.start(t, site)
		refused := 0
		eventually(t, "the journal", func() bool { return len(r.standings(t)) > 0 })
		for who := range tenants {
			if a := r.chat(t.Context(), ask("again"), "X-Key", fmt.Sprint("t", who)); a.status == http.StatusTooManyRequests {
				refused++
			}
		}
		t.Logf("router %d refuses %d of %d tenants after its restart", i, refused, tenants)
		if refused < tenants*9/10 {
			t.Errorf("router %d has forgotten the day: it refuses %d of %d tenants", i, refused, tenants)
		}
	}
}
