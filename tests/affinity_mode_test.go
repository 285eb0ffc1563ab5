package tests

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// boundSession is a session about a document of 2,000 tokens, and the engines of its pool.
type boundSession struct {
	*server
	engines []*engine.Engine
	chat    chat
	rng     *rand.Rand
	header  []string
}

// affinity is the block that sets a mode.
func affinity(mode string) string { return "affinity {\nmode " + mode + "\n}" }

// ofEngines returns the directive for the engines, with further lines of its block. Worker
// i is e{i}.
func ofEngines(engines []*engine.Engine, block ...string) string {
	return route(engines, append(block, numbered(engines), "trust pins", "response_headers X-KV-")...)
}

func startBound(t *testing.T, n, ranks int, block ...string) *boundSession {
	t.Helper()
	cfg := engine.Config{Model: "canned", AnswerTokens: 24, Speed: 4, Ranks: ranks, Blocks: 32768} // room for all prompts of a test
	h := &boundSession{engines: startFleet(t, n, cfg), rng: rand.New(rand.NewPCG(14, 14)), header: []string{"X-Session-Id", "s"}}
	h.server = startCaddy(t, ofEngines(h.engines, block...))
	for _, e := range h.engines {
		h.awaitRanks(t, e.Addr(), ranks)
	}
	h.chat = ask(prose(h.rng, 8000, 8000)).streamed()
	return h
}

// turn makes the session's next turn. It returns the engine and the rank that served it,
// and the reason.
func (h *boundSession) turn(t *testing.T) (at, reason string) {
	t.Helper()
	a := h.mustChat(t, h.chat, h.header...)
	h.chat.Messages = append(h.chat.Messages, message{"assistant", a.text}, message{"user", prose(h.rng, 100, 200)})
	return a.engine() + "/" + a.header.Get("X-KV-Dp-Rank"), a.header.Get("X-KV-Reason")
}

// wantTurn checks where the next turn is served.
func (h *boundSession) wantTurn(t *testing.T, what, at, reason string) {
	t.Helper()
	if got, why := h.turn(t); got != at || why != reason {
		t.Errorf("%s: served by %s, reason %q; want %s, %q", what, got, why, at, reason)
	}
}

// busy gives an engine's rank a prompt of 80,000 tokens, which takes some seconds. It
// returns a function that waits for the end.
func (h *boundSession) busy(t *testing.T, at string) (wait func()) {
	t.Helper()
	var e, rank int
	if _, err := fmt.Sscanf(at, "e%d/%d", &e, &rank); err != nil {
		t.Fatal(err)
	}
	c := ask(prose(h.rng, 320_000, 320_000)).streamed()
	c.Nvext = fmt.Appendf(nil, `{"backend_instance_id":%d,"dp_rank":%d}`, e, rank)
	long := func(r engine.Record) bool { return r.Outcome == engine.Running && r.BodyBytes > 320_000 } // and no probe after a reload
	q := h.start(t, "/v1/chat/completions", string(c.body()))
	eventually(t, "the engine to be busy", func() bool { return slices.ContainsFunc(h.engines[e-1].Journal(), long) })
	return func() {
		t.Helper()
		if a := q.wait(t); !a.ok() {
			t.Fatalf("status %d, error %v, body %.300q", a.status, a.err, a.body)
		}
	}
}

// bound returns where the session is bound, empty if it is not.
func (h *boundSession) bound(t *testing.T) string {
	t.Helper()
	status, _ := h.api(t, http.MethodGet, defaultPool+"/sessions/s?model=canned", nil, nil)
	if status != http.StatusOK {
		return ""
	}
	var b struct {
		Worker int `json:"worker"`
		Rank   int `json:"dp_rank"`
	}
	h.api(t, http.MethodGet, defaultPool+"/sessions/s?model=canned", nil, &b)
	return fmt.Sprintf("e%d/%d", b.Worker, b.Rank)
}

// TestSessionStaysWhileThatIsWorthIt has a session on idle workers. Then its worker is
// busy for one turn. It uses several engines, and several ranks of one engine.
func TestSessionStaysWhileThatIsWorthIt(t *testing.T) {
	for _, v := range []struct{ engines, ranks int }{{3, 1}, {1, 2}} {
		t.Run(fmt.Sprintf("Engines=%d/Ranks=%d", v.engines, v.ranks), func(t *testing.T) {
			h := startBound(t, v.engines, v.ranks)
			bound, _ := h.turn(t)
			for range 4 {
				h.wantTurn(t, "on idle workers", bound, "session")
			}
			wait := h.busy(t, bound)
			x := h.explainBound(t)
			if !x.BoundTarget.Candidate || !x.BoundTarget.Holds || !x.BoundTarget.Stays || x.BoundTarget.Leave == nil || *x.BoundTarget.Leave <= 0 || x.Unit != "ms" {
				t.Errorf("explained %+v", x)
			}
			elsewhere, reason := h.turn(t)
			if elsewhere == bound || reason != "load" {
				t.Errorf("while its worker is busy: served by %s, reason %q", elsewhere, reason)
			}
			equal(t, h.bound(t), bound, "bound after a turn elsewhere")
			wait()
			wait = h.busy(t, elsewhere) // which has cached one turn more
			h.wantTurn(t, "afterwards", bound, "session")
			wait()
			h.booksAtZero(t)
		})
	}
}

// explainedBound is the part of an explanation about the session's worker.
type explainedBound struct {
	Unit        string `json:"cost_unit"`
	BoundTarget struct {
		Candidate bool     `json:"is_candidate"`
		Holds     bool     `json:"holds_prompt"`
		Leave     *float64 `json:"leave_ms"`
		Stays     bool     `json:"session_stays"`
	} `json:"home"`
	Candidates []struct {
		TTFT  *float64           `json:"predicted_ttft_ms"`
		Cost  float64            `json:"cost"`
		Terms map[string]float64 `json:"terms_ms"`
	} `json:"candidates"`
}

