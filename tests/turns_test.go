package tests

import (
	"net/http"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/tests/canned"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

func init() {
	caddy.RegisterModule(new(slowTurns))
	caddy.RegisterModule(sorting{})
}

// slowTurns is round_robin, and lets other requests run while it chooses.
type slowTurns struct{ turns kvscore.RoundRobin }

func (*slowTurns) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.kv_router.policies.slow_turns", New: func() caddy.Module { return new(slowTurns) }}
}

func (*slowTurns) UnmarshalCaddyfile(d *caddyfile.Dispenser) error { d.Next(); return nil }

func (p *slowTurns) Choose(s *kvscore.Selection) int {
	i := p.turns.Choose(s)
	for range 1000 {
		runtime.Gosched()
	}
	return i
}

// sorting is a policy that sorts the candidates that it is given.
type sorting struct{}

func (sorting) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.kv_router.policies.sorting", New: func() caddy.Module { return new(sorting) }}
}

func (sorting) UnmarshalCaddyfile(d *caddyfile.Dispenser) error { d.Next(); return nil }

func (sorting) Choose(s *kvscore.Selection) int {
	slices.Reverse(s.Candidates)
	return 0
}

// TestSimultaneousRequestsTakeTurns sends 50 pairs of requests to two engines. Each
// request of a pair uses one turn, so both engines serve.
func TestSimultaneousRequestsTakeTurns(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	for _, policy := range []string{"round_robin", "slow_turns"} {
		s := startCaddy(t, route(engines, "policy "+policy))
		s.mustChat(t, ask("hello")) // what the first request waits for is over
		s.mustChat(t, ask("hello"))
		spread := 0
		for range 50 {
			var served [2]string
			var both sync.WaitGroup
			start := make(chan struct{})
			for i := range served {
				both.Go(func() {
					<-start
					served[i] = s.chat(t.Context(), ask("hello")).engine()
				})
			}
			close(start)
			both.Wait()
			if served[0] != "" && served[1] != "" && served[0] != served[1] {
				spread++
			}
		}
		if spread != 50 {
			t.Errorf("%s: %d of 50 pairs are spread", policy, spread)
		}
		s.booksAtZero(t)
	}
}

// TestPolicyThatSortsIsRefused has a policy that reorders its candidates, so that its
// choice names another worker. The least loaded worker serves, and the log says so.
func TestPolicyThatSortsIsRefused(t *testing.T) {
	const faults, pool = "caddy_kv_router_policy_faults_total", `pool="sorting"`
	engines := startEngines(t, 3, canned.Pace{FirstToken: time.Second})
	s := startCaddy(t, route(engines, "pool sorting", "policy sorting"), "metrics")
	var all sync.WaitGroup
	for range 6 {
		all.Go(func() { s.chat(t.Context(), ask("hello")) })
	}
	all.Wait()
	if counts, _ := spread(engines); counts[0] != 2 || counts[1] != 2 || counts[2] != 2 {
		t.Errorf("requests %v: the load is not even", counts)
	}
	m := s.scrape(t)
	if n := m.value(faults, pool); n != 6 {
		t.Errorf("%v faults are counted, want 6", n)
	}
	if _, found := m.sum("caddy_kv_router_incidents", pool, `condition="the policy returns invalid workers, and the router takes the least loaded one"`); !found {
		t.Error("nobody is told")
	}
	s.booksAtZero(t)
}

// TestUnknownLoadIsExplained explains a request with an upstream that the router has never
// seen, beside a known one.
func TestUnknownLoadIsExplained(t *testing.T) {
	engines := startEngines(t, 2, canned.Pace{})
	s := startCaddy(t, "kv_router {\nreverse_proxy "+engines[0].Addr()+" {header.X-Up}\n}")
	s.mustChat(t, ask("hello"), "X-Up", engines[0].Addr())
	var x struct {
		Candidates []struct {
			Dial    string `json:"dial"`
			Unknown bool   `json:"load_unknown"`
		} `json:"candidates"`
	}
	s.api(t, http.MethodPost, defaultPool+"/explain?path=/v1/chat/completions", ask("hello").body(), &x, "X-Up", engines[1].Addr())
	if len(x.Candidates) != 2 {
		t.Fatalf("candidates %+v", x.Candidates)
	}
	for _, c := range x.Candidates {
		if want := c.Dial == engines[1].Addr(); c.Unknown != want {
			t.Errorf("%s: load unknown is %v, want %v", c.Dial, c.Unknown, want)
		}
	}
}
