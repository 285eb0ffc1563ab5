package engine

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
)

// questionOf returns the question for a request, as the handler makes it.
func questionOf(t testing.TB, path, body string) *Question {
	t.Helper()
	r, err := api.Parse(api.For(path), []byte(body), api.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return &Question{API: r.API.Name(), Body: r.Editor([]byte(body)), Text: r.PromptText([]byte(body))}
}

// TestTokenizersAreAskedForWhatIsComputed checks the questions to each engine, and
// which answer counts. The nth answer is the id n.
func TestTokenizersAreAskedForWhatIsComputed(t *testing.T) {
	const chat, completions, generate = "/v1/chat/completions", "/v1/completions", "/generate"
	const hi = `"messages":[{"role":"user","content":"hi"}]`
	for _, v := range []struct {
		kind, path, body string
		statuses         []int
		asked            string // the paths and bodies
		want             string
	}{
		{VLLM, completions, `{"prompt":"x","add_special_tokens":false,"nvext":{}}`, []int{200}, `/v1/completions/render {"prompt":"x","add_special_tokens":false}`, "[1]"},
		{VLLM, completions, `{"prompt":"x","add_special_tokens":false}`, []int{403, 200}, `/v1/completions/render {"prompt":"x","add_special_tokens":false} /tokenize {"prompt":"x","add_special_tokens":false}`, "[2]"},
		{VLLM, chat, `{` + hi + `,"documents":[1],"stream":true,"stream_options":{},"nvext":null}`, []int{404}, `/v1/chat/completions/render {` + hi + `,"documents":[1],"nvext":null}`, ""},
		{VLLM, chat, `{` + hi + `,"documents":null,"chat_template_kwargs":{"a":1}}`, []int{401, 200}, `/v1/chat/completions/render {` + hi + `,"documents":null,"chat_template_kwargs":{"a":1}} /tokenize {` + hi + `,"chat_template_kwargs":{"a":1}}`, "[2]"},
		{VLLM, chat, `{` + hi + `}`, []int{400}, `/v1/chat/completions/render {` + hi + `}`, ""},
		{VLLM, chat, `{` + hi + `}`, []int{0}, `/v1/chat/completions/render {` + hi + `}`, ""},
		{VLLM, completions, `{"prompt":["x","y"]}`, nil, ``, ""},
		{VLLM, "/v1/messages", `{` + hi + `}`, nil, ``, ""},
		{VLLM, generate, `{"text":"x"}`, nil, ``, ""},
		{SGLang, completions, `{"model":"m","prompt":"x","max_tokens":3}`, []int{200}, `/tokenize {"model":"m","prompt":"x"}`, "[1]"},
		{SGLang, generate, `{"text":"x\n","sampling_params":{}}`, []int{200}, `/tokenize {"prompt":"x\n"}`, "[1]"},
		{SGLang, chat, `{` + hi + `,"reasoning_effort":"low"}`, []int{200}, `/tokenize {` + hi + `,"reasoning_effort":"low"}`, "[1]"},
		{SGLang, chat, `{` + hi + `,"chat_template":"x"}`, nil, ``, ""},
		{SGLang, chat, `{` + hi + `}`, []int{400}, `/tokenize {` + hi + `}`, ""},
		{LlamaCpp, chat, `{` + hi + `,"nvext":{}}`, []int{200, 200}, `/apply-template {` + hi + `} /tokenize {"content":"<hi>","add_special":true,"parse_special":true}`, "[2]"},
		{LlamaCpp, chat, `{` + hi + `}`, []int{200, 500}, `/apply-template {` + hi + `} /tokenize {"content":"<hi>","add_special":true,"parse_special":true}`, ""},
		{LlamaCpp, completions, `{"prompt":"x"}`, []int{200}, `/tokenize {"content":"x","add_special":true,"parse_special":true}`, "[1]"},
		{Dynamo, chat, `{` + hi + `,"nvext":{}}`, []int{200}, `/tokenize {` + hi + `}`, "[1]"},
		{Dynamo, completions, `{"prompt":"x"}`, []int{404}, `/tokenize {"prompt":"x"}`, ""},
		{TRTLLM, chat, `{` + hi + `}`, nil, ``, ""},
		{Other, completions, `{"prompt":"x"}`, nil, ``, ""},
		{"", completions, `{"prompt":"x"}`, nil, ``, ""},
	} {
		var asked []string
		got := (&Engine{Type: v.kind}).Tokenize(questionOf(t, v.path, v.body), func(path string, body []byte) (int, []byte) {
			if len(asked) == len(v.statuses) {
				t.Fatalf("%s %s: asked for %s once more", v.kind, v.body, path)
			}
			asked = append(asked, path+" "+string(body))
			id := strconv.Itoa(len(asked))
			return v.statuses[len(asked)-1], []byte(`{"tokens":[ ` + id + ` ],"token_ids":[` + id + `],"prompt":"<hi>"}`)
		})
		if all := strings.Join(asked, " "); string(got) != v.want || all != v.asked {
			t.Errorf("%s %s %s: got %q, want %q; asked\n%s, want\n%s", v.kind, v.path, v.body, got, v.want, all, v.asked)
		}
	}
	raw := questionOf(t, chat, `{`+hi+`}`)
	raw.Raw = true
	if (&Engine{Type: Dynamo}).Tokenize(raw, func(string, []byte) (int, []byte) { return 200, []byte(`{"tokens":[1]}`) }) != nil {
		t.Error("a Dynamo was asked to apply an unwanted template")
	}
}

// FuzzTokenize has engines with any answers: the questions are JSON, and the result
// is a list of token ids.
func FuzzTokenize(f *testing.F) {
	for k := range Names {
		for _, answer := range []string{`{"tokens":[1, 2],"token_ids":[3]}`, `[{"token_ids":[4]}]`, `{"prompt":"x"}`, `[]`, `{"tokens":[[1]]}`, `{"tokens":[-1]}`} {
			f.Add([]byte(answer), []byte(`{"tokens":[5]}`), []byte(`{"messages":[],"prompt":"\u00e9"}`), uint8(k), uint16(200), uint16(403))
		}
	}
	f.Fuzz(func(t *testing.T, first, second, body []byte, kind uint8, status1, status2 uint16) {
		if !json.Valid(body) {
			return
		}
		for _, path := range paths {
			r, err := api.Parse(api.For(path), body, api.Options{})
			if err != nil {
				return
			}
			q := &Question{API: r.API.Name(), Body: r.Editor(body), Text: r.PromptText(body)}
			asked := 0
			got := (&Engine{Type: Names[int(kind)%len(Names)]}).Tokenize(q, func(path string, body []byte) (int, []byte) {
				if asked++; !json.Valid(body) {
					t.Fatalf("%s is asked for %s", path, body)
				}
				if asked == 1 {
					return int(status1), first
				}
				return int(status2), second
			})
			var ids []uint32
			if got != nil && (json.Unmarshal(got, &ids) != nil || len(ids) == 0 || asked == 0 || bytes.ContainsAny(got, " \n")) {
				t.Fatalf("%s and %s: got %s", first, second, got)
			}
			if again, _ := json.Marshal(ids); got != nil && !bytes.Equal(again, got) {
				t.Fatalf("%s, as JSON %s", got, again)
			}
			if asked > 2 {
				t.Fatal(fmt.Sprint(asked, " questions"))
			}
		}
	})
}
