package main

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
)

// TestPredictions has conversations with 2 to 6 bytes a token, which differs between and
// within them. Some prompts are shared, edited or asked at the same time.
func TestPredictions(t *testing.T) {
	for name, o := range map[string]options{
		"blocks of 16": {conversations: 60, more: true, block: 16, simulated: engine.Config{Blocks: 32768}},
		"blocks of 32": {conversations: 60, block: 32},
		// Of blocks of one token there would be too many: the router has larger ones.
		"SGLang": {conversations: 60, block: 16, simulated: engine.Config{Flavour: engine.SGLang, BlockSize: 1, Blocks: 262144}},
		// No later prompt has the reasoning, so the engine's cache ends where the prompt ended.
		"reasoning": {conversations: 60, block: 16, simulated: engine.Config{ReasoningTokens: 18}},
	} {
		t.Run(name, func(t *testing.T) {
			o.named, o.model, o.turns, o.clients, o.seed = "sim", "sim-8b", 5, 8, 1
			o.simulated.Words, o.simulated.Speed, o.simulated.AnswerTokens = true, 100, 60 // some answers are cut before
			if o.simulated.BlockSize == 0 {
				o.simulated.BlockSize = o.block
			}
			var out bytes.Buffer
			rows, err := o.run(t.Context(), &out)
			if t.Logf("\n%s", &out); err != nil {
				t.Fatal(err)
			}
			if len(rows) < 6 {
				t.Errorf("%d rows", len(rows))
			}
		})
	}
}

// TestEvents runs all phases before two simulated engines, with a policy that no delay of a busy machine changes.
func TestEvents(t *testing.T) {
	var out bytes.Buffer
	if err := run(t.Context(), []string{"-events", "-clients", "1", "-blocks", "9000", "-directives", "policy dynamo"}, &out); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	for _, phase := range []string{phaseFresh, phaseEvict, phaseReset, phaseDown, phaseBack, "after the reset", "after the restart"} {
		if !strings.Contains(out.String(), phase) {
			t.Errorf("the report lacks %q:\n%s", phase, &out)
		}
	}
}

// TestAChecksVerdict has predictions that are wrong.
func TestAChecksVerdict(t *testing.T) {
	c := &client{block: 16}
	for i := range 100 {
		c.turns = append(c.turns, turn{Case: "own", API: "chat", Turn: i % 2, Prompt: 1000, Reported: 512, Predicted: 512 + 200*(i%2)})
	}
	rows := c.summarize()
	if rows[0].WithinBlock != 0.5 || rows[0].WithinTenth != 0.5 || rows[0].Worst != 12.5 || rows[0].Later != 50 {
		t.Errorf("%+v", rows[0])
	}
	if err := c.checkTexts(&bytes.Buffer{}, rows); err == nil {
		t.Error("the check passes")
	}
}

// TestAnswersOfRealEngines has the ends of answers as llama.cpp and SGLang write them.
func TestAnswersOfRealEngines(t *testing.T) {
	for body, want := range map[string]answer{
		`{"choices":[{"message":{"role":"assistant","content":"ab"}}],"usage":{"completion_tokens":4,"prompt_tokens":288,"prompt_tokens_details":{"cached_tokens":277}}}`: {spoken: spoken{text: "ab"}, prompt: 288, completion: 4, cached: 277},
		`{"choices":[{"text":"a","token_ids":[7,8]}],"usage":{"completion_tokens":2,"prompt_tokens":9,"prompt_tokens_details":null}}`:                                     {spoken: spoken{text: "a", ids: []uint32{7, 8}}, prompt: 9, completion: 2, cached: -1},
		`{"type":"message","content":[{"type":"text","text":"a"}],"usage":{"input_tokens":11,"output_tokens":4,"cache_read_input_tokens":277,"cache_creation_input_tokens":0}}`: {
			spoken: spoken{text: "a"}, prompt: 288, completion: 4, cached: 277,
		},
	} {
		a, err := new(talk).read([]byte(body))
		if err != nil || a.text != want.text || !slices.Equal(a.ids, want.ids) || a.prompt != want.prompt || a.completion != want.completion || a.cached != want.cached {
			t.Errorf("%s: %+v, %v", body, a, err)
		}
	}
}
