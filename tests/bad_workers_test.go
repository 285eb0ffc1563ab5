package tests

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// TestBadWorkersAreFound has a slow, a failing and a cold engine among eight. It looks for them as the
// manual says: by the command and on the page.
func TestBadWorkersAreFound(t *testing.T) {
	takesSeconds(t)
	s, addrs, bad := serveBadly(t)
	checkStatus(t, s, bad)
	checkPage(t, s, addrs, bad)
}

// serveBadly has eight engines serve conversations until the test ends. Three of them are bad. Faster engines would
// take less time for a short prefill than a busy machine adds, which makes any of them seem slow.
func serveBadly(t *testing.T) (s *server, addrs []string, bad signsOf) {
	t.Helper()
	var engines []*engine.Engine
	for i := range 8 {
		e := startSimulated(t, engine.Config{Name: fmt.Sprint("e", i+1), Speed: 1, AnswerTokens: 16, NoPrefixCache: i == 6})
		engines, addrs = append(engines, e), append(addrs, e.Addr())
	}
	s = startCaddy(t, "kv_router_status /status\nkv_router "+strings.Join(addrs, " "))
	setFault(t, engines[2], engine.Fault{Kind: engine.Slow, Factor: 5})
	ctx := t.Context()
	var all sync.WaitGroup
	t.Cleanup(all.Wait)
	all.Go(func() { // half of the requests fail
		for n := 0; ctx.Err() == nil; n++ {
			f := engine.Fault{}
			if n%20 < 10 {
				f = engine.Fault{Kind: engine.Status, Status: 500}
			}
			engines[4].SetFault(f) //nolint:errcheck // it is valid
			time.Sleep(10 * time.Millisecond)
		}
	})
	for i := range 60 {
		all.Go(func() { talkOn(ctx, s, rand.New(rand.NewPCG(7, uint64(i)))) })
	}
	return s, addrs, signsOf{addrs[2]: "slow", addrs[4]: "failing", addrs[6]: "cold"}
}

// checkStatus waits until the command shows the bad workers.
func checkStatus(t *testing.T, s *server, bad signsOf) {
	t.Helper()
	row := regexp.MustCompile(`(?m)^(127\.0\.0\.1:\d+) +([^:\n]*?) +sim-8b`)
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Second) {
		signs := make(signsOf)
		code, out := kvRouter(t, "status", "--address", s.admin)
		for _, m := range row.FindAllStringSubmatch(out, -1) {
			signs.add(m[1], m[2])
		}
		found := maps.Equal(signs, bad) && code == 2
		if !found && time.Now().Before(deadline) {
			continue
		}
		if t.Logf("caddy kv-router status:\n%s", out); !found {
			t.Fatalf("status: code %d, shows %v, want %v", code, signs, bad)
		}
		return
	}
}

// checkPage waits until the page shows the bad workers, if there is a Chromium.
func checkPage(t *testing.T, s *server, addrs []string, bad signsOf) {
	t.Helper()
	signs := make(signsOf)
	for deadline := time.Now().Add(patience); !maps.Equal(signs, bad); { // the signs are of the last minutes, and change
		dom := shown(t, s.url+"/status")
		if dom == "" {
			return
		}
		clear(signs)
		for _, addr := range addrs {
			signs.add(addr, regexp.MustCompile(`(?s)`+regexp.QuoteMeta(addr)+`</th>.*?</tr>`).FindString(dom))
		}
		if t.Logf("the page: %v", signs); time.Now().After(deadline) && !maps.Equal(signs, bad) {
			t.Fatalf("the page shows %v, want %v", signs, bad)
		}
	}
}

// signsOf are the signs of workers, by address.
type signsOf map[string]string

// add adds the signs that a text names.
func (s signsOf) add(addr, text string) {
	for _, sign := range []string{"slow", "failing", "cold"} {
		if strings.Contains(text, sign) {
			s[addr] += sign
		}
	}
}

// talkOn talks with one conversation after the other. Each has a long beginning, and a few turns.
func talkOn(ctx context.Context, s *server, rnd *rand.Rand) {
	for ctx.Err() == nil {
		c := chat{Model: "sim-8b", Stream: true, MaxTokens: 16, StreamOptions: json.RawMessage(`{"include_usage":true}`)}
		c.Messages = []message{{"user", prose(rnd, 6000, 6000)}}
		for turn := 0; turn < 5 && ctx.Err() == nil; turn++ {
			a := s.chat(ctx, c)
			if !a.ok() { // try again
				time.Sleep(50 * time.Millisecond)
				continue
			}
			c.Messages = append(c.Messages, message{"assistant", a.text}, message{"user", prose(rnd, 300, 300)})
			time.Sleep(100 * time.Millisecond)
		}
	}
}

// shown returns what Chromium makes of a page, and nothing if there is no Chromium.
func shown(t testing.TB, address string) string {
	t.Helper()
	chromium, err := exec.LookPath("chromium")
	if err != nil {
		return ""
	}
	out, err := exec.CommandContext(t.Context(), chromium, "--headless=new", "--no-sandbox", "--disable-gpu", //nolint:gosec // found above
		"--user-data-dir="+t.TempDir(), "--virtual-time-budget=2500", "--dump-dom", address).Output()
	noError(t, err)
	return string(out)
}

