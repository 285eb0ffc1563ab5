package api

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

const usageChunk = `{"id":"c","choices":[],"usage":{"prompt_tokens":20,"completion_tokens":5}}`

// withoutUsage takes the usage out of what is written to a framer.
func withoutUsage(f *rawjson.Framer, p []byte, over bool) []byte {
	f.Write(p, over)
	for e, ok := f.Next(); ok; e, ok = f.Next() {
		if edits, all := CutUsage(nil, e.Data); all {
			f.Drop()
		} else {
			f.Edit(edits)
		}
	}
	return f.Forward()
}

// filtered passes a stream in the given reads.
func filtered(reads [][]byte) (out []byte) {
	f := rawjson.Framer{}
	for _, p := range reads {
		out = append(out, withoutUsage(&f, slices.Clone(p), false)...)
	}
	return append(out, withoutUsage(&f, nil, true)...)
}

// TestCutUsage has data of events, and what is left of it without the usage that was asked for. "":
// it holds nothing else.
func TestCutUsage(t *testing.T) {
	const usage = `"usage":{"prompt_tokens":3,"completion_tokens":5}`
	for in, want := range map[string]string{
		usageChunk:                                               "",
		` { "usage" : { } , "choices":[ ] } `:                    "",
		"{\n\"choices\":[],\n\"usage\":{\"a\":[1]}}":             "",
		`{"choices":[],` + usage + `,"error":null,"x":null}`:     "",
		`{"choices":[],` + usage + `,"timings":{"a":1}}`:         `{"choices":[],"timings":{"a":1}}`,
		`{` + usage + ` , "choices":[],"x":{}}`:                  `{ "choices":[],"x":{}}`,
		`{"choices":[],"x":1,` + usage + `,"y":null}`:            `{"choices":[],"x":1,"y":null}`,
		`{"choices":[],` + usage + `,"error":{"message":"m"}}`:   "-",
		`{"choices":[{"delta":{}}],"usage":{"prompt_tokens":1}}`: "-",
		`{"choices":[],"usage":null}`:                            "-",
		`{"choices":[]}`:                                         "-",
		`{"choices":{},"usage":{}}`:                              "-",
		`{"usage":{"a":1}}`:                                      "-",
		`{"x":{"choices":[],"usage":{}}}`:                        "-",
		`{"choices":[],`:                                         "-",
		usageChunk + " x":                                        "-",
		"[" + usageChunk + "]":                                   "-",
		"[DONE]":                                                 "-",
		"":                                                       "-",
	} {
		edits, all := CutUsage(nil, []byte(in))
		got := string(rawjson.Splice(nil, []byte(in), edits))
		if all {
			got = ""
		} else if len(edits) == 0 {
			got = "-"
		}
		if got != want {
			t.Errorf("%s: left %s, want %s", in, got, want)
		}
	}
}

func FuzzCutUsage(f *testing.F) {
	f.Add(uint64(1), []byte("data: {\"choices\":[{}]}\r\n\r\ndata: "+usageChunk+"\r\n\r\ndata: [DONE]\r\n\r\n"))
	f.Add(uint64(2), []byte(": x\n\ndata: {\ndata: \"choices\":[],\"usage\":{}}\r\rdata"))
	f.Add(uint64(3), []byte(vllmStream))
	f.Fuzz(func(t *testing.T, seed uint64, stream []byte) {
		one := filtered([][]byte{stream})
		many := filtered((speller{rand.New(rand.NewPCG(seed, 9))}).reads(stream))
		if !bytes.Equal(one, many) {
			t.Fatalf("the split matters: %q %q", one, many)
		}
		if len(one) != len(stream) && !bytes.Contains(stream, []byte("data")) {
			t.Fatalf("%q became %q", stream, one)
		}
		// what the observer sees is the same but for the usage
		a, b := observe(mustParse(t, chat{}, askHello), true), observe(mustParse(t, chat{}, askHello), true)
		a.Write(stream)
		b.Write(one)
		a.Finish()
		b.Finish()
		if a.Chunks() != b.Chunks() || a.finished != b.finished || a.done != b.done || a.failed != b.failed {
			t.Fatalf("%q became %q", stream, one)
		}
	})
}

