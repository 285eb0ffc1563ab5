package api

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"unicode/utf16"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/caddy-kvrouter/kvrouter/kvscore"
	"github.com/caddy-kvrouter/kvrouter/kvscore/cache"
	"github.com/zeebo/xxh3"
)

const testSeed = 0x5eed

var testOptions = Options{TextBlock: 16, BlockSize: 4, Seed: testSeed}

func mustParse(t testing.TB, a API, body string) *Request {
	t.Helper()
	r, err := Parse(a, []byte(body), testOptions)
	if err != nil {
		t.Fatalf("parsing %s: %v", body, err)
	}
	return r
}

// blocksOf hashes the full blocks of text the plain way.
func blocksOf(text []byte) (out []uint64) {
	defer func(whole []byte) {
		n := sealedHead(whole)
		if n == 0 {
			return
		}
		size := testOptions.TextBlock
		head := bytes.Clone(whole[n/size*size : n])
		for _, block := range out[:n/size] {
			head = binary.LittleEndian.AppendUint64(head, block)
		}
		sum := xxh3.Hash128(head).Bytes()
		for i := range out[:n/size] {
			out[i] ^= binary.LittleEndian.Uint64(sum[:]) &^ cache.KindMask
		}
	}(text)
	kind := uint8(0)
	for len(text) >= testOptions.TextBlock {
		block := text[:testOptions.TextBlock]
		if n := len(out); n < 64 || n%4 == 0 {
			kind = kvscore.TextKind(block)
		}
		out = append(out, kvscore.TextBlock(xxh3.HashSeed(block, testSeed), kind))
		text = text[testOptions.TextBlock:]
	}
	return out
}

// sealedHead returns the length of tools and system prompt, 0 if there are not
// both.
func sealedHead(text []byte) int {
	first := bytes.IndexByte(text, markMessage)
	if len(text) == 0 || text[0] != markTool || first < 0 {
		return 0
	}
	at := first
	for at < len(text) {
		role := text[at+1:]
		if !bytes.HasPrefix(role, []byte("system\xfe")) && !bytes.HasPrefix(role, []byte("developer\xfe")) {
			break
		}
		next := bytes.IndexByte(role, markMessage)
		if next < 0 {
			return len(text)
		}
		at += 1 + next
	}
	if at == first {
		return 0
	}
	return at
}

// call and message are the model of a conversation that the reader is
// checked against. A call's arguments are keys and values that are strings, or
// a text that is no object.
type call struct {
	name, args string
	kv         []string
}

type message struct {
	role, text string
	calls      []call
}

// canonicalArgs is what the marks' documentation says of arguments.
func (c call) canonicalArgs() string {
	if c.kv == nil {
		return strings.TrimLeft(c.args, " \n\t\r")
	}
	out := "{"
	for i := 0; i < len(c.kv); i += 2 {
		if i > 0 {
			out += ","
		}
		out += `"` + string(spelled(c.kv[i])) + `":"` + string(spelled(c.kv[i+1])) + `"`
	}
	return out + "}"
}

// canonical is the form documented at the marks, written from the model.
func canonical(tools string, msgs []message) []byte {
	var b bytes.Buffer
	for _, t := range modelTools(tools) {
		b.WriteByte(markTool)
		b.Write(spelled(t.Name))
		b.WriteByte(markSep)
		b.Write(spelled(t.Description))
		b.WriteByte(markSep)
		b.Write(t.Parameters)
	}
	for _, m := range msgs {
		b.WriteByte(markMessage)
		b.WriteString(m.role)
		b.WriteByte(markSep)
		b.Write(spelled(m.text))
		for _, c := range m.calls {
			b.WriteByte(markCall)
			b.Write(spelled(c.name))
			b.WriteByte(markSep)
			b.WriteString(c.canonicalArgs())
		}
	}
	return b.Bytes()
}

type modelTool struct {
	Name, Description string
	Parameters        json.RawMessage
}

// modelTools reads chat's form of tools.
func modelTools(tools string) (out []modelTool) {
	var list []struct{ Function modelTool }
	if tools != "" {
		if err := json.Unmarshal([]byte(tools), &list); err != nil {
			panic(err)
		}
	}
	for _, t := range list {
		var b bytes.Buffer
		if err := json.Compact(&b, t.Function.Parameters); err != nil {
			panic(err)
		}
		t.Function.Parameters = b.Bytes()
		out = append(out, t.Function)
	}
	return out
}

// speller writes JSON in one of the many ways that mean the same.
type speller struct{ *rand.Rand }

