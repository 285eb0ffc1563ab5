package api

import (
	"encoding/json"
	"reflect"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

const usageChunk = `{"id":"c","choices":[],"usage":{"prompt_tokens":20,"completion_tokens":5}}`

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

// FuzzCutUsage compares what is left of an event's data with encoding/json.
func FuzzCutUsage(f *testing.F) {
	f.Add([]byte(usageChunk))
	f.Add([]byte(` { "usage" : {"a":[1]} , "x":1, "choices":[ ] , "us\u0061ge":{} } `))
	f.Add([]byte(`{"choices":[],"usage":{},"error":null,"timings":{}}x`))
	f.Fuzz(func(t *testing.T, data []byte) {
		edits, all := CutUsage(nil, data)
		if len(edits) == 0 {
			return
		}
		var was, is map[string]json.RawMessage
		out := rawjson.Splice(nil, data, edits)
		if json.Unmarshal(data, &was) != nil || json.Unmarshal(out, &is) != nil {
			t.Fatalf("%q became %q", data, out)
		}
		delete(was, "usage")
		if !reflect.DeepEqual(was, is) || all && is["timings"] != nil && string(is["timings"]) != "null" {
			t.Fatalf("%q became %q, all %v", data, out, all)
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
