package tests

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// limited is what the admin API says of a worker's limit.
type limited struct {
	Engine struct {
		Type     string
		Warnings []struct{ What, Effect, Advice string }
	}
	Load struct {
		Max  *int   `json:"max_running_requests"`
		From string `json:"max_running_from"`
	}
}

func (s *server) limited(t testing.TB, dial string) (w limited) {
	t.Helper()
	s.api(t, http.MethodGet, defaultPool+"/workers/"+dial, nil, &w)
	return w
}

// TestMaxRunningAutoIsWhatEnginesReport has one engine of each kind, and one whose
// operator sets the limit.
func TestMaxRunningAutoIsWhatEnginesReport(t *testing.T) {
	const warning = "max_running is auto, and the engine reports no limit"
	flavours := []engine.Flavour{engine.SGLang, engine.OldSGLang, engine.LlamaCpp, engine.VLLM, engine.TRTLLM, engine.SGLang}
	var engines []*engine.Engine
	for i, f := range flavours {
		cfg := engine.Config{Flavour: f, Blocks: 300, MaxModelLen: 4096, MaxRunning: 4}
		if i == 0 {
			cfg.Ranks = 2
		}
		engines = append(engines, startSimulated(t, cfg))
	}
	s := startCaddy(t, simulated(engines, "pool default", "worker * {\nmax_running auto\n}", "worker "+engines[5].Addr()+" {\nmax_running 3\n}"))
	for i, want := range []struct {
		limit int
		from  string
		flag  string
	}{{8, "found", ""}, {4, "found", ""}, {4, "found", ""}, {0, "unknown", "--max-num-seqs"}, {0, "unknown", "--max_batch_size"}, {3, "configured", ""}} {
		dial := engines[i].Addr()
		eventually(t, 10*time.Second, string(flavours[i])+" to be found out", func() bool { return s.limited(t, dial).Engine.Type != "" })
		w := s.limited(t, dial)
		limit := 0
		if w.Load.Max != nil {
			limit = *w.Load.Max
		}
		if limit != want.limit || w.Load.From != want.from {
			t.Errorf("%s: limit %d from %q, want %d from %q", flavours[i], limit, w.Load.From, want.limit, want.from)
		}
		warned := len(w.Engine.Warnings) == 1 && w.Engine.Warnings[0].What == warning && strings.Contains(w.Engine.Warnings[0].Advice, want.flag)
		if warned != (want.flag != "") || len(w.Engine.Warnings) > 1 {
			t.Errorf("%s: warnings %+v", flavours[i], w.Engine.Warnings)
		}
		if n := s.scrape(t).value(engineWarnings, `worker="`+dial+`"`); n != float64(len(w.Engine.Warnings)) {
			t.Errorf("%s: %s is %v", flavours[i], engineWarnings, n)
		}
	}
	eventually(t, 5*time.Second, "two lines in the log", func() bool { return len(s.conditions(t, warning)) >= 2 })
	for _, l := range s.conditions(t, warning) {
		if l.Level != "warn" || l.Upstream != engines[3].Addr() && l.Upstream != engines[4].Addr() || l.Effect == "" || l.Advice == "" {
			t.Errorf("the log says %+v", l)
		}
	}
	if n := len(s.conditions(t, warning)); n != 2 {
		t.Errorf("%d warnings, want 2", n)
	}
}

// TestMaxRunningAutoBoundsTheEngine has more requests than the engine runs at a time. They
// wait in the queue, not in the engine.
func TestMaxRunningAutoBoundsTheEngine(t *testing.T) {
	g := &gate{name: "e", let: make(chan int)}
	tells := fakeSGLang(`"version":"0.5.19","page_size":16,"dp_size":1,"max_running_requests":2`)
	f := startFake(t, func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodPost {
			return tells(w, r)
		}
		g.serve(w, r)
		return true
	})
	s := startCaddy(t, "kv_router "+f.addr()+" {\nworker * {\nmax_running auto\n}\n}")
	eventually(t, 10*time.Second, "the engine to be found out", func() bool { return s.limited(t, f.addr()).Load.Max != nil })
	var under []asked
	for range 5 {
		under = append(under, s.startChat(t, "hello"))
	}
	s.wantWaiting(t, 3)
	if n := g.running.Load(); n != 2 {
		t.Errorf("%d requests run, want 2", n)
	}
	g.opened(t)
	for _, q := range under {
		if a := q.wait(t); !a.ok() {
			t.Errorf("status %d, error %v", a.status, a.err)
		}
	}
	s.slotsFree(t)
}
