package api

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/tidwall/gjson"
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

// BenchmarkParseMessages reads the same conversation as Anthropic's.
func BenchmarkParseMessages(b *testing.B) {
	body := chatOf(16 << 10)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Parse(messages{}, body, Options{}); err != nil {
			b.Fatal(err)
		}
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

// BenchmarkScan is the structural pass alone, beside two ways to do the same
// with gjson: validating, and walking the top-level members and messages.
func BenchmarkScan(b *testing.B) {
	for _, size := range []int{16, 256} {
		body := chatOf(size << 10)
		run := func(name string, f func()) {
			b.Run(fmt.Sprintf("%s/%dKB", name, size), func(b *testing.B) {
				b.SetBytes(int64(len(body)))
				b.ReportAllocs()
				for b.Loop() {
					f()
				}
			})
		}
		run("own", func() {
			p := parse{req: &Request{API: completions{}}, body: body}
			if p.scan() != nil {
				b.Fatal()
			}
		})
		run("gjsonValid", func() { gjson.ValidBytes(body) })
		run("gjsonForEach", func() {
			gjson.Parse(rawjson.View(body)).ForEach(func(k, v gjson.Result) bool {
				if k.Str == "messages" {
					v.ForEach(func(_, m gjson.Result) bool {
						m.ForEach(func(_, _ gjson.Result) bool { return true })
						return true
					})
				}
				return true
			})
		})
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
