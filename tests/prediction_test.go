package tests

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
	"github.com/caddy-kvrouter/kvrouter/tests/prediction"
)

// startPredicted starts two simulated engines and a router before them, which
// knows their block size.
func startPredicted(t *testing.T, cfg engine.Config) *prediction.Run {
	t.Helper()
	cfg.Words, cfg.Speed, cfg.AnswerTokens = true, 100, 60 // some answers are cut before
	var engines []*engine.Engine
	for range 2 {
		e, err := engine.Start(cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Close)
		engines = append(engines, e)
	}
	s := startCaddy(t, simulated(engines, prediction.Directive))
	s.mustChat(t, simChat("hello"))
	for _, e := range engines {
		eventually(t, 10*time.Second, "the engine to be found out", func() bool { return s.told(t, e).Engine.Type != "" })
	}
	return &prediction.Run{URL: s.url, Engine: engines[0].URL(), Model: "sim-8b", Clients: 8, Block: max(cfg.BlockSize, 1)}
}

// predict holds conversations, one list after the other, and returns the figures
// for each case and API, and those for all.
func predict(t *testing.T, r *prediction.Run, tolerance int, plans ...[]prediction.Plan) (rows []prediction.Row, all prediction.Row) {
	t.Helper()
	var turns []prediction.Turn
	for _, p := range plans {
		more, err := r.Converse(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		turns = append(turns, more...)
	}
	rows = prediction.Summarize(turns, tolerance)
	var b strings.Builder
	if err := prediction.Print(&b, rows); err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%s", b.String())
	return rows, rows[len(rows)-1]
}

// TestPredictionIsWithinABlock has conversations with 2 to 6 bytes a token, which
// differs between and within them.
func TestPredictionIsWithinABlock(t *testing.T) {
	shape := prediction.Shape{Conversations: 18, Turns: 6, MinText: 300, MaxText: 4000, Seed: 1}
	for _, c := range []struct {
		name      string
		cfg       engine.Config
		tolerance int
	}{
		{"vLLM16", engine.Config{BlockSize: 16}, 16},
		{"vLLM32", engine.Config{BlockSize: 32, Blocks: 8192}, 32},
		// The router counts in blocks of its own: of one token each there would be
		// too many.
		{"SGLang1", engine.Config{Flavour: engine.SGLang, BlockSize: 1, Blocks: 262144}, 16},
	} {
		t.Run(c.name, func(t *testing.T) {
			rows, all := predict(t, startPredicted(t, c.cfg), c.tolerance, shape.Own("own"))
			for _, r := range rows {
				if r.WithinBlock < 0.95 {
					t.Errorf("%s: %.1f %% of later turns are within a block, want 95 %%", r.API, 100*r.WithinBlock)
				}
			}
			if all.WithinTenth < 0.99 {
				t.Errorf("%.1f %% of all turns are within a tenth of the prompt, want 99 %%", 100*all.WithinTenth)
			}
		})
	}
}

// TestPredictionOfSharedAndEditedPrompts has prompts of which an engine holds less
// than the turn before, or what another conversation has left.
func TestPredictionOfSharedAndEditedPrompts(t *testing.T) {
	shape := prediction.Shape{Conversations: 8, Turns: 5, MinText: 300, MaxText: 3000, Seed: 2}
	r := startPredicted(t, engine.Config{BlockSize: 16, Blocks: 32768})
	first, others := shape.Shared("shared", 4)
	for i := range first {
		first[i].Case = "first to share"
	}
	rows, _ := predict(t, r, 16, first, others, shape.Edited("edited"), shape.Parallel("parallel"))
	share, turns := map[string]float64{}, map[string]float64{}
	for _, row := range rows {
		share[row.Case] += row.WithinTenth * float64(row.Turns)
		turns[row.Case] += float64(row.Turns)
	}
	for name, n := range turns {
		want := 0.99
		if name == "parallel" || name == "all" { // which of two requests at the same time comes first is not known
			want = 0.9
		}
		if got := share[name] / n; got < want {
			t.Errorf("%s: %.1f %% of turns are within a tenth of the prompt, want %.0f %%", name, 100*got, 100*want)
		}
	}
}

// TestPredictionLeavesOutReasoning has chats of which no later prompt has the
// reasoning, so that the engine's cache ends where the prompt before ended.
func TestPredictionLeavesOutReasoning(t *testing.T) {
	shape := prediction.Shape{Conversations: 24, Turns: 5, MinText: 300, MaxText: 3000, Seed: 3}
	plans := slices.DeleteFunc(shape.Own("reasoning"), func(p prediction.Plan) bool { return p.API != prediction.Chat })
	_, all := predict(t, startPredicted(t, engine.Config{BlockSize: 16, ReasoningTokens: 18}), 16, plans)
	if all.WithinBlock < 0.95 || all.WithinTenth < 0.99 {
		t.Errorf("%.1f %% of later turns are within a block, %.1f %% of all within a tenth of the prompt, want 95 and 99 %%",
			100*all.WithinBlock, 100*all.WithinTenth)
	}
}
