package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf16"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/kvscore/texts"
	"github.com/zeebo/xxh3"
)

const testSeed = 0x5eed

var testOptions = Options{TextBlock: 16, BlockSize: 4, Seed: testSeed}

func mustParse(t testing.TB, a API, body string) *Request {
	t.Helper()
	r, err := Parse(a, []byte(body), testOptions)
	if err != nil {
		t.Fatalf("parsing %s: %v", body, err)
	}
	return r
}

// blocksOf hashes the full blocks of a short text the plain way.
func blocksOf(text []byte) (out []uint64) {
	for block := range slices.Chunk(text, testOptions.TextBlock) {
		if len(block) == testOptions.TextBlock {
			out = append(out, texts.Block(xxh3.HashSeed(block, testSeed), texts.Kind(block)))
		}
	}
	return out
}

// speller writes JSON in one of the many ways that mean the same.
type speller struct{ *rand.Rand }

func (s speller) space() string {
	return []string{"", "", "", " ", "\n\t", "\r\n"}[s.IntN(6)]
}

func (s speller) str(v string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range v {
		switch {
		case s.IntN(12) == 0:
			for _, u := range utf16.AppendRune(nil, r) {
				fmt.Fprintf(&b, []string{`\u%04x`, `\u%04X`}[s.IntN(2)], u)
			}
		case r == '/' && s.IntN(2) == 0:
			b.WriteString(`\/`)
		default:
			plain, _ := json.Marshal(string(r))
			b.Write(plain[1 : len(plain)-1])
		}
	}
	b.WriteByte('"')
	return b.String()
}

// respell spells the JSON of a value anew.
func (s speller) respell(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	return s.value(d, true)
}

// value respells the next value. With mix, the members of its objects get a random order.
func (s speller) value(d *json.Decoder, mix bool) string {
	token, err := d.Token()
	if err != nil {
		panic(err)
	}
	var parts []string
	switch v := token.(type) {
	case string:
		return s.str(v)
	case json.Delim:
		for d.More() {
			if v == '[' {
				parts = append(parts, s.value(d, mix))
				continue
			}
			key, _ := d.Token()
			name := s.str(key.(string)) + s.space() + ":" + s.space()
			if key == "type" || key == "role" { // which nobody writes with escapes
				kind, _ := d.Token()
				parts = append(parts, fmt.Sprintf("%s%q", name, kind))
				continue
			}
			parts = append(parts, name+s.value(d, mix && key != "parameters"))
		}
		end, _ := d.Token()
		if v == '{' && mix {
			s.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
		}
		return fmt.Sprint(v, s.space(), strings.Join(parts, s.space()+","+s.space()), s.space(), end)
	case nil:
		return "null"
	}
	return fmt.Sprint(token)
}

var alphabet = []rune("abcdefgh    ....\n\n\t\"\\/{}[]<>éüß漢字😀🎉\u2028\u0001")

func (s speller) words(most int) string {
	var b strings.Builder
	for range s.IntN(most + 1) {
		b.WriteRune(alphabet[s.IntN(len(alphabet))])
	}
	return b.String()
}

// split cuts v between runes into pieces, some of them empty.
func (s speller) split(v string) (out []string) {
	var b strings.Builder
	for _, r := range v {
		b.WriteRune(r)
		for s.IntN(5) == 0 {
			out = append(out, b.String())
			b.Reset()
		}
	}
	return append(out, b.String())
}

type jsonObject = map[string]any

// message returns one with a text, whole or in parts, and with tool calls.
func (s speller) message(role, text string, calls []jsonObject) jsonObject {
	m := jsonObject{"role": role, "content": text, "name": "bob", "reasoning_content": s.words(20)}
	if s.IntN(2) == 0 {
		parts := []jsonObject{{"type": "thinking", "thinking": "hm"}}
		for _, p := range s.split(text) {
			parts = append(parts, jsonObject{"type": "text", "text": p})
		}
		m["content"] = parts
	}
	if calls != nil || s.IntN(2) == 0 {
		m["tool_calls"] = calls
	}
	return m
}

// call invents a tool call. Each call of args spells its arguments anew.
func (s speller) call() (name string, args func() string) {
	name = "fn_" + s.words(3)
	if s.IntN(4) == 0 {
		text := "x" + s.words(30)
		return name, func() string { return text }
	}
	kv := jsonObject{"a" + s.words(5): s.words(20), "b": []int{1, 2}}
	return name, func() string {
		b, _ := json.Marshal(kv)
		return s.space() + s.value(json.NewDecoder(bytes.NewReader(b)), false)
	}
}

// stream writes an answer as engines do, in random deltas, and cuts the bytes
// into random reads.
func (s speller) stream(text string, calls []jsonObject) [][]byte {
	var b strings.Builder
	eol := []string{"\n", "\r\n", "\r"}[s.IntN(3)]
	chunk := func(delta jsonObject, finish any) {
		if s.IntN(4) == 0 {
			b.WriteString(": ping" + eol + eol + "event: chunk" + eol + "id: 7" + eol)
		}
		c := s.respell(jsonObject{"id": "c-1", "choices": []jsonObject{{"index": 0, "delta": delta, "logprobs": nil, "finish_reason": finish}}})
		b.WriteString("data: " + strings.NewReplacer("\r\n", " ", "\n", eol+"data: ").Replace(c) + eol + eol)
	}
	chunk(jsonObject{"role": "assistant", "content": ""}, nil)
	for _, p := range s.split(text) {
		chunk(jsonObject{"content": p, "reasoning_content": nil}, nil)
	}
	for i, c := range calls {
		f := c["function"].(jsonObject)
		chunk(jsonObject{"tool_calls": []jsonObject{{"index": i, "id": "x", "function": jsonObject{"name": f["name"], "arguments": ""}}}}, nil)
		for _, p := range s.split(f["arguments"].(string)) {
			chunk(jsonObject{"tool_calls": []jsonObject{{"index": i, "function": jsonObject{"arguments": p}}}}, nil)
		}
	}
	chunk(jsonObject{}, "stop")
	b.WriteString(`data: {"choices":[],"usage":{"prompt_tokens":9}}` + eol + eol + "data: [DONE]" + eol + eol)
	return s.reads([]byte(b.String()))
}

func (s speller) reads(all []byte) (out [][]byte) {
	for len(all) > 0 {
		n := 1 + s.IntN(min(len(all), 1+s.IntN(200)))
		out = append(out, all[:n])
		all = all[n:]
	}
	return out
}

// observed is an Answer that is shown the bytes of a stream, too.
type observed struct {
	*Answer
	frames rawjson.Framer
}

func observe(r *Request, stream bool) *observed { return &observed{Answer: r.NewAnswer(stream)} }

func (o *observed) Write(p []byte) { o.show(p, false) }

func (o *observed) show(p []byte, over bool) {
	if !o.stream {
		o.Answer.Write(p)
		return
	}
	o.frames.Write(p, over)
	for f, ok := o.frames.Next(); ok; f, ok = o.frames.Next() {
		o.Event(f)
	}
}

func (o *observed) Finish() {
	o.show(nil, true)
	o.Answer.Finish()
}
