package api

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
)

// chatOf returns a conversation of about size bytes of JSON: turns of prose
// and code, with a newline to each line and some quotes.
func chatOf(size int) []byte {
	prose := "The quick brown fox jumps over the lazy dog, then stops to think about it.\n"
	code := "func add(a, b int) int {\n\treturn a + b // \"plus\"\n}\n\n"
	type msg struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	body := struct {
		Model    string `json:"model"`
		Messages []msg  `json:"messages"`
		Stream   bool   `json:"stream"`
		NVExt    any    `json:"nvext"`
	}{Model: "llama-70b", Stream: true, NVExt: map[string]any{"a": 1}}
	for n, i := 0, 0; n < size; i++ {
		text := strings.Repeat(prose, 12) + strings.Repeat(code, 4)
		if size < 2000 {
			text = prose + code
		}
		body.Messages = append(body.Messages, msg{[]string{"user", "assistant"}[i%2], text})
		n += len(text) + 60
	}
	out, err := json.Marshal(body)
	if err != nil {
		panic(err)
	}
	return out
}

func BenchmarkParse(b *testing.B) {
	for _, size := range []int{1, 16, 256} {
		body := chatOf(size << 10)
		b.Run(fmt.Sprintf("%dKB", size), func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Parse(chat{}, body, Options{}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkParseTokens(b *testing.B) {
	body := []byte(`{"prompt":[1`)
	rng := rand.New(rand.NewPCG(1, 2))
	for range 32000 {
		body = strconv.AppendInt(append(body, ','), int64(rng.IntN(1<<(4+rng.IntN(14)))), 10) // of 1 to 6 digits
	}
	body = append(body, "]}"...)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Parse(completions{}, body, Options{}); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkAnswer(b *testing.B) {
	r, err := Parse(chat{}, chatOf(16<<10), Options{})
	if err != nil {
		b.Fatal(err)
	}
	var chunks [][]byte
	for range 100 {
		chunks = append(chunks, []byte(`data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1795000000,"model":"meta-llama/Llama-3.3-70B-Instruct","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null,"token_ids":null}]}`+"\n\n"))
	}
	b.SetBytes(int64(100 * len(chunks[0])))
	b.Run("100chunks", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			a := observe(r, true)
			for _, c := range chunks {
				a.Write(c)
			}
			if a.Chunks() != 100 {
				b.Fatal(a.Chunks())
			}
		}
	})
}
