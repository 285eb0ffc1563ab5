package api

import "github.com/caddy-kvrouter/kvrouter/handler/rawjson"

// pooled is an API that ends with the prompt: /v1/embeddings, and vLLM's and
// SGLang's /classify and /pooling. Its input is text or token ids, one or
// many, or a list of messages.
type pooled struct{ name string }

func (a pooled) Name() string { return a.name }
func (pooled) Work() Work     { return Prefill }
func (pooled) shape() shape   { return shapeOpenAI }

func (pooled) field(p *parse, key []byte, v rawjson.Span) {
	switch string(key) {
	case "input", "text": // SGLang's /classify says text
		p.main = v
	case "input_ids", "prompt_token_ids":
		p.ids = v
	case "messages":
		p.other = v
	}
}

func (pooled) prompt(p *parse) {
	b := p.body
	switch {
	case p.ids.HasContent(b):
		p.input(p.ids)
	case p.main.HasContent(b):
		p.input(p.main)
	default:
		p.chat(p.other)
	}
}

func (pooled) begin(*Answer) {}

func (pooled) event(a *Answer, b []byte, i int) bool { return a.result(b, i) }

// result reads the answer to a request without a decode phase: it is done if
// it has results.
func (a *Answer) result(b []byte, i int) bool {
	if b[i] == '[' { // SGLang's, to a batch
		a.bearing, a.done = true, true
		return true
	}
	c := rawjson.Enter(b, i)
	for c.Next() {
		key := c.Key()
		v := c.Value()
		switch string(key) {
		case "data", "results", "scores", "embedding":
			if v.First(b) == '[' {
				a.bearing, a.done = true, true
			}
		case "usage":
			if v.First(b) == '{' {
				a.usage(b, v)
			}
		case "meta_info":
			count(&a.prompt, b, readMeta(b, v).prompt)
		case "error":
			a.fault(b, v)
		case "object":
			a.object(b, v)
		}
	}
	return c.Err == nil
}
