package tests

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/tests/canned"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

func init() { caddy.RegisterModule(new(faulty)) }

// faulty is a defective foreign policy. It changes its arguments, and then chooses nothing
// or panics.
type faulty struct {
	// Fault is negative, high, truncates or panics.
	Fault string `json:"fault"`
}

func (*faulty) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.kv_router.policies.faulty", New: func() caddy.Module { return new(faulty) }}
}

func (f *faulty) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	d.Args(&f.Fault)
	return nil
}

func (f *faulty) Choose(s *kvscore.Selection) int {
	for i := range s.Candidates {
		s.Candidates[i] = kvscore.Candidate{Cost: -1, Requests: 1 << 30}
	}
	slices.Reverse(s.Candidates)
	switch f.Fault {
	case "negative":
		return -1
	case "high":
		return len(s.Candidates)
	case "truncates":
		s.Candidates = s.Candidates[:1]
		return 0
	}
	panic(f.Fault)
}

// TestEachPolicyServes holds interleaved conversations through each of the policies. All
// requests are served, by all engines, and no lease is left.
func TestEachPolicyServes(t *testing.T) {
	for _, policy := range []string{
		"random", "power_of_two", "prefix_hash",
		"prefix_hash {\nprefix_tokens 64\nload_factor 2\n}",
	} {
		t.Run(strings.Fields(policy)[0], func(t *testing.T) {
			engines := startEngines(t, 4, canned.Pace{FirstToken: 5 * time.Millisecond})
			s := startCaddy(t, route(engines, "policy "+policy))
			convs := newConversations(64, 21) // by hashes, all engines have some
			s.converse(t, convs, 4, true, dialects[0])
			counts, top := spread(engines)
			t.Logf("requests %v, most %.2f of the mean; %.0f %% of later turns kept their engine", counts, top, 100*kept(convs))
			for i, n := range counts {
				if n == 0 {
					t.Errorf("engine %d had no request", i+1)
				}
			}
			if a := s.mustChat(t, ask("hi")); a.engine() == "" { // less than a block
				t.Error("nobody answered a short prompt")
			}
			s.booksAtZero(t)
		})
	}
}

const (
	shadowTotal  = "caddy_kv_router_shadow_total"
	shadowFaults = "caddy_kv_router_shadow_faults_total"
)

// inTurn sends n prompts with the same beginning, one after the other. It fails the test
// unless the engines answer in turn.
func (s *server) inTurn(t *testing.T, n int) {
	t.Helper()
	same := prose(rand.New(rand.NewPCG(9, 9)), 2000, 2000)
	last := ""
	for i := range n {
		e := s.mustChat(t, ask(fmt.Sprintf("%s %d", same, i))).engine()
		if e == last {
			t.Errorf("request %d went to %s again: the shadow steers", i, e)
		}
		last = e
	}
}

// TestShadowIsCountedAndSteersNothing has one policy serve in turn with several shadows,
// one after the other.
func TestShadowIsCountedAndSteersNothing(t *testing.T) {
	const n = 10
	engines := startEngines(t, 2, canned.Pace{})
	name := "shadowed at " + engines[0].Addr() // no other run has counted there
	pool, label := fmt.Sprintf("pool %q", name), fmt.Sprintf("pool=%q", name)
	s := startCaddy(t, route(engines, pool, "policy round_robin"), "debug", "metrics")
	s.inTurn(t, n)
	if _, found := s.scrape(t).sum(shadowTotal, label); found {
		t.Error("there is a series of shadows without a shadow")
	}
	for _, v := range []struct {
		shadow                  string
		agreed, differed, fault float64
	}{
		{"round_robin", n, 0, 0},
		{"prefix_hash {\nload_factor 2\n}", n / 2, n / 2, 0},
		{"faulty negative", 0, 0, n},
		{"faulty high", 0, 0, n},
		{"faulty panics", 0, 0, n},
	} {
		t.Run(strings.ReplaceAll(strings.Split(v.shadow, " {")[0], " ", "_"), func(t *testing.T) {
			s.mustReload(t, route(engines, pool, "policy round_robin", "shadow "+v.shadow))
			before := s.scrape(t)
			s.inTurn(t, n)
			s.booksAtZero(t)
			after := s.scrape(t)
			for name, want := range map[string]float64{
				shadowTotal + ` agreed="true"`: v.agreed, shadowTotal + ` agreed="false"`: v.differed, shadowFaults: v.fault,
			} {
				series, agreed, _ := strings.Cut(name, " ")
				equal(t, after.value(series, label, agreed)-before.value(series, label, agreed), want, "count of %s", name)
			}
		})
	}
	s.differencesAreLogged(t, n/2)
}

