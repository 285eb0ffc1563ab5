package tests

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// TestAttemptsCountOnce has engines fail in several ways. A worker has as many outcomes as its engine
// has had requests.
func TestAttemptsCountOnce(t *testing.T) {
	type setup = func(*canned.Engine)
	well := func(*canned.Engine) {}
	answers := func(status int) setup {
		return func(e *canned.Engine) { e.SetFault(canned.Fault{Kind: canned.Status, Status: status}) }
	}
	fails := func(k canned.Kind) setup {
		return func(e *canned.Engine) { e.SetFault(canned.Fault{Kind: k}) }
	}
	breaks := func(e *canned.Engine) { e.SetHandler(cut(nil, ": ping\n\n"+oneRole)) }
	for name, v := range map[string]struct {
		engines []setup
		outcome string // one of those that count
		leaves  bool   // the client does
	}{
		"retries":        {[]setup{answers(503), answers(429), well}, "retried", false},
		"held answer":    {[]setup{answers(503), fails(canned.ResetAfterRead)}, "unavailable", false},
		"client's error": {[]setup{answers(400), answers(400)}, "client_error", false},
		"engine's error": {[]setup{answers(500), answers(500)}, "engine_error", false},
		"rest":           {[]setup{breaks, answers(500), well}, "resumed", false},
		"no rest":        {[]setup{breaks, answers(500)}, "broken", false},
		"client leaves":  {[]setup{answers(503), fails(canned.HangBeforeHeader)}, "client_gone", true},
	} {
		t.Run(name, func(t *testing.T) {
			engines := startEngines(t, len(v.engines), canned.Pace{})
			s := startCaddy(t, route(engines, "pool once", "policy round_robin"))
			for i, set := range v.engines {
				set(engines[i])
			}
			before := s.scrape(t)
			for range 6 {
				ctx, cancel := context.WithCancel(t.Context())
				if v.leaves {
					time.AfterFunc(200*time.Millisecond, cancel)
				}
				s.post(ctx, "/v1/chat/completions", storyBody(true, "hi", ""))
				cancel()
			}
			s.booksAtZero(t)
			var want []figure
			for _, e := range engines {
				want = append(want, figure{workerOutcomes, []string{`worker="` + e.Addr() + `"`}, float64(e.Requests())})
			}
			s.wantFigures(t, before, want)
			of := `outcome="` + v.outcome + `"`
			if m := s.scrape(t); m.value(workerOutcomes, of) == before.value(workerOutcomes, of) {
				t.Errorf("no attempt is %s", v.outcome)
			}
		})
	}
}

// TestFailedPhasesCountOnce has a prefill engine that fails, and streams whose decode engine does not get
// the prompt. No decode worker is blamed.
func TestFailedPhasesCountOnce(t *testing.T) {
	for _, f := range []engine.Flavour{engine.VLLM, engine.SGLang} { // one phase after the other, and both at once
		t.Run(string(f), func(t *testing.T) {
			p := startApart(t, f, 2, 2, "split always")
			// talk returns how many requests had two workers.
			talk := func(enough func() bool) (split float64) {
				for i := 0; i < 6 || i < 100 && !enough(); i++ {
					c := long(i)
					c.Stream = true
					a := p.chat(t.Context(), c)
					if !a.ok() {
						t.Errorf("request %d: %v", i, a.err)
					}
					if a.wasSplit() {
						split++
					}
				}
				p.settled(t)
				return split
			}
			of := func(e *engine.Engine, outcome ...string) float64 {
				labels := []string{`worker="` + e.Addr() + `"`}
				if outcome != nil {
					labels = append(labels, `outcome="`+outcome[0]+`"`)
				}
				return p.scrape(t).value(workerOutcomes, labels...)
			}
			bad, good := p.prefill[0], p.prefill[1]
			all, prefilled := of(bad), of(good, "prefilled")
			bad.SetFault(engine.Fault{Kind: engine.Status, Status: http.StatusInternalServerError}) //nolint:errcheck // it is valid
			split := talk(func() bool { return of(bad) > all })
			if n, retried := of(bad)-all, of(bad, "retried"); n == 0 || n != retried {
				t.Errorf("the bad worker failed %v of %v attempts", retried, n)
			}
			if n := of(good, "prefilled") - prefilled; n != split {
				t.Errorf("the other one has %v prefills of %v requests", n, split)
			}
			bad.SetFault(engine.Fault{})                                  //nolint:errcheck // it is valid
			p.decode[0].SetFault(engine.Fault{Kind: engine.FailTransfer}) //nolint:errcheck // it is valid
			talk(func() bool { return true })
			for i, e := range p.decode {
				if n, ok := of(e), of(e, "ok"); n != ok {
					t.Errorf("decode worker %d failed %v attempts", i, n-ok)
				}
			}
		})
	}
}
