package engine

import (
	"cmp"
	"net/http"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/tidwall/gjson"
)

// LlamaCpp is llama.cpp's server.
const LlamaCpp = "llamacpp"

// llamaCpp takes no salt: each slot keeps the cache of its last prompt, and any other
// prompt may share it.
var llamaCpp = kind{
	name: LlamaCpp, owner: "llamacpp", shows: (*server).isLlamaCpp, read: (*server).readLlamaCpp,
	paths:      []string{"/completion", "/infill", "/embedding", "/reranking"},
	steers:     []steering{{member: "id_slot", grant: nvext.Pins}},
	adapt:      (*adapter).toLlamaCpp,
	tokenize:   (*Question).askLlamaCpp,
	continues:  []string{api.NameChat, api.NameMessages},
	textMember: "content", specialMember: "add_special",
	unlimited: true, cutsAnswers: true,
	loads: llamaCppLoads,
}

func (s *server) isLlamaCpp() bool {
	props := s.json("/props")
	return props.Get("total_slots").Exists() && props.Get("default_generation_settings").Exists()
}

// readLlamaCpp reads /props of llama.cpp's server. Its cache has no blocks: each
// slot keeps its latest prompt, and the server keeps further ones in host memory
// (--cache-ram). KVTokens is the context of all slots together. Without --cache-ram,
// it is too much for slots that share one cache: see --kv-unified.
func (s *server) readLlamaCpp(info *Info) {
	props := s.json("/props")
	info.Version = cleaned(props.Get("build_info").Str)
	info.MaxRunning = within(count(props.Get("total_slots")), 1<<16)
	now, older := props.Get("default_generation_settings.n_ctx"), props.Get("n_ctx")
	info.ContextTokens = cmp.Or(count(now), count(older))
	info.KVTokens = info.ContextTokens * int64(max(1, info.MaxRunning))
}

// toLlamaCpp sets the members of llama.cpp's server, which ignores unknown ones:
// older versions do not limit reasoning.
func (f *adapter) toLlamaCpp() {
	if f.takes(MaxThinkingTokens, f.on(api.NameChat) && f.Settings.ThinkingBudget != Off) {
		f.integer("thinking_budget_tokens", int64(f.Ext.MaxThinkingTokens.Value))
	}
}

// askLlamaCpp lets llama.cpp apply the chat template and tokenize the result, as
// it does for a chat that it answers (tools/server).
func (q *Question) askLlamaCpp(post Post) []byte {
	text := q.Text
	if q.API == api.NameChat {
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
