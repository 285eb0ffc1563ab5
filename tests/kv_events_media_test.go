package tests

import (
	"encoding/json"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/caddy-kvrouter/kvrouter/tests/engine"
	"github.com/tidwall/gjson"
)

// shown is an image among a prompt's token ids.
type shown struct {
	name           string
	offset, length int
}

// tokensBody returns a request to /inference/v1/generate.
func tokensBody(t testing.TB, ids []uint32, more map[string]any, images ...shown) []byte {
	t.Helper()
	names, places := []string{}, []map[string]int{}
	for _, i := range images {
		names, places = append(names, i.name), append(places, map[string]int{"offset": i.offset, "length": i.length})
	}
	body := map[string]any{"model": "sim-8b", "token_ids": ids, "sampling_params": map[string]any{"max_tokens": 20, "ignore_eos": true}}
	if len(images) > 0 {
		body["features"] = map[string]any{
			"kwargs_data": nil, "mm_hashes": map[string]any{"image": names}, "mm_placeholders": map[string]any{"image": places},
		}
	}
	for k, v := range more {
		body[k] = v
	}
	b, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// askTokens returns the tokens that the router predicted to be cached, those that the engine
// reports, and the answer's.
func (s *server) askTokens(t testing.TB, body []byte) (engine string, predicted, reported int, answer []uint32) {
	t.Helper()
	a := s.post(t.Context(), "/inference/v1/generate", body)
	if !a.ok() {
		t.Fatalf("status %d: %s", a.status, a.body)
	}
	predicted, err := strconv.Atoi(a.header.Get("X-KV-Predicted-Cached-Tokens"))
	if err != nil {
		t.Fatalf("headers %v", a.header)
	}
	for _, id := range gjson.GetBytes(a.body, "choices.0.token_ids").Array() {
		answer = append(answer, uint32(id.Uint()))
	}
	return a.engine(), predicted, int(gjson.GetBytes(a.body, "usage.prompt_tokens_details.cached_tokens").Int()), answer
}

// TestEventsOfMedia has prompts of equal token ids with different images. The router predicts
// what the engines report, and never takes one image for another.
func TestEventsOfMedia(t *testing.T) {
	engines := publishing(t, 2, engine.Config{LoRAs: []string{"lora"}})
	s := startCaddy(t, simulated(engines, "response_headers X-KV-", "policy dynamo"))
	for _, e := range engines {
		s.awaitKnowledge(t, e, "live", "exact")
	}
	// The image begins in the seventh block of 16.
	prompt := slices.Concat(idsOf(1, 100), slices.Repeat([]uint32{7}, 200), idsOf(2, 43))
	image := shown{"a", 100, 200}
	for i, c := range []struct {
		what   string
		more   map[string]any
		images []shown
		cached int
	}{
		{"a new prompt", nil, []shown{image}, 0},
		{"the same", nil, []shown{image}, 336},
		{"another image", nil, []shown{{"b", 100, 200}}, 96},
		{"no image", nil, nil, 96},
		{"the image at another place", nil, []shown{{"a", 101, 199}}, 96},
		{"the image in a later block", nil, []shown{{"a", 116, 184}}, 112},
		{"two images", nil, []shown{{"a", 100, 92}, {"b", 192, 108}}, 192},
		{"the other way round", nil, []shown{{"b", 100, 92}, {"a", 192, 108}}, 192},
		{"with a salt", map[string]any{"cache_salt": "s"}, []shown{image}, 0},
		{"again with the salt", map[string]any{"cache_salt": "s"}, []shown{image}, 336},
		{"with an adapter", map[string]any{"model": "lora"}, []shown{image}, 0},
		{"again with the adapter", map[string]any{"model": "lora"}, []shown{image}, 336},
		{"the first again", nil, []shown{image}, 336},
	} {
		_, predicted, reported, _ := s.askTokens(t, tokensBody(t, prompt, c.more, c.images...))
		if predicted != c.cached || reported != c.cached {
			t.Errorf("%d, %s: %d tokens predicted and %d reported, want %d", i, c.what, predicted, reported, c.cached)
		}
	}
	x := s.explainAt(t, "/inference/v1/generate", string(tokensBody(t, prompt, nil, image)))
	for _, c := range x.Candidates {
		if c.Source != "exact" {
			t.Errorf("the overlap of %s is %s", c.Dial, c.Source)
		}
	}
}

// TestEventsOfMediaInConversations has turns with images. The first image ends in a block that
// the answer fills up.
func TestEventsOfMediaInConversations(t *testing.T) {
	engines := publishing(t, 2, engine.Config{})
	s := startCaddy(t, simulated(engines, "response_headers X-KV-", "policy dynamo"))
	for _, e := range engines {
		s.awaitKnowledge(t, e, "live", "exact")
	}
	prompt := slices.Concat(idsOf(1, 50), slices.Repeat([]uint32{7}, 200))
	images := []shown{{"a", 50, 200}}
	home, predicted, reported, answer := s.askTokens(t, tokensBody(t, prompt, nil, images...))
	if predicted != 0 || reported != 0 || len(answer) != 20 {
		t.Fatalf("a new prompt: %d tokens predicted, %d reported, answer %v", predicted, reported, answer)
	}
	for turn := range 4 {
		full := (len(prompt) + len(answer) - 1) / 16 * 16 // the engine does not compute the last token
		prompt = slices.Concat(prompt, answer, idsOf(turn+2, 33), slices.Repeat([]uint32{7}, 70))
		images = append(images, shown{"b" + strconv.Itoa(turn), len(prompt) - 70, 70})
		body := tokensBody(t, prompt, nil, images...)
		eventually(t, 5*time.Second, "the answer's blocks are known", func() bool {
			most := int64(0)
			for _, c := range s.explainAt(t, "/inference/v1/generate", string(body)).Candidates {
				most = max(most, c.Tokens)
			}
			return most >= int64(full)
		})
		var at string
		at, predicted, reported, answer = s.askTokens(t, body)
		if at != home || predicted != full || reported != full {
			t.Errorf("turn %d at %s: %d tokens predicted and %d reported, want %d at %s", turn, at, predicted, reported, full, home)
		}
	}
}

// TestMediaThatTheEngineRefuses: the router passes on what it cannot read, and the engine judges.
func TestMediaThatTheEngineRefuses(t *testing.T) {
	e := publishing(t, 1, engine.Config{})
	s := startCaddy(t, simulated(e, "response_headers X-KV-"))
	for _, images := range [][]shown{{{"a", 90, 20}}, {{"a", 10, 20}, {"b", 20, 20}}} {
		if a := s.post(t.Context(), "/inference/v1/generate", tokensBody(t, idsOf(1, 100), nil, images...)); a.status != 400 || a.engine() != "e0" {
			t.Errorf("%v: status %d of %q", images, a.status, a.engine())
		}
	}
}
