package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/tidwall/gjson"
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
	f.Add(uint8(4), []byte(`{"metadata":{"user_id":"{\"session_id\":\"\\ud83d\"}"},"messages":[]}`))
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
		if r.MediaTokens < 0 || r.MediaTokens > maxMediaTokens {
			t.Fatalf("%d tokens", r.MediaTokens)
		}
		if at := Find(a, body, 5, 70); at.Byte < 0 || at.Message < 0 {
			t.Fatalf("the place is %+v", at)
		}
		e := r.Editor(body)
		e.CutGiven(nameNVExt)
		out := rawjson.Splice(nil, body, e.Edits())
		if !valid {
			return
		}
		var got map[string]json.RawMessage
		if err := json.Unmarshal(out, &got); err != nil {
			t.Fatalf("cut to invalid JSON: %v", err)
		}
		if v, ok := got["nvext"]; ok && (string(v) != "null" || r.NVExt != nil) {
			t.Fatalf("nvext is left: %s", v)
		}
		delete(got, "nvext")
		delete(want, "nvext")
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("%s, want %s", got, want)
		}
		if r.LacksUsage(body) {
			e = r.Editor(body)
			e.CutGiven(nameNVExt)
			r.AskUsage(e)
			if out := e.Apply(); !json.Valid(out) || !gjson.GetBytes(out, "stream_options.include_usage").Bool() {
				t.Fatalf("asked for usage, %s became %s", body, out)
			}
		}
		if ids := r.IDs(body); ids != nil {
			var numbers []uint32
			if err := json.Unmarshal(ids, &numbers); err != nil || int64(len(numbers)) != r.Tokens {
				t.Fatalf("token ids %s of %d: %v", ids, r.Tokens, err)
			}
		}
		if p := answered(r, true, 0, "data: [DONE]\n\n").Prediction(); p != nil && len(p) < len(r.Blocks) {
			t.Fatal("the prediction is shorter than the prompt")
		}
	})
}

