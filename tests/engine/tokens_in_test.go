package engine

import (
	"encoding/hex"
	"encoding/json"
	"maps"
	"os"
	"strings"
	"testing"
)

// TestFeatures has the prompt of which vLLM's own functions made the extra keys. They are in
// testdata/features, with the script that made them.
func TestFeatures(t *testing.T) {
	dir := "testdata/features/"
	told, err := os.ReadFile(dir + "events.txt")
	if err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(dir + "request.json")
	if err != nil {
		t.Fatal(err)
	}
	e := start(t, withEvents(Config{BlockSize: 4, LoRAs: []string{"ad"}}, EventConfig{}))
	s := follow(t, e, 0, 0)
	more := map[string]doc{"plain": {}, "salt": {"cache_salt": "s"}, "adapter": {"model": "ad"}}
	for line := range strings.Lines(string(told)) {
		name, payload, _ := strings.Cut(strings.TrimSpace(line), " ")
		if more[name] == nil {
			continue // an option that the simulator lacks
		}
		b, err := hex.DecodeString(payload)
		if err != nil {
			t.Fatal(err)
		}
		want, _ := tellBatch(t, b)
		body := doc{"sampling_params": doc{"max_tokens": 1}}
		if err := json.Unmarshal(raw, &body); err != nil {
			t.Fatal(err)
		}
		maps.Copy(body, more[name])
		r := post(t.Context(), e.URL()+"/inference/v1/generate", body)
		r.checkOK(t)
		if got := s.expect("BlockStored 7 first=true GPU"); got[0].extra != want[0].extra || !strings.Contains(got[0].extra, "-6]") {
			t.Errorf("%s: extra keys %s, want %s", name, got[0].extra, want[0].extra)
		}
		if v := post(t.Context(), e.URL()+"/inference/v1/generate", body).json(t); at(v, "usage", "prompt_tokens_details", "cached_tokens") != 28.0 {
			t.Errorf("%s: answer %v to the same prompt", name, v)
		}
	}
}

// TestFeaturesBehindThePrompt has media in the block that the answer fills up.
func TestFeaturesBehindThePrompt(t *testing.T) {
	e := start(t, withEvents(Config{BlockSize: 4}, EventConfig{}))
	s := follow(t, e, 0, 0)
	body := doc{
		"token_ids": tokens(1, 6), "sampling_params": doc{"max_tokens": 9, "ignore_eos": true},
		"features": doc{"mm_hashes": doc{"image": []string{"a"}}, "mm_placeholders": doc{"image": []doc{{"offset": 3, "length": 3}}}},
	}
	post(t.Context(), e.URL()+"/inference/v1/generate", body).checkOK(t)
	for _, extra := range []string{"[[[a 3]]]", "[[[a -1]]]", "[<nil>]"} {
		if b := s.batch(); b[0].extra != extra {
			t.Errorf("%+v, want the extra keys %s", b[0], extra)
		}
	}
	body["stream"], body["stream_options"] = true, doc{"include_usage": true}
	r := post(t.Context(), e.URL()+"/inference/v1/generate", body)
	if r.status != 200 || !strings.Contains(string(r.body), `"cached_tokens":4`) || !strings.HasSuffix(string(r.body), "data: [DONE]\n\n") {
		t.Errorf("answer %s", r.body)
	}
}

func TestFeaturesThatAreRefused(t *testing.T) {
	e := start(t, Config{BlockSize: 4})
	for _, features := range []string{
		`5`,
		`{"mm_hashes":{"image":["a"]}}`,
		`{"mm_hashes":{"image":["a"]},"mm_placeholders":{"audio":[{"offset":1,"length":1}]}}`,
		`{"mm_hashes":{"image":["a"]},"mm_placeholders":{"image":[{"offset":5,"length":2}]}}`,
		`{"mm_hashes":{"image":["a","b"]},"mm_placeholders":{"image":[{"offset":1,"length":2},{"offset":2,"length":1}]}}`,
	} {
		r := post(t.Context(), e.URL()+"/inference/v1/generate", doc{"token_ids": tokens(1, 6), "features": json.RawMessage(features)})
		if r.status != 400 {
			t.Errorf("%s: status %d", features, r.status)
		}
	}
	if r := post(t.Context(), start(t, Config{Flavour: SGLang}).URL()+"/inference/v1/generate", doc{"token_ids": tokens(1, 6)}); r.status != 404 {
		t.Errorf("status %d of an SGLang", r.status)
	}
}
