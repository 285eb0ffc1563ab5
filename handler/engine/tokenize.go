package engine

import (
	"net/http"

	"github.com/caddy-kvrouter/kvrouter/handler/api"
	"github.com/caddy-kvrouter/kvrouter/handler/nvext"
	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/tidwall/gjson"
)

// Post returns what a server answers to a POST request with a JSON body: the
// status, and the whole body. The status is 0 if there was no answer, or too long
// a one.
type Post func(path string, body []byte) (status int, answer []byte)

// Question is a request whose prompt's token ids are wanted. The prompt is text
// alone: what media become is known to engines only when they compute them.
type Question struct {
	// API is the name of the client's API.
	API string
	// Body is the request's body. Nothing else may be changed in it.
	Body *api.Editor
	// Text is the prompt as a JSON string, nil if it is a conversation.
	Text []byte
	// Raw says that the client wants no template to be applied.
	Raw bool
}

// Tokenize asks the engine for the token ids that it would compute for a request, and returns them as a JSON list without spaces. It returns nil if the
// engine has no tokenizer to be asked, does not answer as one, or would be asked
// for something else than it computes. Nothing is computed for it.
func (e *Engine) Tokenize(q *Question, post Post) []byte {
	switch q.API {
	case apiChat:
		if q.Text != nil {
			return nil
		}
	case apiCompletions:
		if q.Text == nil {
			return nil
		}
	case apiGenerate:
		if q.Text == nil || e.Type != SGLang {
			return nil
		}
	default:
		return nil
	}
	switch e.Type {
	case VLLM:
		return q.askVLLM(post)
	case SGLang:
		return q.askSGLang(post)
	case LlamaCpp:
		return q.askLlamaCpp(post)
	case Dynamo:
		return q.askDynamo(post)
	}
	return nil // TensorRT-LLM has no tokenizer that can be asked
}

// Paths of tokenizers.
const (
	pathTokenize = "/tokenize"
	pathTemplate = "/apply-template" // llama.cpp
)

// whole returns the body without what an engine other than Dynamo must not see,
// or would make a stream of.
func (q *Question) whole() []byte {
	q.Body.CutNVExt()
	q.Body.Cut("stream")
	q.Body.Cut("stream_options")
	return q.Body.Apply()
}

// only returns a JSON object of these members of the body, as far as they are
// there.
func (q *Question) only(names ...string) []byte {
	var o object
	for _, name := range names {
		o.add(name, q.Body.Value(name))
	}
	return o.end()
}

// says tells whether the body says something in one of these members.
func (q *Question) says(names ...string) bool {
	for _, name := range names {
		if !isNull(q.Body.Value(name)) {
			return true
		}
	}
	return false
}

// object is a JSON object that is being written. Its names need no escapes.
type object struct{ text []byte }

// add adds a member, unless its value is nil.
func (o *object) add(name string, value []byte) {
	if value == nil {
		return
	}
	mark := byte(',')
	if o.text == nil {
		mark = '{'
	}
	o.text = append(append(append(o.text, mark, '"'), name...), `":`...)
	o.text = append(o.text, value...)
}

func (o *object) end() []byte {
	if o.text == nil {
		return []byte("{}")
	}
	return append(o.text, '}')
}

// tokensIn returns the token ids in a member of an answer, which is an object or
// a list of one. It returns nil if there are none, or the list has something else.
func tokensIn(status int, answer []byte, member string) []byte {
	if status != http.StatusOK || !gjson.ValidBytes(answer) {
		return nil
	}
	in := gjson.ParseBytes(answer)
	if in.IsArray() {
		if in.Get("#").Int() != 1 {
			return nil
		}
		in = in.Get("0")
	}
	list := in.Get(member)
	if !list.IsArray() {
		return nil
	}
	raw := []byte(list.Raw)
	ids := nvext.AppendIDs(nil, raw, rawjson.Span{End: len(raw)})
	if len(ids) == 0 {
		return nil
	}
	return nvext.AppendTokens(raw[:0], ids) // it is no longer than that
}
