package engine

import (
	"net/http"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/tidwall/gjson"
)

func (s *server) isLlamaCpp() bool {
	props := s.json("/props")
	return props.Get("total_slots").Exists() && props.Get("default_generation_settings").Exists()
}

// readLlamaCpp reads /props of llama.cpp's server. Its cache has no blocks: each
// slot keeps its latest prompt. Each slot reports the size of the whole cache,
// unless the slots split it. KVTokens is the smaller size, which is certain.
func (s *server) readLlamaCpp(info *Info) {
	props := s.json("/props")
	info.Version = cleaned(props.Get("build_info").Str)
	info.MaxRunning = within(count(props.Get("total_slots")), 1<<16)
	info.ContextTokens = count(props.Get("default_generation_settings.n_ctx"))
	orDefault(&info.ContextTokens, count(props.Get("n_ctx"))) // older versions
	info.KVTokens = info.ContextTokens
}

// toLlamaCpp sets the members of llama.cpp's server, which ignores unknown ones:
// older versions do not limit reasoning.
func (f *fit) toLlamaCpp() {
	if f.takes(MaxThinkingTokens, f.on(apiChat) && f.Settings.ThinkingBudget != Off) {
		f.integer("thinking_budget_tokens", int64(f.Ext.MaxThinkingTokens.Value))
	}
}

// askLlamaCpp lets llama.cpp apply the chat template and tokenize the result, as
// it does for a chat that it answers (tools/server).
func (q *Question) askLlamaCpp(post Post) []byte {
	text := q.Text
	if q.API == apiChat {
		status, answer := post("/apply-template", q.whole())
		prompt := gjson.GetBytes(answer, "prompt")
		if status != http.StatusOK || prompt.Type != gjson.String || !gjson.ValidBytes(answer) {
			return nil
		}
		text = []byte(prompt.Raw)
	}
	var o rawjson.Object
	o.Open()
	o.Raw("content", text)
	o.Raw("add_special", []byte("true"))
	o.Raw("parse_special", []byte("true"))
	return tokenize(post, &o)
}