const engineRequests = "caddy_kv_router_worker_engine_requests"

// others returns how many requests of other clients the router sees on an engine, -1 if it
// does not know.
func (s *server) others(t testing.TB, e *engine.Engine) (n int) {
	t.Helper()
	for _, r := range s.worker(t, e.Addr()).Ranks {
		if r.Engine == nil {
			return -1
		}
		if n += r.Engine.Others; r.Engine.Age < 0 || r.Engine.Age > 3.5 {
			t.Errorf("a report is %v s old", r.Engine.Age)
		}
	}
	return n
}

// loaded is an engine at the speed of a real one, with long answers.
func loaded(cfg engine.Config) engine.Config {
	cfg.Speed, cfg.AnswerTokens = 1, 8000
	return cfg
}

// keepBusy sends requests to an engine directly, and keeps them there until stop is called.
func keepBusy(t *testing.T, e *engine.Engine, n int) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	for i := range n {
		clients.Go(func() { direct(e).chat(ctx, simChat(fmt.Sprint("direct ", i)).streamed()) })
	}
	eventually(t, "the engine to be busy", func() bool {
		running := 0
		for _, r := range e.Loads() {
			running += r.Running + r.Waiting
		}
		return running == n
	})
	return func() {
		cancel()
		clients.Wait()
	}
}

// reportsWereLate returns whether there was a pause of the reports of an engine's load, and not long ago. Reports come each
// second, and the router forgets them after three.
func reportsWereLate(e *engine.Engine, begun time.Time) bool {
	var before, last float64
	for _, r := range e.Journal() {
		if r.Method == http.MethodGet && (r.Path == "/metrics" || r.Path == "/v1/loads") {
			before, last = last, r.AtMS
		}
	}
	const late = 2000
	return last-before > late || float64(time.Since(begun).Milliseconds())-last > late
}

// TestOtherClientsAreSeen has two engines, and other clients that keep one of them busy. With
// the option, the router's requests avoid that engine. Without it they do not, if the policy does not learn
// that the engine is slow. Where the machine delays the engine's reports, the router cannot know of the others: requests
// from then do not count. While the reports come, each request has to know.
func TestOtherClientsAreSeen(t *testing.T) {
	const direct, requests = 24, 40
	for _, v := range []struct {
		flavour        engine.Flavour
		option, policy string
	}{{engine.VLLM, "", "policy least_load"}, {engine.VLLM, "engine_load", ""}, {engine.SGLang, "engine_load on", ""}} {
		t.Run(fmt.Sprint(v.flavour, " ", v.option), func(t *testing.T) {
			begun := time.Now()
			engines := []*engine.Engine{
				startSimulated(t, loaded(engine.Config{Name: "busy", Flavour: v.flavour})), startSimulated(t, loaded(engine.Config{Name: "free", Flavour: v.flavour})),
			}
			busy, on := engines[0], v.option != ""
			stop := keepBusy(t, busy, direct)
			defer stop()
			s := startCaddy(t, route(engines, v.policy, "worker * {\n"+v.option+"\n}"))
			rng := rand.New(rand.NewPCG(1, 1))
			asked := 0
			// ask returns who answered a request, and for how busy the router took the busy engine when it chose.
			ask := func() (at string, busyWith int) {
				c := simChat(prose(rng, 500, 600)).streamed()
				c.MaxTokens = 4
				asked++
				id := fmt.Sprint("ask-", asked)
				at = s.mustChat(t, c, "X-Request-Id", id).engine()
				var past []adminExplained
				s.api(t, http.MethodGet, defaultPool+"/choices?request_id="+id, nil, &past)
				for _, cand := range past[0].Candidates {
					if cand.Dial == busy.Addr() {
						busyWith = cand.Active
					}
				}
				return at, busyWith
			}
			ask() // the prober begins with the first request
			if on {
				eventually(t, "the other clients to be seen", func() bool { return s.others(t, busy) == direct && s.others(t, engines[1]) == 0 })
				if n := s.scrape(t).value(engineRequests, `worker="`+busy.Addr()+`"`, `state="running"`); n != direct {
					t.Errorf("%s is %v, want %d", engineRequests, n, direct)
				}
			}
			there, n := 0, 0
			eventually(t, "enough requests", func() bool {
				at, busyWith := ask()
				if knows := busyWith >= direct; knows != on {
					if on && !reportsWereLate(busy, begun) {
						t.Fatalf("the engine reports its load, and the router takes it for %d requests", busyWith)
					}
					return false
				}
				n++
				if at == busy.Name() {
					there++
				}
				return n == requests
			})
			t.Logf("%d of %d requests are on the busy engine", there, requests)
			if on && there > 0 || !on && there < requests/4 {
				t.Errorf("%d of %d requests are on the busy engine", there, requests)
			}
			if _, found := s.scrape(t).sum(engineRequests); !on && (found || s.others(t, busy) != -1) {
				t.Error("the option is off, and a load is reported")
			}
			s.booksAtZero(t)
			if stop(); on {
				eventually(t, "the other clients to be gone", func() bool { return s.others(t, busy) == 0 })
			}
		})
	}
}
