package engine

import (
	"cmp"
	"encoding/json"
	"fmt"
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

// tokensChoice is some of the answer's tokens, up to a number of them.
func (a *answer) tokensChoice(tokens []uint32, end int) []object {
	c := object{"index": 0, "token_ids": tokens, "logprobs": nil, "finish_reason": nil}
	if end == len(a.answer) {
		c["finish_reason"] = a.reason
	}
	return []object{c}
}

// appendTokens appends the event of token i.
func (a *answer) appendTokens(buf []byte, i, cached int) []byte {
	d := object{"request_id": a.id, "choices": a.tokensChoice(a.answer[i:i+1], i+1)}
	if u := a.running(i+1, cached); u != nil {
		d["usage"] = u
	}
	out, _ := json.Marshal(d)
	return fmt.Appendf(buf, "data: %s\n\n", out)
}

func (a *answer) appendTokensUsage(buf []byte, cached int) []byte {
	out, _ := json.Marshal(object{"request_id": a.id, "choices": []any{}, "usage": a.usageAt(len(a.answer), cached)})
	return fmt.Appendf(buf, "data: %s\n\n", out)
}

// wholeTokens returns the body of an answer that is not streamed.
func (a *answer) wholeTokens(cached int) []byte {
	d := object{
		"request_id": a.id, "model": a.model, "created": a.created,
		"choices": a.tokensChoice(a.answer, len(a.answer)), "usage": a.usageAt(len(a.answer), cached),
	}
	if a.transfer != nil {
		d["kv_transfer_params"] = a.transfer
	}
	out, _ := json.Marshal(d)
	return out
}
