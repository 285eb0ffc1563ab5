package engine

import (
	"bytes"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
)

// TestTokenDataIsGivenWhereItIsTaken sends token_data to every type and API: the
// engine gets the ids if it accepts them and the caller has planned them. A Dynamo
// gets them in nvext.
func TestTokenDataIsGivenWhereItIsTaken(t *testing.T) {
	const body = `{"messages":[],"prompt":"x","text":"x","token_ids":[7],"nvext":{"token_data":[4242,2]}}`
	taken := 0
	for _, kind := range append([]string{""}, Names...) {
		for _, path := range append(paths, "/v1/embeddings", "/v1/rerank") {
			for _, give := range []bool{false, true} {
				parsed, err := api.Parse(api.For(path), []byte(body), api.Options{})
				if err != nil {
					t.Fatal(err)
				}
				ext, err := nvext.Parse(parsed.NVExt, nvext.Options{})
				if err != nil {
					t.Fatal(err)
				}
				r := Request{API: parsed.API.Name(), Body: parsed.Editor([]byte(body)), Ext: &ext, GiveTokens: give, Ranks: 1}
				e := Engine{Type: kind}
				got := e.Adapt(&r)
				out := r.Body.Apply()
				has := bytes.Contains(out, []byte("4242"))
				want := give && e.TakesTokenData(r.API) || kind == Dynamo
				if has != want || kind != Dynamo && (got.Unsupported&TokenData == 0) != has {
					t.Errorf("%q: %s, the ids planned %v: the engine gets %s, and lacks %b", kind, path, give, out, got.Unsupported)
				}
				if has && kind != Dynamo {
					taken++
				}
			}
		}
	}
	if taken < 10 {
		t.Errorf("the ids were taken %d times", taken)
	}
}
