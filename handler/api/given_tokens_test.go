package api

import (
	"bytes"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
)

// TestGivenTokensAreThePrompt gives requests of all forms the same token ids: they
// are as one whose prompt is these ids.
func TestGivenTokensAreThePrompt(t *testing.T) {
	const ids = "[1, 22,333 ,4444,55555,666666,7777777,88888888,4294967295,10]"
	want := mustParse(t, completions{}, `{"model":"m","cache_salt":"s","lora":"l","prompt":`+ids+`}`)
	if want.Kind != Tokens || want.Tokens != 10 || len(want.Blocks) != 2 {
		t.Fatalf("%+v", want)
	}
	const of = `"model":"m","cache_salt":"s","lora":"l"`
	for _, v := range []struct{ path, body string }{
		{"/v1/completions", `{` + of + `,"prompt":"text"}`},
		{"/v1/completions", `{` + of + `,"prompt":["a","batch"]}`},
		{"/v1/completions", `{` + of + `,"prompt":[1,2,3]}`},
		{"/v1/completions", `{` + of + `}`},
		{"/v1/completions", `{` + of + `,"prompt":"text","add_special_tokens":false}`},
		{"/v1/chat/completions", `{` + of + `,"messages":[{"role":"user","content":"hi"}]}`},
		{"/v1/chat/completions", `{` + of + `,"reasoning_effort":"low","chat_template":"x","chat_template_kwargs":{"a":1},"messages":[{"role":"user","content":"hi"}]}`},
		{"/generate", `{` + of + `,"text":"hi"}`},
		{"/inference/v1/generate", `{` + of + `,"token_ids":[9,9,9,9]}`},
	} {
		body := []byte(v.body)
		r, err := Parse(For(v.path), body, testOptions)
		if err != nil {
			t.Fatal(err)
		}
		raw := []byte(ids)
		ok := r.Give(raw, testOptions)
		clear(raw)
		if !ok || r.Kind != Tokens || r.Tokens != want.Tokens || !slices.Equal(r.Blocks, want.Blocks) || r.Root != want.Root || r.Bytes != 0 || r.Answers() != 1 {
			t.Errorf("%s: %v, kind %d, %d tokens, root %x, want %x", v.body, ok, r.Kind, r.Tokens, r.Root, want.Root)
		}
		if r.PromptText(body) != nil || r.IDs(body) != nil || r.Continues() {
			t.Errorf("%s: the body's prompt is still there", v.body)
		}
		r.SetSalt("other")
		if r.Root == want.Root {
			t.Errorf("%s: another salt has the same root", v.body)
		}
	}
}