// FuzzHasher checks the hasher's own unescaping against the plain one, in
// blocks of any size and pieces of any length.
func FuzzHasher(f *testing.F) {
	f.Add([]byte(`a\n\u00e9\\\"\ud83d\ude00 and some more text, longer than a block\t`), uint16(16), uint16(3))
	for _, broken := range []string{`\`, `\u12`, `\uzzzz`, `\ud83d\u12`} {
		f.Add([]byte(broken), uint16(0), uint16(0))
	}
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

// TestSaltFromOutsideIsTheBodys has a prompt with a salt in its body, and with
// the same from elsewhere: they share a root, and no other salt does.
func TestSaltFromOutsideIsTheBodys(t *testing.T) {
	parse := func(salt string) *Request {
		return mustParse(t, completions{}, `{"model":"m","prompt":"hello","reasoning_effort":"low","cache_salt":"`+salt+`"}`)
	}
	salts := []string{"", "a", "b"}
	for _, before := range salts {
		for _, salt := range salts {
			r := parse(before)
			r.SetSalt(salt)
			for _, body := range salts {
				if r.Salt != salt || (r.Root == parse(body).Root) != (body == salt) {
					t.Errorf("%q in place of %q: the salt is %q, and the root that of %q", salt, before, r.Salt, body)
				}
			}
		}
	}
}

// TestResponseIDs reads the id of a response, as soon as it is there, and of
// nothing else.
func TestResponseIDs(t *testing.T) {
	for _, v := range []struct {
		path, answer, want string
		stream             bool
	}{
		{"/v1/responses", `{"id":"resp_1","object":"response","status":"completed","output":[]}`, "resp_1", false},
		{"/v1/responses", `{"id":"resp_\u0031","status":"queued"}`, "resp_1", false},
		{"/v1/responses", `{"id":5,"status":"completed"}`, "", false},
		{"/v1/responses", `{"id":"` + strings.Repeat("x", maxResponseID+1) + `","status":"completed"}`, "", false},
		{"/v1/responses", "data: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_2\",\"status\":\"in_progress\"}}\n\n", "resp_2", true},
		{"/v1/responses", "data: {\"type\":\"response.output_text.delta\",\"id\":\"x\",\"delta\":\"y\"}\n\n", "", true},
		{"/v1/responses", "data: {\"type\":\"response.completed\",\"response\":{\"id\":\"resp_3\",\"status\":\"completed\"}}\n\n", "resp_3", true},
		{"/v1/chat/completions", `{"id":"chatcmpl-1","choices":[]}`, "", false},
	} {
		r, err := Parse(For(v.path), []byte(`{"input":"x","messages":[],"stream":true}`), testOptions)
		if err != nil {
			t.Fatal(err)
		}
		a := observe(r, v.stream)
		text := []byte(v.answer)
		a.Write(text)
		for i := range text { // the memory is used again
			text[i] = '!'
		}
		if got := a.ResponseID(); v.stream && got != v.want {
			t.Errorf("%.80s: while it streams %q, want %q", v.answer, got, v.want)
		}
		if a.Finish(); a.ResponseID() != v.want {
			t.Errorf("%.80s: got %q, want %q", v.answer, a.ResponseID(), v.want)
		}
	}
	for body, want := range map[string]bool{`{"input":"x"}`: false, `{"input":"x","store":true}`: false, `{"input":"x","store":null}`: false, `{"input":"x","store":false}`: true} {
		if r, err := Parse(For("/v1/responses"), []byte(body), testOptions); err != nil || r.Unstored != want {
			t.Errorf("%s: unstored %v, error %v", body, r.Unstored, err)
		}
	}
}

func TestSkipsCache(t *testing.T) {
	for _, c := range []struct {
		api  API
		body string
		want bool
	}{
		{chat{}, `{"messages":[]}`, false},
		{chat{}, `{"messages":[],"echo":true}`, true}, // top_logprobs is 0 by default
		{chat{}, `{"messages":[],"echo":true,"top_logprobs":3}`, true},
		{chat{}, `{"messages":[],"echo":true,"top_logprobs":null}`, false},
		{chat{}, `{"messages":[],"logprobs":true,"top_logprobs":3}`, false},
		{chat{}, `{"messages":[],"prompt_logprobs":0}`, true},
		{chat{}, `{"messages":[],"prompt_logprobs":null}`, false},
		{chat{}, `{"messages":[],"cache_prompt":false}`, true},
		{chat{}, `{"messages":[],"cache_prompt":true}`, false},
		{completions{}, `{"prompt":"hello","echo":true,"logprobs":0}`, true},
		{completions{}, `{"prompt":"hello","echo":true}`, false},
		{completions{}, `{"prompt":"hello","logprobs":1}`, false},
		{tokensIn{}, `{"token_ids":[1],"sampling_params":{"prompt_logprobs":1}}`, true},
		{tokensIn{}, `{"token_ids":[1],"sampling_params":{"prompt_logprobs":null}}`, false},
		{generate{}, `{"text":"hello","logprob_start_len":0}`, false},
		{generate{}, `{"text":"hello","return_logprob":true}`, false},
		{generate{}, `{"text":"hello","logprob_start_len":0,"return_logprob":true}`, true},
		{generate{}, `{"text":"hello","logprob_start_len":[0,0],"return_logprob":true}`, true},
		{generate{}, `{"text":"hello","logprob_start_len":[],"return_logprob":true}`, false},
		{generate{}, `{"text":"hello","logprob_start_len":-1,"return_logprob":true}`, false},
		{generate{}, `{"text":"hello","logprob_start_len":100000,"return_logprob":true}`, false}, // the prompt up to there is reused
	} {
		if r := mustParse(t, c.api, c.body); r.SkipsCache != c.want {
			t.Errorf("%s %s: %v, want %v", c.api.Name(), c.body, r.SkipsCache, c.want)
		}
	}
}

// TestFind finds the part of a prompt that is new, as an explanation shows it.
func TestFind(t *testing.T) {
	chat := func(system, user string) string {
		return `{"model":"m","tools":[{"type":"function","function":{"name":"f","description":"` + strings.Repeat("d", 70) + `"}}],` +
			`"messages":[{"role":"system","content":"` + system + `"},{"role":"user","content":"` + user + `"}]}`
	}
	for _, c := range []struct {
		path, body string
		from       int
		want       Place
	}{
		{"/v1/completions", `{"prompt":"0123456789"}`, 4, Place{0, 0, "", 4, "45678"}},
		{"/v1/completions", `{"prompt":"0123456789"}`, 10, Place{}},
		{"/v1/completions", `{"prompt":[1,2,3]}`, 0, Place{}},
		{"/v1/completions", `{`, 0, Place{}},
		{"/v1/chat/completions", chat("0123456789", "hello you"), 18, Place{0, 0, "tools", 0, " f dd"}},
		{"/v1/chat/completions", chat("0123456789", "hello you"), 13, Place{0, 1, "system", 5, "56789"}},
		{"/v1/chat/completions", chat("0123456789", "hello you"), 100, Place{0, 2, "user", 2, "llo y"}},
		{"/v1/chat/completions", chat(`\u00e9\n0`, "hello"), 8, Place{0, 1, "system", 0, "é\\n0"}},
	} {
		got := Find(For(c.path), []byte(c.body), c.from, c.from+5)
		if got != c.want {
			t.Errorf("%s from %d: %+v, want %+v", c.body, c.from, got, c.want)
		}
	}
}