func (s speller) space() string {
	return []string{"", "", "", " ", "\n\t", "\r\n"}[s.IntN(6)]
}

func (s speller) str(v string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range v {
		switch {
		case r == '"' || r == '\\' || r < ' ' || s.IntN(12) == 0:
			b.WriteString(s.escape(r))
		default:
			b.WriteRune(r)
		}
	}
	b.WriteByte('"')
	return b.String()
}

func (s speller) escape(r rune) string {
	if s.IntN(2) == 0 {
		switch r {
		case '"', '\\', '/':
			return `\` + string(r)
		case '\n':
			return `\n`
		case '\t':
			return `\t`
		case '\r':
			return `\r`
		case '\b':
			return `\b`
		case '\f':
			return `\f`
		}
	}
	var b strings.Builder
	for _, u := range utf16.AppendRune(nil, r) {
		h := "0000" + strconv.FormatUint(uint64(u), 16)
		h = h[len(h)-4:]
		if s.IntN(2) == 0 {
			h = strings.ToUpper(h)
		}
		b.WriteString(`\u` + h)
	}
	return b.String()
}

// object writes members, given as key and raw value, in random order.
func (s speller) object(kv ...string) string {
	n := len(kv) / 2
	var b strings.Builder
	b.WriteString("{" + s.space())
	for i, j := range s.Perm(n) {
		if i > 0 {
			b.WriteString(s.space() + "," + s.space())
		}
		b.WriteString(s.str(kv[2*j]) + s.space() + ":" + s.space() + kv[2*j+1])
	}
	b.WriteString(s.space() + "}")
	return b.String()
}

// members writes an object's members in order, with values that are strings.
func (s speller) members(kv []string) string {
	var b strings.Builder
	b.WriteString("{" + s.space())
	for i := 0; i < len(kv); i += 2 {
		if i > 0 {
			b.WriteString(s.space() + "," + s.space())
		}
		b.WriteString(s.str(kv[i]) + s.space() + ":" + s.space() + s.str(kv[i+1]))
	}
	b.WriteString(s.space() + "}")
	return b.String()
}

// args writes a call's arguments as the text that they are.
func (s speller) args(c call) string {
	if c.kv == nil {
		return c.args
	}
	return s.space() + s.members(c.kv) + s.space()
}

// call invents one.
func (s speller) call(plain bool) call {
	c := call{name: "fn_" + strings.TrimSpace(s.words(3)), kv: []string{}}
	if plain && s.IntN(4) == 0 {
		c.kv, c.args = nil, "x"+s.words(30)
		return c
	}
	for range s.IntN(4) {
		c.kv = append(c.kv, s.words(5), s.words(20))
	}
	return c
}

func (s speller) array(items []string) string {
	return "[" + s.space() + strings.Join(items, s.space()+","+s.space()) + s.space() + "]"
}

var alphabet = []rune("abcdefgh    ....\n\n\t\"\\/{}[]<>éüß漢字😀🎉\u2028\u0001")

func (s speller) words(most int) string {
	var b strings.Builder
	for range s.IntN(most + 1) {
		b.WriteRune(alphabet[s.IntN(len(alphabet))])
	}
	return b.String()
}

// split cuts v between runes into pieces, some of them empty.
func (s speller) split(v string) (out []string) {
	var b strings.Builder
	for _, r := range v {
		b.WriteRune(r)
		if s.IntN(4) == 0 {
			out = append(out, b.String())
			b.Reset()
		}
		if s.IntN(20) == 0 {
			out = append(out, "")
		}
	}
	return append(out, b.String())
}

// content writes a text as a string or as parts.
func (s speller) content(v string) string {
	if v == "" && s.IntN(2) == 0 {
		return []string{"null", `""`, "[]"}[s.IntN(3)]
	}
	if s.IntN(2) == 0 {
		return s.str(v)
	}
	var parts []string
	for _, p := range s.split(v) {
		if s.IntN(4) == 0 {
			parts = append(parts, s.object("type", `"thinking"`, "thinking", s.str("hm")))
		}
		parts = append(parts, s.object("type", `"text"`, "text", s.str(p)))
	}
	return s.array(parts)
}

func (s speller) message(m message) string {
	kv := []string{"role", s.str(m.role)}
	if m.text != "" || s.IntN(2) == 0 {
		kv = append(kv, "content", s.content(m.text))
	}
	if s.IntN(3) == 0 {
		kv = append(kv, "reasoning_content", s.str(s.words(20)), "name", s.str("bob"))
	}
	if len(m.calls) > 0 {
		var calls []string
		for _, c := range m.calls {
			calls = append(calls, s.object("id", s.str("call_"+strconv.Itoa(s.Int())), "type", `"function"`,
				"function", s.object("name", s.str(c.name), "arguments", s.str(s.args(c)))))
		}
		kv = append(kv, "tool_calls", s.array(calls))
	} else if s.IntN(4) == 0 {
		kv = append(kv, "tool_calls", []string{"[]", "null"}[s.IntN(2)])
	}
	return s.object(kv...)
}

func (s speller) request(tools string, msgs []message) string {
	var list []string
	for _, m := range msgs {
		list = append(list, s.message(m))
	}
	kv := []string{"model", s.str("llama"), "messages", s.array(list), "stream", "true"}
	if tools != "" {
		kv = append(kv, "tools", tools)
	} else if s.IntN(2) == 0 {
		kv = append(kv, "tools", []string{"null", "[]", "[ ]"}[s.IntN(3)])
	}
	return s.object(kv...)
}

// stream writes an answer as engines do, in random deltas, and cuts the bytes
// into random reads.
func (s speller) stream(m message) [][]byte {
	var b strings.Builder
	eol := []string{"\n", "\r\n", "\r"}[s.IntN(3)]
	chunk := func(delta, finish string) {
		for s.IntN(6) == 0 {
			b.WriteString(": ping" + eol + eol)
		}
		if s.IntN(4) == 0 {
			b.WriteString("event: chunk" + eol + "id: 7" + eol)
		}
		c := s.object("id", `"c-1"`, "choices", s.array([]string{
			s.object("index", "0", "delta", delta, "logprobs", "null", "finish_reason", finish),
		}))
		c = strings.NewReplacer("\r\n", " ", "\n", eol+"data: ").Replace(c)
		b.WriteString("data: " + c + eol + eol)
	}
	chunk(s.object("role", `"assistant"`, "content", `""`), "null")
	for _, p := range s.split(m.text) {
		chunk(s.object("content", s.str(p), "reasoning_content", "null"), "null")
	}
	for i, c := range m.calls {
		head, args := "", s.split(s.args(c))
		if s.IntN(2) == 0 {
			head, args = args[0], args[1:]
		}
		index := strconv.Itoa(i)
		chunk(s.object("tool_calls", s.array([]string{s.object("index", index, "id", s.str("x"+index), "type", `"function"`,
			"function", s.object("name", s.str(c.name), "arguments", s.str(head)))})), "null")
		for _, p := range args {
			chunk(s.object("tool_calls", s.array([]string{s.object("index", index,
				"function", s.object("arguments", s.str(p)))})), "null")
		}
	}
	chunk("{}", `"stop"`)
	b.WriteString(`data: {"choices":[],"usage":{"prompt_tokens":9}}` + eol + eol + "data: [DONE]" + eol + eol)
	return s.reads([]byte(b.String()))
}

func (s speller) reads(all []byte) (out [][]byte) {
	for len(all) > 0 {
		n := 1 + s.IntN(min(len(all), 1+s.IntN(200)))
		out = append(out, all[:n])
		all = all[n:]
	}
	return out
}

// plain writes the same answer as one JSON body.
func (s speller) plain(m message) [][]byte {
	m.role = "assistant"
	body := s.object("choices", s.array([]string{
		s.object("index", "0", "message", s.plainMessage(m), "finish_reason", `"stop"`),
	}), "usage", `{"prompt_tokens":9}`)
	return s.reads([]byte(body))
}

func (s speller) plainMessage(m message) string {
	kv := []string{"role", `"assistant"`, "content", s.str(m.text)}
	if m.text == "" {
		kv[3] = "null"
	}
	var calls []string
	for _, c := range m.calls {
		calls = append(calls, s.object("id", `"i"`, "type", `"function"`,
			"function", s.object("name", s.str(c.name), "arguments", s.str(s.args(c)))))
	}
	return s.object(append(kv, "tool_calls", s.array(calls))...)
}

// observed is an Answer that is shown the bytes of a stream, too.
type observed struct {
	*Answer
	frames rawjson.Framer
}

func observe(r *Request, stream bool) *observed { return &observed{Answer: r.NewAnswer(stream)} }

func (o *observed) Write(p []byte) { o.show(p, false) }

func (o *observed) show(p []byte, over bool) {
	if !o.stream {
		o.Answer.Write(p)
		return
	}
	o.frames.Write(p, over)
	for f, ok := o.frames.Next(); ok; f, ok = o.frames.Next() {
		o.Event(f)
	}
}

func (o *observed) Finish() {
	o.show(nil, true)
	o.Answer.Finish()
}
