package api

import (
	"strconv"
	"strings"
)

// blocks writes a text as Anthropic's blocks.
func (s speller) blocks(text string) (out []string) {
	for _, p := range s.split(text) {
		if p != "" || s.IntN(3) == 0 {
			out = append(out, s.object("type", `"text"`, "text", s.str(p)))
		}
	}
	return out
}

// anthropicContent writes a text as a string or as blocks.
func (s speller) anthropicContent(text string) string {
	if text == "" || s.IntN(2) == 0 {
		return s.str(text)
	}
	return s.array(s.blocks(text))
}

// toolContent is in one block at most: engines put a line break between several.
func (s speller) toolContent(text string) string {
	if text == "" || s.IntN(2) == 0 {
		return s.str(text)
	}
	return s.array([]string{s.object("type", `"text"`, "text", s.str(text))})
}

func (s speller) toolUse(c call) string {
	return s.object("type", `"tool_use"`, "id", `"toolu_1"`, "name", s.str(c.name), "input", s.members(c.kv))
}

// anthropicMessage writes a message and returns how many of the model it took:
// a tool's result may share one with the user's text behind it.
func (s speller) anthropicMessage(msgs []message) (string, int) {
	m := msgs[0]
	switch {
	case m.role == "tool":
		n := 1
		blocks := []string{s.object("type", `"tool_result"`, "tool_use_id", `"toolu_1"`, "content", s.toolContent(m.text))}
		if len(msgs) > 1 && msgs[1].role == "user" && msgs[1].text != "" && s.IntN(2) == 0 {
			blocks = append(blocks, s.blocks(msgs[1].text)...)
			n++
		}
		return s.object("role", `"user"`, "content", s.array(blocks)), n
	case m.role == "assistant" && len(m.calls) > 0:
		var blocks []string
		if s.IntN(2) == 0 {
			blocks = append(blocks, s.object("type", `"thinking"`, "thinking", `"hm"`, "signature", `"x"`))
		}
		blocks = append(blocks, s.blocks(m.text)...)
		for _, c := range m.calls {
			blocks = append(blocks, s.toolUse(c))
		}
		return s.object("role", `"assistant"`, "content", s.array(blocks)), 1
	}
	return s.object("role", `"`+m.role+`"`, "content", s.anthropicContent(m.text)), 1
}

func (s speller) messagesRequest(tools string, msgs []message) string {
	kv := []string{"model", `"llama"`, "max_tokens", "100", "stream", "true"}
	if len(msgs) > 0 && msgs[0].role == "system" {
		kv = append(kv, "system", s.anthropicContent(msgs[0].text))
		msgs = msgs[1:]
	}
	var list []string
	for len(msgs) > 0 {
		m, n := s.anthropicMessage(msgs)
		list = append(list, m)
		msgs = msgs[n:]
	}
	var ts []string
	for _, t := range modelTools(tools) {
		ts = append(ts, s.object("name", s.str(t.Name), "description", s.str(t.Description),
			"input_schema", string(t.Parameters), "cache_control", `{"type":"ephemeral"}`))
	}
	return s.object(append(kv, "messages", s.array(list), "tools", s.array(ts))...)
}

func (s speller) responsesRequest(tools string, msgs []message) string {
	kv := []string{"model", `"llama"`, "stream", "true", "store", "false", "previous_response_id", "null"}
	if len(msgs) > 0 && msgs[0].role == "system" && s.IntN(2) == 0 {
		kv = append(kv, "instructions", s.str(msgs[0].text))
		msgs = msgs[1:]
	}
	var list []string
	for _, m := range msgs {
		list = append(list, s.items(m)...)
	}
	input := s.array(list)
	if len(msgs) == 1 && msgs[0].role == "user" && s.IntN(2) == 0 {
		input = s.str(msgs[0].text)
	}
	var ts []string
	for _, t := range modelTools(tools) {
		ts = append(ts, s.object("type", `"function"`, "name", s.str(t.Name), "description", s.str(t.Description),
			"parameters", string(t.Parameters), "strict", "true"))
	}
	return s.object(append(kv, "input", input, "tools", s.array(ts))...)
}

// items writes a message as items of a response's input.
func (s speller) items(m message) (out []string) {
	if m.role == "tool" {
		output := s.str(m.text)
		if s.IntN(2) == 0 {
			output = s.array([]string{s.object("type", `"input_text"`, "text", s.str(m.text))})
		}
		return []string{s.object("type", `"function_call_output"`, "call_id", `"call_1"`, "output", output)}
	}
	if m.role == "assistant" && s.IntN(3) == 0 {
		out = append(out, s.object("type", `"reasoning"`, "id", `"rs_1"`, "summary", "[]"))
	}
	if m.text != "" || len(m.calls) == 0 {
		content := s.str(m.text)
		if s.IntN(2) == 0 {
			kind := `"input_text"`
			if m.role == "assistant" {
				kind = `"output_text"`
			}
			content = s.array([]string{s.object("type", kind, "text", s.str(m.text), "annotations", "[]")})
		}
		kv := []string{"role", `"` + m.role + `"`, "content", content}
		if s.IntN(2) == 0 {
			kv = append(kv, "type", `"message"`)
		}
		out = append(out, s.object(kv...))
	}
	for _, c := range m.calls {
		out = append(out, s.functionCall(c))
	}
	return out
}

