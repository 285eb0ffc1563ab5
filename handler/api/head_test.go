package api

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// common returns how many leading blocks two requests share, 0 if their roots
// differ.
func common(t *testing.T, a API, one, other string) (n int) {
	t.Helper()
	r, o := mustParse(t, a, one), mustParse(t, a, other)
	if r.Root != o.Root {
		return 0
	}
	for n < len(r.Blocks) && n < len(o.Blocks) && r.Blocks[n] == o.Blocks[n] {
		n++
	}
	return n
}

// Some templates write the tools first, some the system prompt: what is equal
// in one of them alone is no common beginning.
func TestToolsAndSystemAgreeTogetherOrNotAtAll(t *testing.T) {
	long := strings.Repeat("what a tool does ", 30)
	request := func(tool, system, user string) string {
		return fmt.Sprintf(`{"tools":[{"type":"function","function":{"name":%q,"description":%q}}],"messages":[{"role":"system","content":%q},{"role":"user","content":%q}]}`, tool, long, system+long, user)
	}
	base := request("f", "be kind", "hello")
	if n := common(t, chat{}, base, request("f", "be kind", "hello there, how are you")); n < 50 {
		t.Errorf("%d blocks are shared with another question", n)
	}
	if n := common(t, chat{}, base, request("f", "be rude", "hello")); n != 0 {
		t.Errorf("%d blocks are shared with another system prompt", n)
	}
	if n := common(t, chat{}, base, request("g", "be kind", "hello")); n != 0 {
		t.Errorf("%d blocks are shared with another tool", n)
	}
	if n := common(t, chat{}, base, strings.Replace(base, `"description"`, `"parameters":{"type":"object"},"description"`, 1)); n != 0 {
		t.Errorf("%d blocks are shared with a tool that has other parameters", n)
	}
	if n := common(t, chat{}, base, strings.Replace(base, `"description"`, `"strict":false,"description"`, 1)); n != 0 {
		t.Errorf("%d blocks are shared with a tool that is strict or not", n)
	}
	// Without the head's key, each is what it begins with: the system prompt, then the tools.
	plain := func(body string) []uint64 {
		r := mustParse(t, chat{}, body)
		for i := range r.Head.Blocks {
			r.Blocks[i] ^= r.Head.Key
		}
		return r.Blocks
	}
	own := plain(base)
	for _, other := range []string{request("g", "be kind", "hello"), fmt.Sprintf(`{"messages":[{"role":"system","content":%q},{"role":"user","content":"a"}]}`, "be kind"+long)} {
		n := 0
		for b := plain(other); n < len(b) && own[n] == b[n]; n++ {
		}
		if n != 32 {
			t.Errorf("%d blocks of the system prompt are shared without the head's key", n)
		}
	}
	one := fmt.Sprintf(`{"messages":[{"role":"system","content":%q},{"role":"user","content":"a"}]}`, long)
	if n := common(t, chat{}, one, strings.Replace(one, `"a"`, `"b"`, 1)); n < 25 {
		t.Errorf("without tools %d blocks of the system prompt are shared", n)
	}
}

// What changes the whole prompt, or its place in the cache, keeps chains apart.
// What changes only the end of the prompt does not.
func TestWhatChangesThePromptSeparates(t *testing.T) {
	text := strings.Repeat("hello you ", 20)
	with := func(member string) string {
		return `{"model":"m",` + member + `"messages":[{"role":"user","content":"` + text + `"}]}`
	}
	plain := with("")
	seen := map[uint64]string{mustParse(t, chat{}, plain).Root: "nothing"}
	for _, m := range []string{
		`"chat_template":"x",`, `"chat_template_kwargs":{"a":1},`, `"chat_template_kwargs":{"a":2},`, `"reasoning_effort":"low",`,
		`"reasoning_effort":"high",`, `"add_special_tokens":false,`, `"truncate_prompt_tokens":5,`, `"mm_processor_kwargs":{"f":2},`,
		`"extra_key":"k",`, `"lora_request":{"lora_name":"a"},`, `"lora":[{"id":0}],`, `"lora_path":["a"],`, `"lora_path":["b"],`, `"cache_salt":["a"],`,
	} {
		root := mustParse(t, chat{}, with(m)).Root
		if other, twice := seen[root]; twice {
			t.Errorf("%s is read as %s", m, other)
		}
		seen[root] = m
	}
	for _, m := range []string{
		`"chat_template_kwargs":{"enable_thinking":false},`, `"chat_template_kwargs":{},`, `"lora_path":null,`, `"cache_salt":"",`,
		`"reasoning_effort":null,`, `"temperature":0.3,`,
	} {
		if mustParse(t, chat{}, with(m)).Root != mustParse(t, chat{}, plain).Root {
			t.Errorf("%s separates", m)
		}
	}
	effort := []uint64{
		mustParse(t, chat{}, `{"reasoning_effort":"low","messages":[{"role":"user","content":"a"}]}`).Root,
		mustParse(t, responses{}, `{"reasoning":{"effort": "low","summary":"auto"},"input":"a"}`).Root,
		mustParse(t, messages{}, `{"output_config":{"effort":"low"},"messages":[{"role":"user","content":"a"}]}`).Root,
	}
	if effort[0] != effort[1] || effort[0] != effort[2] {
		t.Errorf("an effort differs by its name: %x", effort)
	}
}