// differencesAreLogged checks the debug lines of choices that differ.
func (s *server) differencesAreLogged(t *testing.T, want int) {
	t.Helper()
	data, err := os.ReadFile(s.log)
	noError(t, err)
	lines := 0
	for line := range strings.Lines(string(data)) {
		if !strings.Contains(line, `"shadow policy chose another worker"`) {
			continue
		}
		lines++
		var said struct {
			Target, Upstream string
			ShadowTarget     string   `json:"shadow_target"`
			ShadowUpstream   string   `json:"shadow_upstream"`
			Cost             *float64 `json:"cost"`
			ShadowCost       *float64 `json:"shadow_cost"`
		}
		noError(t, json.Unmarshal([]byte(line), &said))
		if said.Target == said.ShadowTarget || said.Upstream == "" || said.ShadowUpstream == said.Upstream || said.Cost == nil || said.ShadowCost == nil {
			t.Errorf("the line does not say both choices: %s", line)
		}
	}
	equal(t, lines, want, "lines about choices that differ")
}

// TestShadowIsAskedForChoicesOnly has requests that no policy chooses for: requests of
// bound sessions, and requests that are not inference requests.
func TestShadowIsAskedForChoicesOnly(t *testing.T) {
	engines := startEngines(t, 3, canned.Pace{})
	s := startCaddy(t, route(engines, "pool choices", "shadow least_load", "policy dynamo"), "metrics")
	before := s.scrape(t)
	for i := range 5 {
		s.mustChat(t, ask(fmt.Sprintf("turn %d", i)), "X-Session-Id", "one")
	}
	for range 3 {
		if status, _, err := s.get(t.Context(), s.url+"/v1/models"); status != 200 {
			t.Errorf("status %d, error %v", status, err)
		}
	}
	equal(t, s.scrape(t).value(shadowTotal, `pool="choices"`)-before.value(shadowTotal, `pool="choices"`), 1, "questions to the shadow: for the session's first turn only")
	s.booksAtZero(t)
}

// TestCrowdLeavesItsTarget has 40 concurrent requests with one session key and a policy without a
// price. The first few go home, and the others where the policy sends them.
func TestCrowdLeavesItsTarget(t *testing.T) {
	const n = 40
	h := startGated(t, 4, "policy least_load", maxRunning(n))
	for _, e := range h.engines {
		e.SetHandler(nil)
	}
	home := h.mustChat(t, ask("turn 1"), "X-Session-Id", "shared").engine()
	for i, e := range h.engines {
		h.gates[i] = hold(e)
	}
	all := h.startChats(t, n, "X-Session-Id", "shared")
	h.awaitRunning(t, n)
	for _, g := range h.gates {
		if most := g.most.Load(); most > 1.5*n/4 {
			t.Errorf("%v of %d requests are on one engine", most, n)
		}
	}
	h.finish(t, all...)
	if a := h.mustChat(t, ask("turn 2"), "X-Session-Id", "shared"); a.engine() != home {
		t.Errorf("the next turn is on %s, want %s", a.engine(), home)
	}
}

func init() { caddy.RegisterModule(new(warmest)) }

// warmest is a policy for canned engines, which take no longer for a long prompt than
// for a short one. It follows what they hold although that saves no time. So a
// request that goes elsewhere shows a prompt that was not recognized.
type warmest struct {
	// Besides is how many blocks of text all prompts have in common: these do not
	// count.
	Besides int `json:"besides"`
}

func (*warmest) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.kv_router.policies.warmest", New: func() caddy.Module { return new(warmest) }}
}

func (w *warmest) UnmarshalCaddyfile(d *caddyfile.Dispenser) (err error) {
	d.Next()
	if d.NextArg() {
		w.Besides, err = strconv.Atoi(d.Val())
	}
	return err
}

func (w *warmest) Choose(s *kvscore.Selection) int {
	var best []int
	most := -1
	for i := range s.Candidates {
		held := max(0, s.Candidates[i].HeldBlocks-w.Besides)
		if held > most {
			most, best = held, best[:0]
		}
		if held == most {
			best = append(best, i)
		}
	}
	return s.Pick(best)
}
