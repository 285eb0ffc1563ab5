package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

func TestMalformedBodies(t *testing.T) {
	for _, body := range []string{
		``, `  `, `[]`, `"x"`, `{`, `{"a":1`, `{"a":1]`, `{"a":[}`, `{"a":"b}`, `{"a":"b\"}`, `{"a" 1}`, `{"a":}`, `{"a":1,}`, `{,"a":1}`,
		`{a:1}`, `{"a":1 "b":2}`, `{"a":tr"u}`, `{} {}`,
	} {
		if _, err := Parse(chat{}, []byte(body), Options{}); !errors.Is(err, rawjson.ErrMalformed) {
			t.Errorf("%s: %v", body, err)
		}
	}
	for _, body := range []string{
		`{"a":` + strings.Repeat("[", rawjson.MaxDepth) + strings.Repeat("]", rawjson.MaxDepth) + `}`, `{"a":` + strings.Repeat(`{"a":`, 1<<20),
	} {
		if _, err := Parse(chat{}, []byte(body), Options{}); !errors.Is(err, rawjson.ErrDepth) {
			t.Errorf("%.40s: %v", body, err)
		}
	}
	for _, body := range []string{
		"{}", " {\r\n} \t", `{"a":"\\"}`, `{"a":"\\\""}`, `{"a" : -1.5e+3 , "b":[{"c":"]}"}]}`,
		`{"a":` + strings.Repeat("[", rawjson.MaxDepth-1) + strings.Repeat("]", rawjson.MaxDepth-1) + `}`,
	} {
		if _, err := Parse(chat{}, []byte(body), Options{}); err != nil {
			t.Errorf("%.40s: %v", body, err)
		}
	}
}

// spelled is text in JSON's shortest spelling.
func spelled(text string) []byte {
	var out []byte
	for i := range len(text) {
		switch c := text[i]; {
		case c == '"' || c == '\\':
			out = append(out, '\\', c)
		case strings.IndexByte("\b\f\n\r\t", c) >= 0:
			out = append(out, '\\', "bfnrt"[strings.IndexByte("\b\f\n\r\t", c)])
		case c < ' ':
			out = fmt.Appendf(out, "\\u%04x", c)
		default:
			out = append(out, c)
		}
	}
	return out
}

