package api

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// The next turn's chain must begin with this turn's prompt and its answer,
// however either side spells them: that is what predictions are for.
func TestNextTurnExtendsPromptAndAnswer(t *testing.T) {
	for seed := range uint64(150) {
		s := speller{rand.New(rand.NewPCG(seed, 1))}
		var tools any
		if s.IntN(2) == 0 {
			tools = []jsonObject{{"type": "function", "function": jsonObject{"name": "f", "description": `a " b  c`, "parameters": jsonObject{"type": "object", "x": []any{1, "a b"}}}}}
		}
		var turns []func() jsonObject
		read := func() *Request {
			var msgs []jsonObject
			for _, m := range turns {
				msgs = append(msgs, m())
			}
			return mustParse(t, chat{}, s.respell(jsonObject{"model": "llama", "messages": msgs, "stream": true, "tools": tools}))
		}
		var predicted []uint64
		for turn := range 4 {
			role, text := []string{"system", "user", "tool"}[s.IntN(3)], s.words(60)
			if turn > 0 {
				role = []string{"user", "tool"}[s.IntN(2)]
			}
			turns = append(turns, func() jsonObject { return s.message(role, text, nil) })
			r, again := read(), read()
			if r.Kind != Text || r.Bytes != again.Bytes || !slices.Equal(r.Blocks, again.Blocks) || !bytes.Equal(r.rest.tail, again.rest.tail) {
				t.Fatalf("seed %d turn %d: the prompt depends on its spelling", seed, turn)
			}
			if len(predicted) > len(r.Blocks) || !slices.Equal(predicted, r.Blocks[:len(predicted)]) {
				t.Fatalf("seed %d turn %d: the turn before has not predicted the prompt's blocks", seed, turn)
			}
			answer := s.words(60)
			var calls []func() jsonObject
			for range s.IntN(3) {
				name, args := s.call()
				calls = append(calls, func() jsonObject {
					return jsonObject{"id": s.words(9), "type": "function", "function": jsonObject{"name": name, "arguments": args()}}
				})
			}
			said := func() (list []jsonObject) {
				for _, c := range calls {
					list = append(list, c())
				}
				return list
			}
			stream := s.IntN(3) > 0
			a := observe(r, stream)
			reads := s.reads([]byte(s.respell(jsonObject{"usage": jsonObject{"prompt_tokens": 9}, "choices": []jsonObject{
				{"index": 0, "finish_reason": "stop", "message": jsonObject{"role": "assistant", "content": answer, "tool_calls": said()}},
			}})))
			if stream {
				reads = s.stream(answer, said())
			}
			for _, p := range reads {
				p = slices.Clone(p)
				a.Write(p)
				clear(p) // it must not have been kept
			}
			a.Finish()
			turns = append(turns, func() jsonObject { return s.message("assistant", answer, said()) })
			if predicted = a.Prediction(); !a.Done() || len(predicted) != len(read().Blocks) {
				t.Fatalf("seed %d turn %d: %d blocks predicted, done %v\n%s", seed, turn, len(predicted), a.Done(), bytes.Join(reads, nil))
			}
			if n, _, cached := a.Usage(); n != 9 || cached != -1 {
				t.Fatalf("seed %d: usage %d, %d", seed, n, cached)
			}
		}
	}
}

func chatBody(messages string) string { return `{"messages":[` + messages + `]}` }

func TestDifferentPromptsDiffer(t *testing.T) {
	pad := ` - some text to fill a block`
	seen := map[string]string{}
	for _, m := range []string{
		`{"role":"user","content":"ab` + pad + `"}`,
		`{"role":"system","content":"ab` + pad + `"}`,
		`{"role":"user","content":"a"},{"role":"user","content":"b` + pad + `"}`,
		`{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://a/1"}}]}`,
		`{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://a/2"}}]}`,
		`{"role":"user","content":[{"type":"video_url","video_url":{"url":"http://a/1"}}]}`,
		`{"role":"user","content":[{"type":"input_audio","input_audio":{"data":"aa","format":"wav"}}]}`,
		`{"role":"user","content":[{"type":"file","file":{"file_id":"f-1"}}]}`,
		`{"role":"user","content":[{"type":"odd","x":1}]}`,
		`{"role":"user","content":[{"type":"odd","x":2}]}`,
		`{"role":"assistant","tool_calls":[{"function":{"name":"a","arguments":"bccccccccccccc"}}]}`,
		`{"role":"assistant","tool_calls":[{"function":{"name":"ab","arguments":"ccccccccccccc"}}]}`,
	} {
		r := mustParse(t, chat{}, chatBody(m))
		key := string(r.rest.tail)
		for _, b := range r.Blocks {
			for i := range 8 {
				key += string([]byte{byte(b >> (8 * i))})
			}
		}
		if other, ok := seen[key]; ok {
			t.Errorf("same:\n%s\n%s", other, m)
		}
		seen[key] = m
	}
}

