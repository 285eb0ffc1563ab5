package tests

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/canned"
)

// learnedPool and learnedWorker are what was learned, as the admin API shows it.
type learnedPool struct {
	Latency struct {
		Step    float64  `json:"step_ms"`
		Tokens  float64  `json:"per_1000_tokens_ms"`
		Timings int      `json:"timings"`
		Turns   *float64 `json:"expected_turns"`
		Answer  *float64 `json:"expected_answer_tokens"`
	} `json:"latency"`
}

type learnedSpeed struct {
	Slowness    *float64 `json:"slowness"`
	LastTiming  *float64 `json:"last_timing_seconds_ago"`
	Predictions int      `json:"ttft_predictions"`
	Median      *float64 `json:"ttft_error_median"`
	P90         *float64 `json:"ttft_error_p90"`
}

type learnedWorker struct {
	Latency *learnedSpeed `json:"latency"`
	Cache   struct {
		Capacity int64  `json:"capacity_tokens"`
		Reported *int64 `json:"capacity_reported_tokens"`
		Learned  bool   `json:"capacity_learned"`
	} `json:"cache"`
	Ranks []struct {
		Latency *learnedSpeed `json:"latency"`
	} `json:"dp_ranks"`
}

func (s *server) learned(t testing.TB, addr string) (p learnedPool, w learnedWorker) {
	t.Helper()
	s.api(t, http.MethodGet, defaultPool, nil, &p)
	s.api(t, http.MethodGet, defaultPool+"/workers/"+addr, nil, &w)
	return p, w
}

// TestWhatWasLearnedIsShown has two engines, then streams, then looks.
func TestWhatWasLearnedIsShown(t *testing.T) {
	engines := startTimed(t, 2, 1)
	s := startCaddy(t, simulated(engines, "policy round_robin"))
	metrics := []string{"caddy_kv_router_worker_slowness", "caddy_kv_router_worker_ttft_error_ratio"}
	p, w := s.learned(t, engines[0].Addr())
	if l := w.Latency; p.Latency.Timings != 0 || p.Latency.Answer != nil || p.Latency.Turns != nil || l == nil || l.Slowness != nil || l.LastTiming != nil || l.Median != nil || l.P90 != nil {
		t.Errorf("before the first request: %+v, %+v", p.Latency, w.Latency)
	}
	for _, name := range metrics {
		if _, there := s.scrape(t).sum(name, `worker="`+engines[0].Addr()+`"`); there {
			t.Errorf("there is a %s before the first request", name)
		}
	}
	for i := range 60 {
		s.mustChat(t, ask(fmt.Sprint(i, strings.Repeat(" some words", 20*(i%9)))).streamed())
	}
	s.booksAtZero(t)
	p, w = s.learned(t, engines[0].Addr())
	if l := p.Latency; l.Timings < 20 || l.Step <= 0 || l.Answer == nil || *l.Answer < 10 || l.Turns == nil {
		t.Errorf("the pool shows %+v", l)
	}
	if l := w.Latency; l == nil || l.Slowness == nil || *l.Slowness < 0.1 || *l.Slowness > 10 || l.LastTiming == nil || *l.LastTiming > 60 ||
		l.Predictions != 30 || l.Median == nil || l.P90 == nil || *l.P90 < *l.Median || len(w.Ranks) != 1 || w.Ranks[0].Latency == nil {
		t.Errorf("the worker shows %+v", l)
	}
	if w.Cache.Reported == nil || *w.Cache.Reported != 262144 || w.Cache.Learned {
		t.Errorf("the cache is %+v", w.Cache)
	}
	for _, name := range append(metrics, "caddy_kv_router_worker_capacity_tokens") {
		if _, there := s.scrape(t).sum(name, `worker="`+engines[0].Addr()+`"`, `dp_rank="0"`); !there {
			t.Errorf("there is no %s", name)
		}
	}
	if v := s.scrape(t).value("caddy_kv_router_prefill_cost_seconds", `pool="default"`, `per="1000_tokens"`); v*1e3 < 0.99*p.Latency.Tokens || v*1e3 > 1.01*p.Latency.Tokens {
		t.Errorf("1000 tokens cost %v s in the metrics, %v ms in the admin API", v, p.Latency.Tokens)
	}
}

// TestZeroCachedTokensAreTold has engines that report other counts of cached tokens
// than predicted: 0 is one, and nothing is none.
func TestZeroCachedTokensAreTold(t *testing.T) {
	ids := strings.TrimSuffix(strings.Repeat("7,", 2000), ",")
	prompts := map[string]string{
		"Tokens": `{"model":"m","prompt":[` + ids + `]}`,
		"Text":   `{"model":"m","prompt":"` + strings.Repeat("some words of a prompt ", 400) + `"}`,
	}
	for _, v := range []struct {
		usage   string
		learned bool
	}{
		{`{"prompt_tokens":2000,"completion_tokens":3}`, false},
		{`{"prompt_tokens":2000,"completion_tokens":3,"prompt_tokens_details":null}`, false},
		{`{"prompt_tokens":2000,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":0}}`, true},
	} {
		for name, prompt := range prompts {
			t.Run(fmt.Sprintf("%s/Learned=%v", name, v.learned), func(t *testing.T) {
				engines := startEngines(t, 1, canned.Pace{})
				s := startCaddy(t, route(engines))
				engines[0].SetHandler(usageAnswer(v.usage))
				for range 2 {
					if a := s.post(t.Context(), "/v1/completions", []byte(prompt)); !a.ok() {
						t.Fatalf("status %d, error %v, body %.200q", a.status, a.err, a.body)
					}
				}
				eventually(t, 5*time.Second, "the answers' end", func() bool { return s.pool(t).Leases == 0 })
				if _, w := s.learned(t, engines[0].Addr()); w.Cache.Learned != v.learned || w.Cache.Reported != nil || w.Cache.Learned == (w.Cache.Capacity == 262144) {
					t.Errorf("usage %s: the cache is %+v", v.usage, w.Cache)
				}
			})
		}
	}
}