func TestAskUsage(t *testing.T) {
	for _, c := range []struct{ body, want string }{
		{`{"stream":true}`, `{"stream_options":{"include_usage":true},"stream":true}`},
		{` { "stream":true}`, ` {"stream_options":{"include_usage":true}, "stream":true}`},
		{`{"stream":true,"stream_options":null}`, `{"stream":true,"stream_options":{"include_usage":true}}`},
		{`{"stream_options":{},"stream":true}`, ``}, // vLLM takes these for a yes
		{`{"stream_options":{ "x":1},"stream":true}`, ``},
		{`{"stream_options":{"include_usage":1},"stream":true}`, ``},
		{`{"stream_options":{"include_usage":false,"continuous_usage_stats":1},"stream":true}`, ``},
		{`{"stream_options":{"include_usage": false },"stream":true}`, `{"stream_options":{"include_usage": true },"stream":true}`},
		{`{"stream_options":{"include_usage":null,"x":1},"stream":true}`, `{"stream_options":{"include_usage":true,"x":1},"stream":true}`},
		{`{"nvext":{"a":1},"stream":true}`, `{"stream_options":{"include_usage":true},"stream":true}`},
		{`{"nvext":{"a":1},"stream":true,"stream_options":null,"nvext":2}`, `{"stream":true,"stream_options":{"include_usage":true}}`},
		{`{"stream":true,"stream_options":{"include_usage":true}}`, ``},
		{`{"stream":true,"stream_options":{"continuous_usage_stats":true}}`, ``},
		{`{"stream":true,"stream_options":7}`, ``},
		{`{"stream":false}`, ``},
		{`{}`, ``},
	} {
		for _, a := range []API{chat{}, completions{}} {
			r := mustParse(t, a, c.body)
			lacks := r.LacksUsage([]byte(c.body))
			if lacks != (c.want != "") {
				t.Errorf("%s: asked %v", c.body, lacks)
			}
			e := r.Editor([]byte(c.body))
			e.CutGiven(nameNVExt)
			r.AskUsage(e)
			if got := string(e.Apply()); lacks && got != c.want {
				t.Errorf("%s: %s", c.body, got)
			}
			if r.LacksUsage([]byte(c.body + " ")) {
				t.Errorf("%s: another body is changed", c.body)
			}
		}
		for _, a := range every {
			if mustParse(t, a, c.body).LacksUsage([]byte(c.body)) && a != (chat{}) && a != (completions{}) {
				t.Errorf("%s is asked", a.Name())
			}
		}
	}
}

// checkAsked checks what AskUsage made of a valid body against a decoded one.
func checkAsked(t *testing.T, out []byte, want map[string]json.RawMessage) {
	t.Helper()
	var got map[string]json.RawMessage
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatalf("asking makes invalid JSON: %v", err)
	}
	var options, before map[string]json.RawMessage
	if err := json.Unmarshal(got["stream_options"], &options); err != nil || string(options["include_usage"]) != "true" {
		t.Fatalf("usage is not asked for: %s", got["stream_options"])
	}
	_ = json.Unmarshal(want["stream_options"], &before)
	delete(options, "include_usage")
	delete(before, "include_usage")
	delete(got, "stream_options")
	delete(got, "nvext") // which is another edit
	rest := map[string]json.RawMessage{}
	for k, v := range want {
		if k != "stream_options" && k != "nvext" {
			rest[k] = v
		}
	}
	if len(options) != len(before) || len(before) > 0 && !reflect.DeepEqual(options, before) || !reflect.DeepEqual(got, rest) {
		t.Fatalf("%s and %s, want %s and %s", got, options, rest, before)
	}
}

// TestTimings has a stream of llama.cpp's that was not asked for usage.
func TestTimings(t *testing.T) {
	for timings, want := range map[string][3]int64{
		`{"cache_n":12,"prompt_n":3,"predicted_n":6}`:     {15, 6, 12},
		`{"prompt_n":3,"predicted_n":6}`:                  {-1, -1, -1}, // of an older server, which leaves the cached ones out
		`null`:                                            {-1, -1, -1},
		`{"cache_n":9e18,"prompt_n":9000000000000000000}`: {-1, -1, -1},
		`{"cache_n":9000000000000000000,"prompt_n":9000000000000000000}`: {-1, -1, -1},
	} {
		a := answerOf(t, chat{}, `{"messages":[{"role":"user","content":"x"}],"stream":true}`, true,
			`{"choices":[{"index":0,"delta":{"content":"y"}}]}`, `{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"timings":`+timings+`}`)
		if p, c, k := a.Usage(); [3]int64{p, c, k} != want {
			t.Errorf("%s: usage %d %d %d, want %d", timings, p, c, k, want)
		}
	}
}
