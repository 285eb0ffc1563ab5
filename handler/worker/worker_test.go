package worker

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/handler/engine"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
)

// TestEventsAreDoubted has an engine report other cached tokens than its KV events say.
func TestEventsAreDoubted(t *testing.T) {
	for _, c := range []struct {
		name                string
		predicted, reported int64
		prompts, reports    int
		doubted             bool
	}{
		{"as predicted", 5000, 4900, 100, 100, false},
		{"far less, again and again", 5000, 0, 100, manyMissed, true},
		{"far less, not often enough", 5000, 0, 100, manyMissed - 1, false},
		{"far less of few prompts", 5000, 0, manyMissed - 1, 100, false},
		{"cached, and no event says so", 0, 640, 100, manyUnmatched, true},
		{"not often enough", 0, 640, 100, manyUnmatched - 1, false},
	} {
		w := New("test", Settings{Dial: "a:1"})
		for i := range c.reports {
			w.Verify(&Prediction{Prompt: uint64(i % c.prompts), Tokens: c.predicted, Knowledge: kvscore.Exact}, c.reported, 16)
		}
		if got := w.DoubtsEvents(); got != c.doubted {
			t.Errorf("%s: doubted is %v, want %v", c.name, got, c.doubted)
		}
		w.Restarted()
		if w.DoubtsEvents() {
			t.Errorf("%s: doubted after a restart", c.name)
		}
	}
}

// TestReportsAreOfTheirKind has one kind of answer report what was cached.
func TestReportsAreOfTheirKind(t *testing.T) {
	w := New("test", Settings{Dial: "a:1", Engine: EngineAuto})
	w.Learn(engine.Info{Type: engine.SGLang})
	plain, stream := ReportKind{"chat", false}, ReportKind{"chat", true}
	if w.CachedTokens(plain, -1) != -1 {
		t.Error("something is said to be reported before it was")
	}
	if w.CachedTokens(plain, 7) != 7 || w.CachedTokens(plain, -1) != 0 || w.CachedTokens(stream, -1) != -1 ||
		w.CachedTokens(ReportKind{"messages", false}, -1) != -1 {
		t.Error("what one kind reports is said of others, or not of itself")
	}
	if w.Restarted(); w.CachedTokens(plain, -1) != -1 {
		t.Error("what another life reported counts")
	}
}

// TestOthersLeaveSlots has other routers report requests, more than there can be.
func TestOthersLeaveSlots(t *testing.T) {
	for _, v := range []struct{ limit, others, want int64 }{
		{32, 0, 32}, {32, 20, 12}, {32, 28, 4}, {32, 300, 4}, {10, 300, 2}, {9, 300, 1}, {2, 300, 1}, {1, 300, 0}, {1, 0, 1},
	} {
		s, took := new(slots), int64(0)
		s.limit.Store(v.limit)
		s.others.Store(v.others)
		if got := s.FreeSlots(); got != v.want {
			t.Errorf("%+v: room for %d", v, got)
		}
		for s.TakeSlot() {
			took++
		}
		if took != v.want || s.FreeSlots() > 0 {
			t.Errorf("%+v: %d are taken, room for %d", v, took, s.FreeSlots())
		}
	}
}

func TestRequestLimitInJSON(t *testing.T) {
	for text, want := range map[string]RequestLimit{`0`: 0, `64`: 64, `"auto"`: LimitAuto} {
		var l RequestLimit
		err := json.Unmarshal([]byte(text), &l)
		if b, _ := json.Marshal(l); err != nil || l != want || string(b) != text {
			t.Errorf("%s is read as %v and written as %s, error %v", text, l, b, err)
		}
	}
	for _, text := range []string{`-1`, `-5`, `1.5`, `"64"`, `"all"`, `true`, `[]`} {
		var l RequestLimit
		if err := json.Unmarshal([]byte(text), &l); err == nil || !strings.Contains(err.Error(), "max_running: must be") || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: error %v", text, err)
		}
	}
}

// TestLoadFactor shows what it costs to send a request to a worker that loads models on demand.
func TestLoadFactor(t *testing.T) {
	of := func(entries ...ModelEntry) *ModelList { return &ModelList{Entries: entries} }
	x, y := ModelEntry{ID: "x"}, ModelEntry{ID: "y"}
	for name, v := range map[string]struct {
		kind string
		list *ModelList
		last string
		want float64
	}{
		"nothing loaded":           {"other", of(x, y), "", mustLoad},
		"the model loaded":         {"other", of(x, y), "x", 1},
		"another model loaded":     {"other", of(x, y), "y", mustSwap},
		"listed as loaded":         {"llamacpp", of(ModelEntry{ID: "x", Loaded: true}, y), "", 1},
		"another listed as loaded": {"llamacpp", of(x, ModelEntry{ID: "y", Loaded: true}), "", mustSwap},
		"one model":                {"other", of(x), "", 1},
		"a model and an adapter":   {"other", of(x, ModelEntry{ID: "y", Adapter: true}), "", 1},
		"names of one model":       {"vllm", of(x, y), "", 1},
		"no list":                  {"other", nil, "", 1},
	} {
		w := New("test", Settings{Dial: "a:1", Engine: v.kind})
		w.SetList(v.list)
		if v.last != "" {
			w.Requested(v.last)
		}
		if got := w.LoadFactor("x"); got != v.want {
			t.Errorf("%s: %v, want %v", name, got, v.want)
		}
	}
}

// TestRestartsThatAreTold has an engine restart again and again, and then several engines answer at its
// address.
func TestRestartsThatAreTold(t *testing.T) {
	w, life := new(probing), ""
	for i, c := range []struct {
		life              string
		restarted, shared bool
	}{
		{"", false, false},
		{"a", false, false},
		{"a", false, false},
		{"b", true, false},
		{"c", true, false},
		{"a", true, true},
		{"d", true, false},
		{"c", true, true},
	} {
		restarted, shared := w.StartChanged(life, c.life)
		if life = c.life; restarted != c.restarted || shared != c.shared {
			t.Errorf("%d: after %q restarted: %v, shared: %v, want %+v", i, c.life, restarted, shared, c)
		}
	}
	for i := range 100 {
		w.StartChanged(fmt.Sprint(i), fmt.Sprint(i+1))
	}
	if len(w.starts) != keptStarts {
		t.Errorf("%d starts are kept, want %d", len(w.starts), keptStarts)
	}
}

// TestTheSilentAreAskedLessAndLess asks as often as the engine is due in a day.
func TestTheSilentAreAskedLessAndLess(t *testing.T) {
	w := new(probing)
	asked := 0
	for t := time.Unix(1e9, 0); t.Before(time.Unix(1e9+86400, 0)); t = t.Add(ProbeEvery) {
		if w.ClaimDetection(t) {
			asked++
			w.Detected(t, false)
		}
	}
	if most := int(24*time.Hour/AskedLess) + 10; asked > most || asked < most/2 {
		t.Errorf("asked %d times in a day, want up to %d", asked, most)
	}
}