func (h *boundSession) explainBound(t *testing.T) (x explainedBound) {
	t.Helper()
	h.api(t, http.MethodPost, defaultPool+"/explain?path=/v1/chat/completions", h.chat.body(), &x, h.header...)
	for _, c := range x.Candidates {
		sum := 0.0
		for _, ms := range c.Terms {
			sum += ms
		}
		if len(c.Terms) != 7 || sum < 0.999*c.Cost || sum > 1.001*c.Cost || c.TTFT == nil || *c.TTFT <= 0 {
			t.Errorf("candidate %+v: its terms add up to %v", c, sum)
		}
	}
	return x
}

// again starts a killed engine, and waits until its worker gets requests.
func (h *boundSession) again(t *testing.T, e *engine.Engine) {
	t.Helper()
	revive(t, e)
	eventually(t, "the worker to get requests again", func() bool {
		return len(h.explainBound(t).Candidates) == len(h.engines)
	})
}

// TestSessionLeavesATargetThatForgot serves one turn elsewhere and restarts the session's
// worker. Then only the other worker holds the conversation.
func TestSessionLeavesATargetThatForgot(t *testing.T) {
	h := startBound(t, 2, 1)
	h.chat = ask(prose(h.rng, 64_000, 64_000)).streamed() // worth a move by far, whatever speeds the router has learned
	bound, _ := h.turn(t)
	wait := h.busy(t, bound)
	elsewhere, _ := h.turn(t)
	wait()
	if b := h.bound(t); elsewhere == bound || b != bound {
		t.Fatalf("served by %s, bound to %s, want %s", elsewhere, b, bound)
	}
	e := h.engines[bound[1]-'1']
	e.Kill()
	eventually(t, "its cache to be missed", func() bool {
		return h.scrape(t).value(mirrorCleared, `worker="`+e.Addr()+`"`) > 0
	})
	h.again(t, e)
	if x := h.explainBound(t); !x.BoundTarget.Candidate || x.BoundTarget.Holds || x.BoundTarget.Stays {
		t.Errorf("explained %+v", x.BoundTarget)
	}
	h.wantTurn(t, "its worker has lost its cache", elsewhere, "overlap")
	if b := h.bound(t); b != elsewhere {
		t.Errorf("bound to %s, want %s", b, elsewhere)
	}
	h.wantTurn(t, "then", elsewhere, "session")
}

// TestAffinityModes changes the mode by reloads. The binding survives, and each mode
// applies to it.
func TestAffinityModes(t *testing.T) {
	h := startBound(t, 2, 1)
	bound, _ := h.turn(t)
	reload := func(mode string) {
		t.Helper()
		h.mustReload(t, ofEngines(h.engines, affinity(mode)))
	}

	reload("hard")
	wait := h.busy(t, bound)
	h.wantTurn(t, "hard, its worker is busy", bound, "session")
	wait()

	reload("off")
	wait = h.busy(t, bound)
	_, x := h.api(t, http.MethodPost, defaultPool+"/explain?path=/v1/chat/completions", h.chat.body(), nil, h.header...)
	off, reason := h.turn(t)
	if off == bound || reason == "session" {
		t.Errorf("off, the worker that it was bound to is busy: served by %s, reason %q; explained before: %s", off, reason, x)
	}
	wait()
	h.header[1] = "another"
	h.turn(t)
	h.header[1] = "s"
	equal(t, h.scrape(t).value(sessions), 1, "off: sessions, with the one from before")

	reload("soft")
	equal(t, h.bound(t), bound, "bound worker")
	h.turn(t) // where more of it is
	bound = h.bound(t)
	wait = h.busy(t, bound)
	if elsewhere, _ := h.turn(t); elsewhere == bound {
		t.Error("soft: it waits for its busy worker")
	}
	equal(t, h.bound(t), bound, "soft: bound after a turn elsewhere")
	wait()
	h.booksAtZero(t)
}

// TestOperatorsBindingHolds binds a session to another worker by hand.
func TestOperatorsBindingHolds(t *testing.T) {
	h := startBound(t, 2, 1)
	bound, _ := h.turn(t)
	other := map[string]string{"e1/0": "e2/0", "e2/0": "e1/0"}[bound]
	h.api(t, http.MethodPut, defaultPool+"/sessions/s?model=canned&worker="+h.engines[other[1]-'1'].Addr(), nil, nil)
	for range 3 {
		h.wantTurn(t, "bound by hand", other, "session")
	}
	h.engines[other[1]-'1'].Kill()
	h.turn(t)
	equal(t, h.bound(t), other, "bound while its worker is down")
	left := h.engines[bound[1]-'1']
	h.mustReload(t, route([]*engine.Engine{left}, fmt.Sprintf("worker %s {\nid %c\n}", left.Addr(), bound[1])))
	h.turn(t)
	if b := h.bound(t); b == other {
		t.Errorf("bound to %s, which is no upstream any more", b)
	}
}

// TestSessionsOfEnginesNeverLeave has engine-backed sessions. They stay with their engine
// in every mode.
func TestSessionsOfEnginesNeverLeave(t *testing.T) {
	for _, mode := range []string{"soft", "off"} {
		t.Run(mode, func(t *testing.T) {
			h := startBound(t, 2, 1, affinity(mode))
			h.header = nil
			h.chat.Nvext = []byte(`{"session_params":{"id":"s"}}`)
			bound, _ := h.turn(t)
			wait := h.busy(t, bound)
			h.wantTurn(t, "its worker is busy", bound, "session")
			wait()
		})
	}
}