// TestChains has prompts of token ids in blocks of further sizes.
func TestChains(t *testing.T) {
	const ids = "1, 22,333 ,4444,55555,666666,7777777,88888888,4294967295,10"
	o := testOptions
	o.Sizes = []int{1, 4, 7, 16}
	parse := func(path, body string) *Request {
		t.Helper()
		r, err := Parse(For(path), []byte(body), o)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	r := parse("/v1/completions", `{"prompt":[`+ids+`]}`)
	given := parse("/v1/completions", `{"prompt":"x"}`)
	if len(given.Chains) != 0 || !given.Give([]byte("["+ids+"]"), o) {
		t.Fatalf("text has %d chains, or takes no ids", len(given.Chains))
	}
	var tokens []uint32
	for _, id := range strings.Split(ids, ",") {
		n, _ := strconv.ParseUint(strings.TrimSpace(id), 10, 32)
		tokens = append(tokens, uint32(n))
	}
	for i, size := range o.Sizes {
		key := cache.TokenHash(o.Seed)
		want := key.AppendBlocks(nil, tokens, size)
		for _, r := range []*Request{r, given} {
			if c := r.Chains[i]; c.BlockSize != size || !slices.Equal(c.Blocks, want) {
				t.Errorf("blocks of %d: %x of %d, want %x", size, c.Blocks, c.BlockSize, want)
			}
		}
	}
	for path, body := range map[string]string{
		"/generate":              `{"input_ids":[` + ids + `],"image_data":"x"}`,
		"/inference/v1/generate": `{"token_ids":[` + ids + `],"features":{"mm_hashes":{}}}`,
		"/v1/completions":        `{"prompt":[` + ids + `],"extra_key":"x"}`,
		"/v1/chat/completions":   `{"messages":[{"role":"user","content":"hi"}]}`,
	} {
		if r := parse(path, body); len(r.Chains) != 0 {
			t.Errorf("%s has %d chains", body, len(r.Chains))
		}
	}
	if r := parse("/v1/chat/completions", `{"messages":[],"input_ids":[`+ids+`]}`); len(r.Chains) != len(o.Sizes) {
		t.Errorf("input_ids have %d chains", len(r.Chains))
	}
}

// TestGivenTokensThatAreNotAll has bodies of which an engine computes more than
// the ids it is given, and lists of something else: the body's prompt stays.
func TestGivenTokensThatAreNotAll(t *testing.T) {
	const image = `{"type":"image_url","image_url":{"url":"http://x/y"}}`
	for _, v := range []struct{ path, body, ids string }{
		{"/v1/chat/completions", `{"messages":[{"role":"user","content":[` + image + `]}]}`, "[1,2,3,4]"},
		{"/v1/chat/completions", `{"messages":[],"input_ids":[1,2]}`, "[1,2,3,4]"},
		{"/v1/completions", `{"prompt":"x","prompt_token_ids":[1,2]}`, "[1,2,3,4]"},
		{"/v1/completions", `{"prompt":"x","prompt_embeds":"AAAA"}`, "[1,2,3,4]"},
		{"/generate", `{"text":"x","input_embeds":[[0.5]]}`, "[1,2,3,4]"},
		{"/generate", `{"text":"x","image_data":"http://x/y"}`, "[1,2,3,4]"},
		{"/generate", `{"image_data":"http://x/y"}`, "[1,2,3,4]"},
		{"/inference/v1/generate", `{"token_ids":[1],"features":{"a":1}}`, "[1,2,3,4]"},
		{"/v1/completions", `{"prompt":"a long text, which is not what is computed"}`, "[]"},
		{"/v1/completions", `{"prompt":"a long text, which is not what is computed"}`, "[1,2,3,4,4294967296]"},
		{"/v1/completions", `{"prompt":"a long text, which is not what is computed"}`, `"x"`},
		{"/v1/completions", `{"prompt":"a long text, which is not what is computed"}`, ""},
	} {
		r, err := Parse(For(v.path), []byte(v.body), testOptions)
		if err != nil {
			t.Fatal(err)
		}
		want := mustParse(t, For(v.path), v.body)
		if r.Give([]byte(v.ids), testOptions) || r.Kind != want.Kind || !slices.Equal(r.Blocks, want.Blocks) || r.Root != want.Root || r.Tokens != want.Tokens || r.Bytes != want.Bytes {
			t.Errorf("%s with %s: kind %d, %d blocks, %d tokens", v.body, v.ids, r.Kind, len(r.Blocks), r.Tokens)
		}
	}
}

// FuzzGive gives requests lists of anything: what is taken is what it is as a
// prompt of its own.
func FuzzGive(f *testing.F) {
	for _, ids := range []string{"[1,2,3,4,5]", "[ 1 , 22,333]", "[]", "[1,-1]", "[[1]]", `["x"]`, "[4294967296]", "[1e3]", "7"} {
		f.Add([]byte(ids))
	}
	f.Fuzz(func(t *testing.T, ids []byte) {
		if ids = bytes.TrimSpace(ids); !json.Valid(ids) {
			return
		}
		want, err := Parse(completions{}, slices.Concat([]byte(`{"prompt":`), ids, []byte(`}`)), testOptions)
		if err != nil {
			return
		}
		r := mustParse(t, completions{}, `{"prompt":"a text of more than one block"}`)
		ok := r.Give(ids, testOptions)
		if one := want.Kind == Tokens && want.ids.End > 0; ok != one {
			t.Fatalf("%s: taken %v, as a prompt it is of kind %d", ids, ok, want.Kind)
		}
		if ok && (r.Tokens != want.Tokens || r.Root != want.Root || !slices.Equal(r.Blocks, want.Blocks)) {
			t.Fatalf("%s: %d tokens, want %d", ids, r.Tokens, want.Tokens)
		}
		if !ok && r.Kind != Text {
			t.Fatalf("%s: kind %d", ids, r.Kind)
		}
	})
}
