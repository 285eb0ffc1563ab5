package canned

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"math"
	"slices"
)

// list wraps the results of an API that ends with the prompt.
func (p *reply) list(id string, data []any) map[string]any {
	return map[string]any{
		"id": id + "-" + p.id, "object": "list", "created": 1700000000, "model": p.model, "data": data,
		"usage": map[string]any{"prompt_tokens": p.prompt, "total_tokens": p.prompt, "completion_tokens": 0, "prompt_tokens_details": nil},
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

// score returns how well two texts fit, from 0 to 1.
func score(a, b []byte) float64 {
	rng := seeded(bytes.Join([][]byte{a, b}, []byte{0}))
	return float64(rng.IntN(1025)) / 1024
}

func embeddingsWhole(p *reply, c *call) any {
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

// rerankWhole has the best document first.
func rerankWhole(p *reply, c *call) any {
	type result struct {
		Index    int             `json:"index"`
		Document json.RawMessage `json:"document"`
		Score    float64         `json:"relevance_score"`
	}
	results := make([]result, len(c.Documents))
	for i, doc := range c.Documents {
		results[i] = result{i, doc, score(c.Query, doc)}
		if len(doc) > 0 && doc[0] == '"' {
			results[i].Document, _ = json.Marshal(map[string]any{"text": doc})
		}
	}
	slices.SortStableFunc(results, func(a, b result) int { return cmp.Compare(b.Score, a.Score) })
	if c.TopN > 0 && c.TopN < len(results) {
		results = results[:c.TopN]
	}
	return map[string]any{
		"id": "rerank-" + p.id, "model": p.model, "results": results,
		"usage": map[string]any{"prompt_tokens": p.prompt, "total_tokens": p.prompt},
	}
}

// scoreWhole compares one text with many, or as many with one another.
func scoreWhole(p *reply, c *call) any {
	first, second := several(c.Text1), several(c.Text2)
	data := make([]any, len(second))
	for i, b := range second {
		a := json.RawMessage(nil)
		if len(first) > 0 {
			a = first[min(i, len(first)-1)]
		}
		data[i] = map[string]any{"index": i, "object": "score", "score": score(a, b)}
	}
	return p.list("score", data)
}

func classifyWhole(p *reply, c *call) any {
	inputs := several(c.Input)
	data := make([]any, len(inputs))
	for i, in := range inputs {
		yes := score(in, nil)
		label := "no"
		if yes >= 0.5 {
			label = "yes"
		}
		data[i] = map[string]any{"index": i, "label": label, "probs": []float64{1 - yes, yes}, "num_classes": 2}
	}
	return p.list("classify", data)
}
