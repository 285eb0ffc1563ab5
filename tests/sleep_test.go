package tests

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// startSleepers starts engines that sleep at a level, and a router before them that knows it.
func startSleepers(t *testing.T, n, level int, wakeTime time.Duration, block ...string) (*server, []*engine.Engine) {
	engines := make([]*engine.Engine, n)
	for i := range engines {
		engines[i] = startSimulated(t, engine.Config{Name: fmt.Sprint("e", i+1), Model: "canned", AnswerTokens: 8, Speed: 4, WakeTime: wakeTime})
	}
	s := startCaddy(t, ofEngines(engines, block...))
	for _, e := range engines {
		s.awaitType(t, e.Addr(), "vllm")
		putToSleep(t, s, e, level)
	}
	return s, engines
}

func postSleep(t *testing.T, e *engine.Engine, level int) {
	t.Helper()
	resp, err := http.Post(fmt.Sprintf("%s%s?level=%d", e.URL(), engine.SleepPath, level), "", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
}

// putToSleep has an engine sleep, and waits until the router knows it.
func putToSleep(t *testing.T, s *server, e *engine.Engine, level int) {
	t.Helper()
	postSleep(t, e, level)
	eventually(t, "the router knows that the engine sleeps", func() bool {
		s.admits(t, e.Addr())
		return s.worker(t, e.Addr()).State == "asleep"
	})
}

// admits has the router ask an engine again, as a call of the admin API does.
func (s *server) admits(t *testing.T, dial string) {
	t.Helper()
	s.api(t, http.MethodPost, "/pools/default/call?path=/tokenize&worker="+dial, []byte(`{"model":"canned","prompt":"x"}`), nil)
}

// calls returns the calls by which the router woke an engine, in order.
func calls(e *engine.Engine) (list []string) {
	for _, r := range e.Journal() {
		if r.Path == engine.WakePath || r.Path == "/collective_rpc" {
			list = append(list, r.Path)
		}
	}
	return list
}

// TestAsleepGetsNothing has one of two engines sleep, then both, and then wakes one up.
func TestAsleepGetsNothing(t *testing.T) {
	s, engines := startSleepers(t, 1, 1, 0)
	if code, body := s.api(t, http.MethodGet, "/ready", nil, nil); code != http.StatusServiceUnavailable {
		t.Errorf("ready while none can be woken: %d %s", code, body)
	}
	if a := s.chat(t.Context(), ask("hello")); a.status != http.StatusServiceUnavailable {
		t.Errorf("while the engine sleeps: status %d: %s", a.status, a.body)
	}
	if n := len(calls(engines[0])); n > 0 {
		t.Errorf("the engine was woken %d times", n)
	}
	if code, _, err := s.get(t.Context(), s.url+"/v1/models"); code != http.StatusOK || len(s.conditions(t, "only draining")) > 0 {
		t.Errorf("a GET reaches it, and nothing drains: %d, %v", code, err)
	}
	resp, err := http.Post(engines[0].URL()+engine.WakePath, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	eventually(t, "the router knows that it is awake", func() bool { return s.chat(t.Context(), ask("hello")).ok() })
	if n := held(engines[0]); n > 0 {
		t.Errorf("the engine got %d requests in its sleep", n)
	}
}

// held returns how many requests an engine got in its sleep.
func held(e *engine.Engine) (n int) {
	for _, r := range e.Journal() {
		if r.Held {
			n++
		}
	}
	return n
}

// TestStreamsLeaveEngineThatSleeps has an engine fall asleep before the router knows it. What it gets then goes to
// the other one.
func TestStreamsLeaveEngineThatSleeps(t *testing.T) {
	engines := []*engine.Engine{
		startSimulated(t, engine.Config{Name: "sleeper", Model: "canned"}), startSimulated(t, engine.Config{Name: "awake", Model: "canned"}),
	}
	s := startCaddy(t, ofEngines(engines))
	for _, e := range engines {
		s.awaitType(t, e.Addr(), "vllm")
	}
	postSleep(t, engines[0], 1)
	all := make([]asked, 8)
	for i := range all {
		all[i] = s.start(t, "/v1/chat/completions", string(ask(fmt.Sprint("hello ", i)).streamed().body()))
	}
	eventually(t, "the engine holds requests", func() bool { return held(engines[0]) > 0 })
	s.admits(t, engines[0].Addr())
	for i, q := range all {
		if a := q.wait(t); !a.ok() || a.engine() != engines[1].Name() {
			t.Errorf("request %d: status %d by %s: %.200s", i, a.status, a.engine(), a.body)
		}
	}
	s.slotsFree(t)
}

// TestRequestsWakeOneEngine has many requests come while two engines sleep. One is woken, once, and serves
// all of them. The clients of streams get comments meanwhile.
func TestRequestsWakeOneEngine(t *testing.T) {
	for _, level := range []int{1, 2} {
		t.Run(fmt.Sprint("Level", level), func(t *testing.T) {
			s, engines := startSleepers(t, 2, level, 2*time.Second, "worker * {\nwake\n}", "keepalive 20ms")
			eventually(t, "the router is ready, as it can wake an engine", func() bool {
				code, _ := s.api(t, http.MethodGet, "/ready", nil, nil)
				return code == http.StatusOK
			})
			asked := make([]asked, 12)
			for i := range asked {
				c := ask(fmt.Sprint("hello ", i))
				c.Stream = i%2 == 0
				asked[i] = s.start(t, "/v1/chat/completions", string(c.body()))
			}
			for i, q := range asked {
				a := q.wait(t)
				if !a.ok() || i%2 == 0 && !strings.HasPrefix(string(a.body), ":") {
					t.Errorf("request %d: status %d, %v: %.200s", i, a.status, a.err, a.body)
				}
			}
			want := []string{engine.WakePath}
			if level == 2 {
				want = []string{engine.WakePath, "/collective_rpc", engine.WakePath}
			}
			woken := slices.Concat(calls(engines[0]), calls(engines[1]))
			if !slices.Equal(woken, want) || len(calls(engines[0]))*len(calls(engines[1])) > 0 {
				t.Errorf("woken by %v and %v", calls(engines[0]), calls(engines[1]))
			}
			s.slotsFree(t)
		})
	}
}

// TestEngineDiesWhileWaking kills the engine that is being woken. Another one is woken, and nobody notices.
func TestEngineDiesWhileWaking(t *testing.T) {
	s, engines := startSleepers(t, 2, 1, time.Second, "worker * {\nwake\n}")
	asked := make([]asked, 6)
	for i := range asked {
		asked[i] = s.startChat(t, fmt.Sprint("hello ", i))
	}
	var first, second *engine.Engine
	eventually(t, "an engine is woken", func() bool {
		for i, e := range engines {
			if len(calls(e)) > 0 {
				first, second = e, engines[1-i]
			}
		}
		return first != nil
	})
	first.Kill()
	for i, q := range asked {
		if a := q.wait(t); !a.ok() {
			t.Errorf("request %d: status %d, %v: %.200s", i, a.status, a.err, a.body)
		}
	}
	if len(calls(second)) != 1 {
		t.Errorf("the other engine was woken by %v", calls(second))
	}
	s.slotsFree(t)
}
