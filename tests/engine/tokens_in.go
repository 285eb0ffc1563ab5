package engine

import (
	"cmp"
	"encoding/json"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/tests/engine/cache"
)

// ofTokensIn are the members of vLLM's /inference/v1/generate, besides SamplingParams.
type ofTokensIn struct {
	TokenIDs json.RawMessage `json:"token_ids"`
	Features json.RawMessage `json:"features"`
}

// features are the media among a prompt's tokens.
type features struct {
	Hashes map[string][]string `json:"mm_hashes"`
	Places map[string][]struct {
		Offset int `json:"offset"`
		Length int `json:"length"`
	} `json:"mm_placeholders"`
}

// tokensAsCompletion says in a completion's members what a request of /inference/v1/generate
// says.
func (r *request) tokensAsCompletion() {
	r.Prompt = r.TokenIDs
	r.MaxTokens, r.MinTokens, r.IgnoreEOS = r.SamplingParams.MaxTokens, r.SamplingParams.MinTokens, r.SamplingParams.IgnoreEOS
}

// media returns the features of a prompt in order; none of another API. It refuses what vLLM
// does.
func (r *request) media(s shape, tokens int) (list []cache.Media, aerr *apiError) {
	if s != tokensIn {
		return nil, nil
	}
	var f features
	if len(r.Features) > 0 && json.Unmarshal(r.Features, &f) != nil {
		return nil, invalid("features: an object is required")
	}
	if len(f.Hashes) != len(f.Places) {
		return nil, invalid("mm_hashes and mm_placeholders must use the same modalities")
	}
	for modality, names := range f.Hashes {
		places := f.Places[modality]
		if len(places) != len(names) {
			return nil, invalid("%s mm_hashes and mm_placeholders must have the same length", modality)
		}
		for i, p := range places {
			if p.Offset < 0 || p.Length < 1 || p.Offset+p.Length > tokens {
				return nil, invalid("mm_placeholders must remain within the token_ids sequence")
			}
			list = append(list, cache.Media{Identifier: names[i], Offset: p.Offset, Length: p.Length})
		}
	}
	slices.SortFunc(list, func(a, b cache.Media) int { return cmp.Compare(a.Offset, b.Offset) })
	for i := range list[:max(0, len(list)-1)] {
		if list[i].Offset+list[i].Length > list[i+1].Offset {
			return nil, invalid("mm_placeholders must be globally non-overlapping and sorted")
		}
	}
	return list, nil
}