func (s speller) functionCall(c call) string {
	return s.object("type", `"function_call"`, "id", `"fc_1"`, "call_id", `"call_1"`, "status", `"completed"`,
		"name", s.str(c.name), "arguments", s.str(s.args(c)))
}

// events writes typed events, as Anthropic and Responses have them.
type events struct {
	speller
	b   strings.Builder
	eol string
}

var oneLine = strings.NewReplacer("\r\n", " ", "\n", " ")

func (e *events) add(kind string, kv ...string) {
	for e.IntN(8) == 0 {
		e.b.WriteString("event: ping" + e.eol + `data: {"type": "ping"}` + e.eol + e.eol)
	}
	data := e.object(append(kv, "type", `"`+kind+`"`)...)
	data = oneLine.Replace(data)
	e.b.WriteString("event: " + kind + e.eol + "data: " + data + e.eol + e.eol)
}

func (s speller) events() *events {
	return &events{speller: s, eol: []string{"\n", "\r\n"}[s.IntN(2)]}
}

func (s speller) messagesStream(m message) [][]byte {
	e := s.events()
	e.add("message_start", "message", `{"type":"message","role":"assistant","content":[],"stop_reason":null,"usage":{"input_tokens":9,"output_tokens":0}}`)
	index := 0
	block := func(start string, deltas ...string) {
		i := strconv.Itoa(index)
		index++
		e.add("content_block_start", "index", i, "content_block", start)
		for _, d := range deltas {
			e.add("content_block_delta", "index", i, "delta", d)
		}
		e.add("content_block_stop", "index", i)
	}
	if m.text != "" || s.IntN(2) == 0 {
		var deltas []string
		for _, p := range s.split(m.text) {
			deltas = append(deltas, s.object("type", `"text_delta"`, "text", s.str(p)))
		}
		block(`{"type":"text","text":""}`, deltas...)
	}
	for _, c := range m.calls {
		if s.IntN(4) == 0 { // a server that has the call whole
			block(s.toolUse(c))
			continue
		}
		var deltas []string
		if len(c.kv) > 0 || s.IntN(2) == 0 {
			for _, p := range s.split(s.args(c)) {
				deltas = append(deltas, s.object("type", `"input_json_delta"`, "partial_json", s.str(p)))
			}
		}
		block(s.object("type", `"tool_use"`, "id", `"t"`, "name", s.str(c.name), "input", "{}"), deltas...)
	}
	e.add("message_delta", "delta", `{"stop_reason":"end_turn"}`, "usage", `{"output_tokens":5}`)
	e.add("message_stop")
	return s.reads([]byte(e.b.String()))
}

func (s speller) messagesPlain(m message) [][]byte {
	blocks := s.blocks(m.text)
	for _, c := range m.calls {
		blocks = append(blocks, s.toolUse(c))
	}
	return s.reads([]byte(s.object("type", `"message"`, "role", `"assistant"`, "content", s.array(blocks),
		"stop_reason", `"end_turn"`, "usage", `{"input_tokens":9,"output_tokens":5}`)))
}

func (s speller) response(m message) string {
	var output []string
	if m.text != "" || len(m.calls) == 0 {
		output = append(output, s.object("type", `"message"`, "role", `"assistant"`, "content",
			s.array([]string{s.object("type", `"output_text"`, "text", s.str(m.text), "annotations", "[]")})))
	}
	for _, c := range m.calls {
		output = append(output, s.functionCall(c))
	}
	return s.object("object", `"response"`, "status", `"completed"`, "output", s.array(output), "error", "null",
		"usage", `{"input_tokens":9,"output_tokens":5,"input_tokens_details":null}`)
}

func (s speller) responsesStream(m message) [][]byte {
	e := s.events()
	e.add("response.created", "response", `{"object":"response","status":"in_progress","output":[]}`)
	for _, p := range s.split(m.text) {
		e.add("response.output_text.delta", "delta", s.str(p))
	}
	for _, c := range m.calls {
		e.add("response.output_item.added", "item", s.object("type", `"function_call"`, "name", s.str(c.name), "arguments", `""`))
		for _, p := range s.split(s.args(c)) {
			e.add("response.function_call_arguments.delta", "delta", s.str(p))
		}
	}
	e.add("response.completed", "response", s.response(m))
	return s.reads([]byte(e.b.String()))
}

func (s speller) responsesPlain(m message) [][]byte {
	return s.reads([]byte(s.response(m)))
}
