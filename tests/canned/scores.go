package canned

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"math"
)

// list wraps the results of an API that ends with the prompt.
func (p *Answer) list(id string, data []any) map[string]any {
	return map[string]any{
		"id": id + "-" + p.ID, "object": "list", "created": 1700000000, "model": p.Model, "data": data,
		"usage": map[string]any{"prompt_tokens": p.Prompt, "total_tokens": p.Prompt, "completion_tokens": 0, "prompt_tokens_details": nil},
	}
}

// several returns the elements of a list. Any other value, or a list of token
// ids, is one element.
func several(raw json.RawMessage) []json.RawMessage {
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) != nil || len(list) > 0 && list[0][0] >= '0' && list[0][0] <= '9' {
		return []json.RawMessage{raw}
	}
	return list
}

// vector returns the embedding of an input. Its numbers are the same in
// decimals as in the 32 bits of base64.
func vector(input []byte, n int) []float64 {
	if n <= 0 {
		n = 16
	}
	rng := seeded(input)
	out := make([]float64, n)
	for i := range out {
		out[i] = float64(rng.IntN(2049)-1024) / 1024
	}
	return out
}

func embeddingsWhole(p *Answer, c *call) any {
	inputs := several(c.Input)
	data := make([]any, len(inputs))
	for i, in := range inputs {
		v := vector(in, c.Dimensions)
		var embedding any = v
		if c.EncodingFormat == "base64" {
			var raw []byte
			for _, f := range v {
				raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(float32(f)))
			}
			embedding = base64.StdEncoding.EncodeToString(raw)
		}
		data[i] = map[string]any{"index": i, "object": "embedding", "embedding": embedding}
	}
	return p.list("embd", data)
}

// scoresWhole is the answer of APIs whose results nothing reads.
func scoresWhole(p *Answer, _ *call) any { return p.list("score", []any{}) }