func TestRequestFields(t *testing.T) {
	r := mustParse(t, chat{}, `{"model":"a\/b","lora_path":"l","cache_salt":"s","stream":true,"n":2,"max_tokens":5,"max_completion_tokens":7,"messages":[]}`)
	if r.Model != "a/b" || r.LoRA != "l" || r.Salt != "s" || !r.Stream || r.Choices != 2 || r.MaxTokens != 7 || r.Kind != None {
		t.Errorf("%+v", r)
	}
	r = mustParse(t, chat{}, `{"max_tokens":1e2,"best_of":3}`)
	if r.MaxTokens != 100 || r.Choices != 3 {
		t.Errorf("%+v", r)
	}
	for _, body := range []string{
		`{}`,
		`{"model":5,"lora_path":["x"],"cache_salt":null,"stream":"yes","n":"2","best_of":-1,"max_tokens":1.5,"messages":{},"tools":7}`,
		`{"messages":"hi","max_completion_tokens":-3}`,
		`{"messages":[1,null,"x",[]],"max_tokens":99999999999999999999999}`,
	} {
		r := mustParse(t, chat{}, body)
		if r.Model+r.LoRA+r.Salt != "" || r.Stream || r.Choices != 1 || r.MaxTokens != 0 || r.Kind != None || r.Blocks != nil {
			t.Errorf("%s: %+v", body, r)
		}
	}
}

func TestRootTellsFieldsApart(t *testing.T) {
	seen := map[uint64]string{}
	for _, body := range []string{
		`{"model":"ab","lora_path":"c"}`, `{"model":"a","lora_path":"bc"}`, `{"model":"ab","cache_salt":"c"}`,
		`{"model":"abc"}`, `{}`, `{"model":"ab","lora_path":"c","prompt":"x"}`, `{"model":"ab","lora_path":"c","prompt":[1]}`,
	} {
		r := mustParse(t, completions{}, body)
		if other, ok := seen[r.Root]; ok {
			t.Errorf("one root: %s %s", other, body)
		}
		seen[r.Root] = body
	}
	a, _ := Parse(chat{}, []byte(`{}`), Options{Seed: 1})
	b, _ := Parse(chat{}, []byte(`{}`), Options{Seed: 2})
	if a.Root == b.Root {
		t.Error("the root is not seeded")
	}
}

func TestFor(t *testing.T) {
	for path, want := range map[string]string{
		"/v1/chat/completions": "chat", "/chat/completions": "chat", "/openai/v1/chat/completions": "chat",
		"/v1/completions": "completions", "/completions": "completions",
		"/v1/xcompletions": "", "/v1/chat/completions/render": "", "/v1/models": "", "": "", "completions": "",
		"/v1/responses": "responses", "/openai/v1/responses": "responses", "/openai/responses": "responses", "/responses": "responses",
		"/v1/responses/resp_1": "", "/v1/responses/resp_1/cancel": "", "/v1/responses/resp_1/input_items": "", "/v1/evals/responses": "",
		"/v1/messages": "messages", "/anthropic/v1/messages": "messages", "/v1/messages/count_tokens": "count_tokens",
		"/v1/messages/batches": "", "/v1/threads/t_1/messages": "", "/v1/threads/v1x/messages": "", "/v1beta/messages": "messages",
		"/generate": "generate", "/v1/generate": "", "/api/generate": "", "/v1/images/generate": "", "/inference/v1/generate": "tokens",
		"/v1/embeddings": "embeddings", "/openai/deployments/ada/embeddings": "embeddings", "/deployments/embeddings": "", "/x/embeddings": "",
		"/rerank": "rerank", "/v1/rerank": "rerank", "/v2/rerank": "rerank", "/score": "score", "/v1/score": "score",
		"/classify": "classify", "/pooling": "pooling", "/v/score": "", "/video/score": "",
	} {
		got := ""
		if a := For(path); a != nil {
			got = a.Name()
		}
		if got != want {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
}

func tokenBlocks(size int, ids ...uint32) []uint64 {
	key := cache.TokenHash(testSeed)
	return key.AppendBlocks(nil, ids, size)
}

func TestCompletionsPrompts(t *testing.T) {
	text := "a text that is longer than two blocks\n"
	for _, c := range []struct {
		prompt      string
		kind        Kind
		blocks      []uint64
		bytes       int64
		tokens      int64
		predictable bool
	}{
		{`"a text that is longer than two blocks\n"`, Text, blocksOf(spelled(text)), 39, 0, true},
		{`[ "a text that is longer than two blocks\u000a" ]`, Text, blocksOf(spelled(text)), 39, 0, true},
		{`["a text that is longer than two blocks\n","\u00e9"]`, Text, blocksOf(spelled(text)), 41, 0, false},
		{`[1,2,3,4294967295,5]`, Tokens, tokenBlocks(4, 1, 2, 3, 4294967295), 0, 5, false},
		{`[[1, 2 ,3,4]]`, Tokens, tokenBlocks(4, 1, 2, 3, 4), 0, 4, false},
		{`[[1,2,3,4],[9,8]]`, Tokens, tokenBlocks(4, 1, 2, 3, 4), 0, 6, false},
		{`[1,2,3,4294967296,5]`, None, nil, 0, 0, false},
		{`[1,2,3,-4]`, None, nil, 0, 0, false},
		{`[1,2,3,4.0]`, None, nil, 0, 0, false},
		{`[1,2,3,"4"]`, None, nil, 0, 0, false},
		{`["a",4]`, None, nil, 0, 0, false},
		{`[[1,2,3,4],5]`, None, nil, 0, 0, false},
		{`[[1,2,3,4],[]]`, None, nil, 0, 0, false},
		{`[]`, None, nil, 0, 0, false},
		{`{}`, None, nil, 0, 0, false},
		{`7`, None, nil, 0, 0, false},
	} {
		r := mustParse(t, completions{}, `{"prompt":`+c.prompt+`}`)
		if r.Kind != c.kind || !slices.Equal(r.Blocks, c.blocks) || r.Bytes != c.bytes || r.Tokens != c.tokens || r.predictable != c.predictable {
			t.Errorf("%s: %+v", c.prompt, r)
		}
	}
}
