package tests

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// directives are the handlers before a site's engines. reverse_proxy is the reference.
var directives = []string{"reverse_proxy", "kv_router"}

// behindProxy returns the directive for the engines, with lines of a reverse_proxy block.
func behindProxy(engines []*canned.Engine, proxy ...string) string {
	return "kv_router {\npolicy round_robin\nresponse_headers X-KV-\nreverse_proxy " + addresses(engines) + " {\n" + strings.Join(proxy, "\n") + "\n}\n}"
}

// refusal is the answer of a worker that accepts no more requests.
var refusal = canned.Fault{
	Kind: canned.Status, Status: http.StatusServiceUnavailable,
	Header: http.Header{"Retry-After": {"7"}}, Body: `{"error":{"message":"full"}}`,
}

// TestRetriesAreLimited counts the attempts at a request that every worker refuses. Each
// worker is tried once, or as often as lb_retries says, with untried workers first.
// Without limits, a request that breaks is retried on one more worker.
func TestRetriesAreLimited(t *testing.T) {
	for _, v := range []struct {
		limit    []string
		attempts int
		broken   int
	}{
		{nil, 4, 2},
		{[]string{"lb_retries 1"}, 2, 2},
		{[]string{"lb_retries 2"}, 3, 3},
		{[]string{"lb_retries 6"}, 7, 7},
		{[]string{"lb_retries 2", "lb_try_duration 20s"}, 3, 3},
	} {
		for _, f := range []canned.Fault{refusal, {Kind: canned.CloseAfterRead}} {
			name := strings.Join(v.limit, ",") + "/" + strconv.Itoa(f.Status)
			t.Run(strings.ReplaceAll(name, " ", "="), func(t *testing.T) {
				engines := startEngines(t, 4, canned.Pace{})
				s := startCaddy(t, behindProxy(engines, v.limit...))
				for _, e := range engines {
					e.SetFault(f)
				}
				a := s.chat(t.Context(), ask("anybody?"))
				attempts := v.attempts
				if f.Kind == canned.Status {
					wantAnswer(t, a, f)
				} else {
					attempts = v.broken
					if a.status != http.StatusBadGateway {
						t.Errorf("status %d, error %v; want 502", a.status, a.err)
					}
				}
				counts, _ := spread(engines)
				total := 0
				for _, n := range counts {
					total += n
				}
				equal(t, total, attempts, "attempts, %v", counts)
				if least, most := slices.Min(counts), slices.Max(counts); most-least > 1 {
					t.Errorf("attempts %v: some workers were tried again before others were tried", counts)
				}
				s.booksAtZero(t)
			})
		}
	}
}

// TestRefusalSaysWhoGaveIt holds back a refusal while it tries the other worker, which is
// down. The headers name the worker that answered.
func TestRefusalSaysWhoGaveIt(t *testing.T) {
	for _, rest := range []string{"Refuses", "HangsUp"} {
		t.Run(rest, func(t *testing.T) {
			engines := startEngines(t, 2, canned.Pace{})
			s := startCaddy(t, route(engines, "policy random", "response_headers X-KV-",
				fmt.Sprintf("worker %s {\nid 7\n}\nworker %s {\nid 8\n}", engines[0].Addr(), engines[1].Addr())))
			engines[0].SetFault(refusal)
			if rest == "Refuses" {
				engines[1].Kill()
			} else {
				engines[1].SetFault(canned.Fault{Kind: canned.CloseAfterRead})
			}
			before, sent := s.scrape(t), 0
			eventually(t, "an answer to be held back", func() bool { // which depends on the worker that is tried first
				a := s.chat(t.Context(), ask("x"))
				wantAnswer(t, a, refusal)
				for name, want := range map[string]string{"Worker": "7", "Dp-Rank": "0", "Reason": "load", "Overlap-Blocks": "0", "Predicted-Cached-Tokens": "0"} {
					if got := a.header.Values("X-KV-" + name); !slices.Equal(got, []string{want}) {
						t.Errorf("X-KV-%s: %q, want %q", name, got, want)
					}
				}
				sent++
				return sent >= 6 && s.scrape(t).value(retriesTotal, `reason="503"`) > before.value(retriesTotal, `reason="503"`)
			})
		})
	}
}

// wantAnswer checks that an answer is an engine's own, whole.
func wantAnswer(t *testing.T, a answer, f canned.Fault) {
	t.Helper()
	if a.status != f.Status || a.err != nil {
		t.Errorf("status %d, error %v; want %d", a.status, a.err, f.Status)
	}
	if string(a.body) != f.Body {
		t.Errorf("body %q, want %q", a.body, f.Body)
	}
	for name, values := range f.Header {
		if got := a.header.Values(name); len(got) != len(values) || got[0] != values[0] {
			t.Errorf("header %s: %q, want %q", name, got, values)
		}
	}
	if a.engine() == "" {
		t.Error("the engine's own header is missing")
	}
}

// TestLaterAttemptsAreAsTheFirst has an engine refuse a request. The other one gets it with its own
// header operations, and the client's placeholders name that one.
func TestLaterAttemptsAreAsTheFirst(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, behindProxy(engines,
		"header_up X-To {upstream_hostport}", "header_up +X-Via router", "header_down X-From {upstream_hostport}"))
	for i, e := range engines {
		other := engines[1-i]
		e.SetFault(refusal)
		a := s.mustChat(t, ask(fmt.Sprint("turn ", i)))
		equal(t, a.header.Get("X-From"), other.Addr(), "the engine of the answer")
		all := other.Journal()
		last := all[len(all)-1].Header
		if to, via := last.Values("X-To"), last.Values("X-Via"); !slices.Equal(to, []string{other.Addr()}) || len(via) != 1 {
			t.Errorf("X-To %q, X-Via %q", to, via)
		}
		e.SetFault(canned.Fault{})
	}
}
