package api

import "encoding/binary"

// Marks divide the canonical text of a chat. They are bytes that UTF-8 never
// has, so no text can be taken for them:
//
//	[markTools tools] [markTools functions]
//	for each message: markMessage role markSep content tool calls
//	content:          text, and markMedia + 16 bytes for each other part
//	each tool call:   markCall name markSep arguments
//
// What an engine's template does with these it does to the same text in the
// same way, so two prompts with one canonical beginning have one beginning in
// tokens, whatever the template. Left out is what clients and engines
// rewrite between turns: ids of tool calls, names, reasoning.
const (
	markMessage = 0xFF
	markSep     = 0xFE
	markMedia   = 0xFD
	markCall    = 0xFC
	markTools   = 0xFB
)

// chat is /v1/chat/completions.
type chat struct{}

func (chat) Name() string { return "chat" }

func (chat) field(p *parse, key []byte, v span) {
	switch string(key) {
	case "messages":
		p.main = v
	case "tools":
		p.tools = v
	case "functions":
		p.functions = v
	}
}

func (chat) prompt(p *parse) {
	b := p.body
	if p.main.first(b) != '[' {
		return
	}
	p.begin(p.main.end - p.main.start + p.tools.end - p.tools.start)
	for _, v := range [...]span{p.tools, p.functions} {
		if hasMembers(b, v) {
			p.hash.AddByte(markTools)
			p.hash.AddJSON(v.of(b))
		}
	}
	n := 0
	c := enter(b, p.main.start, 2)
	for c.next() {
		if b[c.i] != '{' {
			c.value()
			continue
		}
		if c.i = p.message(c.i); c.i < 0 {
			break
		}
		n++
	}
	if n == 0 {
		return
	}
	p.req.Kind = Text
	p.req.Bytes = p.hash.Bytes()
}

// message writes the message at body[i] and returns the index behind it, or -1
// if it is malformed. Its members come in any order, so they are found first.
func (p *parse) message(i int) int {
	b := p.body
	var role, content, calls, call span
	c := enter(b, i, 3)
	for c.next() {
		key := c.key()
		v := c.value()
		switch string(key) {
		case "role":
			role = v
		case "content":
			content = v
		case "tool_calls":
			calls = v
		case "function_call":
			call = v
		}
	}
	if c.err != nil {
		return -1
	}
	h := &p.hash
	h.AddByte(markMessage)
	if raw, ok := role.str(b); ok {
		h.AddString(raw)
	}
	h.AddByte(markSep)
	switch content.first(b) {
	case '"':
		raw, _ := content.str(b)
		h.AddString(raw)
	case '[':
		p.parts(content)
	}
	if calls.first(b) == '[' {
		c := enter(b, calls.start, 0)
		for c.next() {
			v := c.value()
			if v.first(b) != '{' {
				continue
			}
			h.addCall(b, readCall(b, v))
		}
	}
	if call.first(b) == '{' {
		h.addCall(b, readFunction(b, call))
	}
	return c.i
}

// parts writes a content array: its texts one after the other, so that a text
// is the same in one part, in several, or as a plain string.
func (p *parse) parts(content span) {
	b := p.body
	c := enter(b, content.start, 0)
	for c.next() {
		v := c.value()
		switch v.first(b) {
		case '"':
			raw, _ := v.str(b)
			p.hash.AddString(raw)
		case '{':
			p.part(v)
		}
	}
}

func (p *parse) part(v span) {
	b := p.body
	var kind, txt span
	c := enter(b, v.start, 0)
	for c.next() {
		key := c.key()
		v := c.value()
		switch string(key) {
		case "type":
			kind = v
		case "text":
			txt = v
		}
	}
	name, _ := kind.str(b)
	switch string(name) {
	case "", "text", "input_text", "output_text":
		if raw, ok := txt.str(b); ok {
			p.hash.AddString(raw)
			return
		}
		if len(name) > 0 {
			return
		}
	case "thinking", "redacted_thinking", "reasoning":
		return
	}
	p.req.Media++
	sum := mediaDigest(b, v, name, p.opt.Seed)
	p.hash.AddByte(markMedia)
	p.hash.Add(sum[:])
}

// mediaDigest hashes a part that is not text by what it shows: the URL or
// data in the member that its type names ({"type":"image_url","image_url":
// {"url":"..."}}), so that hints beside it do not matter; the whole part if
// it has another form.
func mediaDigest(b []byte, v span, kind []byte, seed uint64) [16]byte {
	var d digest
	var key [8]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	d.add(key[:])
	if raw := mediaPayload(b, v, kind); len(raw) > 0 {
		d.add(kind)
		d.add([]byte{markSep})
		d.addString(raw)
	} else {
		d.addJSON(v.of(b))
	}
	return d.sum()
}

// mediaPayload returns the string that stands for a part, raw; nil if there
// is none.
func mediaPayload(b []byte, v span, kind []byte) []byte {
	if len(kind) == 0 {
		return nil
	}
	var value span
	c := enter(b, v.start, 0)
	for c.next() {
		key := c.key()
		same := string(key) == string(kind)
		if v := c.value(); same {
			value = v
		}
	}
	if raw, ok := value.str(b); ok {
		return raw
	}
	if value.first(b) != '{' {
		return nil
	}
	var payload []byte
	best := 0
	c = enter(b, value.start, 0)
	for c.next() {
		rank := 0
		switch string(c.key()) {
		case "url":
			rank = 4
		case "data":
			rank = 3
		case "file_data":
			rank = 2
		case "file_id":
			rank = 1
		}
		v := c.value()
		if raw, ok := v.str(b); ok && rank > 0 && rank >= best {
			payload, best = raw, rank
		}
	}
	return payload
}

// toolCall is where the parts of a tool call are.
type toolCall struct {
	index, id, name, args span
}

// readCall reads an element of tool_calls, whole or a delta of one.
func readCall(b []byte, v span) (t toolCall) {
	var index, id, fn span
	c := enter(b, v.start, 0)
	for c.next() {
		key := c.key()
		v := c.value()
		switch string(key) {
		case "index":
			index = v
		case "id":
			id = v
		case "function", "custom":
			if v.first(b) == '{' {
				fn = v
			}
		}
	}
	if fn.end > 0 {
		t = readFunction(b, fn)
	}
	t.index, t.id = index, id
	return t
}

func readFunction(b []byte, v span) (t toolCall) {
	c := enter(b, v.start, 0)
	for c.next() {
		key := c.key()
		v := c.value()
		switch string(key) {
		case "name":
			t.name = v
		case "arguments", "input":
			t.args = v
		}
	}
	return t
}

func (h *Hasher) addCall(b []byte, t toolCall) {
	h.AddByte(markCall)
	if raw, ok := t.name.str(b); ok {
		h.AddString(raw)
	}
	h.AddByte(markSep)
	h.addArgs(b, t.args)
}

// addArgs writes a call's arguments: the string, or the value as compact JSON
// where a client or an engine sends an object in its place.
func (h *Hasher) addArgs(b []byte, args span) {
	if raw, ok := args.str(b); ok {
		h.AddString(raw)
	} else if v := args.of(b); !isNull(v) {
		h.AddJSON(v)
	}
}

// hasMembers is whether a value is neither absent, null nor empty.
func hasMembers(b []byte, v span) bool {
	switch v.first(b) {
	case '[', '{':
		at := skipSpace(b, v.start+1)
		return at < v.end-1
	case '"':
		return v.end-v.start > 2
	}
	return v.end > v.start && !isNull(v.of(b))
}
