package engine

import (
	"net/http"

	"github.com/tidwall/gjson"
)

// askSGLang asks SGLang's tokenizer. Versions of before 2026 know prompts only,
// and refuse conversations; newer ones take in of a conversation what is named
// here (python/sglang/srt/entrypoints/openai/serving_tokenize.py).
func (q *Question) askSGLang(post Post) []byte {
	if q.says("chat_template", "reasoning", "truncate_prompt_tokens", "suffix") {
		return nil
	}
	var body []byte
	if q.API == apiChat {
		body = q.only("model", "messages", "tools", "tool_choice", "reasoning_effort", "continue_final_message", "chat_template_kwargs")
	} else {
		var o object
		o.add("model", q.Body.Value("model"))
		o.add("prompt", q.Text)
		body = o.end()
	}
	status, answer := post(pathTokenize, body)
	return tokensIn(status, answer, "tokens")
}

// askLlamaCpp has llama.cpp apply the chat's template, and make tokens of what
// comes of that, as it does with a chat that it answers (tools/server).
func (q *Question) askLlamaCpp(post Post) []byte {
	text := q.Text
	if q.API == apiChat {
		status, answer := post(pathTemplate, q.whole())
		prompt := gjson.GetBytes(answer, "prompt")
		if status != http.StatusOK || prompt.Type != gjson.String || !gjson.ValidBytes(answer) {
			return nil
		}
		text = []byte(prompt.Raw)
	}
	var o object
	o.add("content", text)
	o.add("add_special", []byte("true"))
	o.add("parse_special", []byte("true"))
	status, answer := post(pathTokenize, o.end())
	return tokensIn(status, answer, "tokens")
}

// askDynamo asks a Dynamo frontend, of which newer ones have a tokenizer with
// vLLM's form (lib/llm/src/http/service/tokenize.rs). Theirs applies the template
// always.
func (q *Question) askDynamo(post Post) []byte {
	if q.Raw {
		return nil
	}
	return q.askTokenizer(post)
}