// What stands in ids for images looks alike.
func TestPromptsThatAreNotUnderstoodHaveNoIdentity(t *testing.T) {
	ids := "[" + strings.Repeat("7,", 40) + "7]"
	for body, a := range map[string]API{
		`{"token_ids":` + ids + `,"features":{"mm_hashes":{"image":["a"]}}}`:                                                            tokensIn{},
		`{"input_ids":` + ids + `,"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}}]}]}`:               chat{},
		`{"prompt":"hello","prompt_embeds":"AAAA"}`:                                                                                     completions{},
		`{"text":"one","image_data":"a"}`:                                                                                               generate{},
		`{"messages":[{"role":"user","content":[` + strings.Repeat(`{"type":"image"},`, maxParts) + `{"type":"image"},{"text":"x"}]}]}`: chat{},
	} {
		if r := mustParse(t, a, body); r.Kind != None || r.Blocks != nil {
			t.Errorf("%.60s has %d blocks of kind %d", body, len(r.Blocks), r.Kind)
		}
	}
	if r := mustParse(t, tokensIn{}, `{"token_ids":`+ids+`,"features":null}`); r.Kind != Tokens {
		t.Error("no features count")
	}
}

func TestMediaOfARequestAreBounded(t *testing.T) {
	body := `{"messages":[{"role":"user","content":[` + strings.Repeat(`{"type":"image_url","image_url":"x"},`, 1000) + `"x"]}]}`
	if r := mustParse(t, chat{}, body); r.MediaTokens != maxMediaTokens || r.Media != 1000 {
		t.Errorf("%d parts, %d tokens", r.Media, r.MediaTokens)
	}
	one := `{"messages":[{"role":"user","content":[{"text":"look","image_url":{"url":"%s"}}]}]}`
	if a, b := mustParse(t, chat{}, fmt.Sprintf(one, "a")), mustParse(t, chat{}, fmt.Sprintf(one, "b")); a.Media != 1 || slices.Equal(a.Blocks, b.Blocks) {
		t.Error("an image in a part without a type does not count")
	}
}

// Claude Code writes its first block anew for each request; engines drop it.
func TestBillingHeadersAreLeftOut(t *testing.T) {
	system := `{"system":[%s{"type":"text","text":"be kind"}],"messages":[{"role":"user","content":"` + strings.Repeat("hello ", 30) + `"}]}`
	plain := fmt.Sprintf(system, "")
	for _, cch := range []string{"1", "2"} {
		body := fmt.Sprintf(system, `{"type":"text","text":"x-anthropic-billing-header: cc_version=1; cch=`+cch+`;"},`)
		if r, want := mustParse(t, messages{}, body), mustParse(t, messages{}, plain); !slices.Equal(r.Blocks, want.Blocks) {
			t.Error("the billing header counts")
		}
	}
}

// The usage is read even if an answer with results is too long to be kept.
func TestUsageOfLongResults(t *testing.T) {
	embedding := `{"embedding":[` + strings.Repeat("0.123456,", 20000) + `0]},`
	answer := []byte(`{"object":"list","data":[` + strings.Repeat(embedding, 60) + `{}],"model":"m","usage":{"prompt_tokens":77,"total_tokens":77}}`)
	for _, size := range []int{4096, 100_000, len(answer)} {
		n := observe(mustParse(t, pooled{}, `{"input":"hello"}`), false)
		for p := range slices.Chunk(answer, size) {
			n.Write(p)
			if len(n.body) > 2*maxResult {
				t.Fatalf("%d bytes are kept", len(n.body))
			}
		}
		n.Finish()
		if prompt, _, _ := n.Usage(); prompt != 77 || !n.Done() {
			t.Errorf("in reads of %d: %d prompt tokens, done %v", size, prompt, n.Done())
		}
	}
}