func TestUnescapeAsEncodingJSON(t *testing.T) {
	s := speller{rand.New(rand.NewPCG(3, 4))}
	parts := []string{`\n`, `\"`, `\\`, `\/`, `\u00e9`, `\ud83d`, `\ude00`, `\uD83D\uDE00`, `\u0000`, "a", "é", "😀", `\b\f\r\t`}
	for range 2000 {
		raw := ""
		for range s.IntN(8) {
			raw += parts[s.IntN(len(parts))]
		}
		var want string
		if err := json.Unmarshal([]byte(`"`+raw+`"`), &want); err != nil {
			t.Fatal(err)
		}
		if got := rawjson.Text([]byte(raw)); got != want || textLen([]byte(raw)) != int64(len(want)) {
			t.Fatalf("%s: %q, want %q", raw, got, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	s := speller{rand.New(rand.NewPCG(5, 6))}
	for range 5 {
		f.Add(uint8(0), []byte(s.respell(jsonObject{"tools": []jsonObject{{"type": "function"}}, "messages": []jsonObject{s.message("user", s.words(40), nil)}})))
	}
	f.Add(uint8(1), []byte(`{"prompt":[1,2,3],"nvext":{"a":1},"nve\u0078t":null, "n":2}`))
	f.Add(uint8(1), []byte(`{"prompt":[[1,2],[3]],"nvext":1}`))
	f.Add(uint8(0), []byte(`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}`))
	f.Add(uint8(0), []byte(`{"messages":`+strings.Repeat("[", 300)))
	for i, a := range every {
		f.Add(uint8(i), goldenFile(f, a.Name(), "request.json"))
		if a.Name() == NameTokens {
			f.Add(uint8(i), []byte(`{"token_ids":[1,2,3,4,5],"features":{"mm_hashes":{"image":["a\u0062"]},"mm_placeholders":{"image":[{"offset":1,"length":2}]}}}`))
		}
	}
	f.Add(uint8(0), []byte(`{"stream":true,"nvext":1,"stream_options":{"include_usage":false}}`))
	f.Fuzz(func(t *testing.T, which uint8, body []byte) {
		a := every[int(which)%len(every)]
		before := slices.Clone(body)
		r, err := Parse(a, body, testOptions)
		if !bytes.Equal(before, body) {
			t.Fatal("the body has changed")
		}
		var want map[string]json.RawMessage
		valid := json.Unmarshal(body, &want) == nil && want != nil
		if err != nil {
			if valid && !errors.Is(err, rawjson.ErrDepth) {
				t.Fatalf("a valid body is refused: %v", err)
			}
			return
		}
		if text := canonical(a, body); r.Kind == Text && !r.Batch() && int64(len(text)) != r.First {
			t.Fatalf("the canonical text has %d bytes, want %d", len(text), r.First)
		}
		if at := Find(a, body, 5, 70); at.Byte < 0 || at.Message < 0 {
			t.Fatalf("the place is %+v", at)
		}
		e := r.Editor(body)
		e.CutNVExt()
		out := rawjson.Splice(nil, body, e.Edits())
		if !valid {
			return
		}
		var got map[string]json.RawMessage
		if err := json.Unmarshal(out, &got); err != nil {
			t.Fatalf("cut to invalid JSON: %v", err)
		}
		whole := maps.Clone(want)
		if v, ok := got["nvext"]; ok && (string(v) != "null" || r.NVExt != nil) {
			t.Fatalf("nvext is left: %s", v)
		}
		delete(got, "nvext")
		delete(want, "nvext")
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("%s, want %s", got, want)
		}
		if ask, ok := r.AskUsage(body); ok {
			e = r.Editor(body)
			e.CutNVExt()
			e.Replace(ask)
			checkAsked(t, rawjson.Splice(nil, body, e.Edits()), whole)
		}
		if ids := r.IDs(body); ids != nil {
			var numbers []uint32
			if err := json.Unmarshal(ids, &numbers); err != nil || int64(len(numbers)) != r.Tokens {
				t.Fatalf("token ids %s of %d: %v", ids, r.Tokens, err)
			}
		}
		n := observe(r, true)
		n.Write([]byte("data: [DONE]\n\n"))
		n.Finish()
		if p := n.Prediction(); p != nil && len(p) < len(r.Blocks) {
			t.Fatal("the prediction is shorter than the prompt")
		}
	})
}

// FuzzHasher checks the hasher's own unescaping against the plain one, in
// blocks of any size and pieces of any length.
func FuzzHasher(f *testing.F) {
	f.Add([]byte(`a\n\u00e9\\\"\ud83d\ude00 and some more text, longer than a block\t`), uint16(16), uint16(3))
	f.Fuzz(func(t *testing.T, raw []byte, size, before uint16) {
		block := 16 + int(size)%300
		prefix := bytes.Repeat([]byte("x"), int(before)%1000)
		h := newHasher(block, testSeed)
		h.add(prefix)
		h.addString(raw)
		want := newHasher(block, testSeed)
		want.add(prefix)
		for i := 0; i < len(raw); {
			if raw[i] != '\\' {
				want.addByte(raw[i])
				i++
				continue
			}
			var buf [utf8.UTFMax]byte
			n, used := rawjson.Unescape(raw[i:], &buf)
			for _, c := range spelled(string(buf[:n])) {
				want.addByte(c)
			}
			i += used
		}
		if !slices.Equal(h.blocks, want.blocks) || !bytes.Equal(h.tail, want.tail) || h.written() != want.written() {
			t.Fatalf("%q after %d bytes in blocks of %d: %d bytes, want %d", raw, len(prefix), block, h.written(), want.written())
		}
	})
}

func TestDoneBlocksAreUsedAgain(t *testing.T) {
	body := []byte(chatBody(`{"role":"user","content":"` + strings.Repeat("some words ", 6000) + `"}`))
	parsed := func() *Request {
		r, err := Parse(chat{}, body, testOptions)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	want := slices.Clone(parsed().Blocks)
	for range 4 {
		r := parsed()
		if !slices.Equal(r.Blocks, want) {
			t.Fatal("blocks differ in memory that was used before")
		}
		clear(r.Blocks[:cap(r.Blocks)])
		r.Done()
		if r.Blocks != nil {
			t.Error("Blocks can still be used")
		}
	}
}
