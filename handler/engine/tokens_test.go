package engine

import (
	"bytes"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
)

// TestPromptIsTheOneThatIsSaid puts a request with token_data into the words of
// every type and API: what is planned before is what the engine gets then.
func TestPromptIsTheOneThatIsSaid(t *testing.T) {
	const body = `{"messages":[],"prompt":"x","text":"x","token_ids":[7],"nvext":{"token_data":[4242,2]}}`
	taken := 0
	for _, kind := range append([]string{""}, Names...) {
		for _, path := range append(paths, "/v1/embeddings", "/v1/rerank") {
			for _, keep := range []bool{false, true} {
				parsed, err := api.Parse(api.For(path), []byte(body), api.Options{})
				if err != nil {
					t.Fatal(err)
				}
				ext, err := nvext.Parse(parsed.NVExt, nvext.Options{})
				if err != nil {
					t.Fatal(err)
				}
				r := Request{API: parsed.API.Name(), Body: parsed.Editor([]byte(body)), Ext: &ext, KeepPrompt: keep, Ranks: 1}
				got := Adapt(kind, &r)
				out := r.Body.Apply()
				has := bytes.Contains(out, []byte("4242"))
				planned := PromptOf(kind, r.API)
				switch {
				case kind == Dynamo:
					if planned != EitherPrompt || got.Prompt != EitherPrompt || !has {
						t.Errorf("%s: %s %s: planned %d, adapted %d, %s", kind, path, out, planned, got.Prompt, out)
					}
					continue
				case keep && got.Prompt != BodyPrompt, !keep && planned != EitherPrompt && got.Prompt != planned, (got.Prompt == TokenPrompt) != has:
					t.Errorf("%q: %s, keeping the prompt %v: planned %d, adapted %d, the engine gets %s", kind, path, keep, planned, got.Prompt, out)
				case (got.Lacks&TokenData == 0) != has:
					t.Errorf("%q: %s: lacks %b, the engine gets %s", kind, path, got.Lacks, out)
				}
				if has {
					taken++
				}
			}
		}
	}
	if taken < 10 {
		t.Errorf("the ids were taken %d times", taken)
	}
}
