package engine

import "net/http"

// askVLLM asks for the request as vLLM would compute it, at the path of its API
// with /render behind. That takes in all that a body may say, but is there only
// with --enable-scale-out. Else the tokenizer is asked, which is always there and
// takes in the most usual (vllm/entrypoints/serve/tokenize/protocol.py).
func (q *Question) askVLLM(post Post) []byte {
	path := "/v1/completions/render" // answers with a list of one
	if q.API == apiChat {
		path = "/v1/chat/completions/render"
	}
	status, answer := post(path, q.whole())
	switch status {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound, http.StatusMethodNotAllowed:
		return q.askTokenizer(post)
	}
	return tokensIn(status, answer, "token_ids")
}

// askTokenizer asks vLLM's tokenizer, or one with the same form. What it does not
// take in, and would change the prompt, must not be there.
func (q *Question) askTokenizer(post Post) []byte {
	if q.says("reasoning_effort", "reasoning", "documents", "truncate_prompt_tokens", "suffix") {
		return nil
	}
	var body []byte
	if q.API == apiChat {
		body = q.only("model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens",
			"chat_template", "chat_template_kwargs")
	} else {
		body = q.only("model", "prompt", "add_special_tokens")
	}
	status, answer := post(pathTokenize, body)
	return tokensIn(status, answer, "tokens")
}
