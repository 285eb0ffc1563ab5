package api

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// Reasons why a stream cannot go on at another engine. Metrics have them as labels.
const (
	NotResumableAPI       = "api"        // the API has no way to continue an answer
	NotResumableChoices   = "choices"    // several answers or prompts, beam search
	NotResumableFormat    = "format"     // a grammar restarts at its root
	NotResumableLength    = "length"     // more text than the router keeps
	NotResumableLogprobs  = "logprobs"   // those of the first tokens would count other contexts
	NotResumableMemory    = "memory"     // there was no room for its text or its body
	NotResumablePrompt    = "prompt"     // the prompt has a form that cannot be continued
	NotResumableReasoning = "reasoning"  // the answer has reasoning
	NotResumableTokenIDs  = "token_ids"  // the prompt is token ids
	NotResumableToolCall  = "tool_call"  // the answer has a tool call
	NotResumableUnread    = "unreadable" // an event has an unknown form
)

// Ways in which the rest of an answer is asked for.
const (
	WayWhole = "whole" // the client has no text, so the request is sent again
	WayText  = "text"  // the prompt goes on with the answer's text
	WayExact = "exact" // the prompt goes on with the answer's token ids, and with what parsers have seen so far
)

// track is what the client has of a stream, for the case that it must go on elsewhere.
type track struct {
	on           bool
	first        []byte // an object with id, created and model of the first event; nil if they are too long
	notResumable string // why the stream cannot go on elsewhere; empty if it can
	request      string // the same, from the request: why it cannot once it has text
	events       int    // with data
	aborted      bool   // the engine ended the answer for the reason abort or error
	last         int    // the length of the last piece of text, in bytes of JSON
	blocks       int    // of messages, that have begun
	block        string // the kind of the first of them
	exact        bool   // the answer to a prompt of text goes on by ids, see GoesOnExactly
	reasons      bool   // choices have a finish_reason, if only null
}

// textPerToken is the assumed length of a token's text, in bytes of JSON.
const textPerToken = 8

// Track has the answer keep what Rest needs of up to that many tokens: its text, and with exact the
// ids. room returns whether so many bytes more may be used. body is the request's. Call it before
// the first event.
func (a *Answer) Track(body []byte, tokens int, exact bool, room func(int) bool) {
	t := &a.track
	e := a.req.Editor(body)
	t.on, t.request = true, a.req.whyNotResumable(e)
	switch {
	case t.request != "":
	case a.req.Kind == Tokens:
		t.request = NotResumableTokenIDs
	case !(&Rest{Way: WayText, Text: "x", req: a.req}).Fits(e):
		t.request = NotResumablePrompt
	}
	if t.exact = exact; exact {
		a.ids = idChain{on: true, most: tokens, room: room}
	}
	a.kept.most, a.kept.room = max(a.kept.most, tokens*textPerToken), room
}

func (a *Answer) pinStream(why string) {
	if a.track.notResumable == "" {
		a.track.notResumable = why
	}
}

// begin records that a block of messages begins. Text that goes on is in one block.
func (t *track) begin(kind string) {
	if t.blocks++; t.blocks == 1 {
		t.block = kind
	} else if t.notResumable == "" {
		t.notResumable = NotResumableUnread
	}
}

// seen keeps the identity of the first event.
func (a *Answer) seen(data []byte) {
	t := &a.track
	if t.events++; t.events > 1 {
		return
	}
	var o rawjson.Object
	o.Open()
	for _, name := range identity {
		if v := rawjson.Document(data).Get(data, name); v.Len() > 0 {
			o.Raw(name, v.Of(data))
		}
	}
	if o.Close(); len(o.Buf) <= maxRepeat {
		t.first = o.Buf
	}
}

// identity are the members that are the same in all chunks of a stream.
var identity = [...]string{"id", "created", "model"}

// WhyNotResumable returns why the stream cannot go on elsewhere; empty if it may. A client that has no text
// can get the answer to the whole request.
func (a *Answer) WhyNotResumable() string {
	t := &a.track
	switch {
	case t.notResumable == NotResumableUnread:
		return t.notResumable
	case !a.first && t.events > 0 && !a.req.API.traits().joins:
		return NotResumableAPI
	case !a.first:
		return ""
	case !a.req.API.traits().joinsText:
		return NotResumableAPI
	case t.request != "":
		return t.request
	case a.exactly():
		return ""
	case t.notResumable != "":
		return t.notResumable
	case a.kept.lost:
		return cmp.Or(a.kept.why, NotResumableLength)
	}
	return ""
}

// Tokens returns the number of the answer's tokens that the client has. It is an estimate unless
// exact.
func (a *Answer) Tokens() (n int64, exact bool) {
	switch {
	case a.completion >= 0:
		return a.completion, true
	case a.ids.whole():
		return int64(len(a.ids.ids)), true
	}
	return int64(a.chunks), a.chunks == 0
}

// Retract says that the client does not get the last event, in which the answer failed; with text, that it
// gets the text of it. undo says that it gets it as it is.
func (a *Answer) Retract(text bool) (undo func()) {
	track, finished := a.track, a.finished
	if a.track.aborted {
		a.track.aborted = false
		a.finished--
	}
	if !text {
		if a.track.events--; a.track.events == 0 {
			a.track.first = nil
		}
	}
	return func() { a.track, a.finished = track, finished }
}

// ReasonIn returns why the answer of an event of chat or completions ended, if it has only one.
func ReasonIn(data []byte) (reason rawjson.Span) {
	choices, n := rawjson.Document(data).Get(data, "choices"), 0
	for choice := range choices.Objects(data) {
		choice.Read(data, rawjson.To("finish_reason", &reason))
		n++
	}
	if n != 1 {
		return rawjson.Span{}
	}
	return reason
}

// Revive forgets that the answer has failed or ended: it goes on elsewhere, or for nil with its End.
func (a *Answer) Revive(s *Splicer) {
	a.failed, a.done = 0, false
	a.responseID = ""
	a.ids.lost = a.ids.lost || s != nil && !s.ids && (a.first || len(a.ids.ids) > 0)
}

// Rest is the part of an answer that another engine is asked for.
type Rest struct {
	Way     string
	Text    string // that the prompt goes on with
	Tokens  int64  // of it; the caller may count them better, unless Exact
	Exact   bool
	Splicer *Splicer

	ids  []uint32
	lens []uint16
	req  *Request
}

// IDs returns the ids of the tokens so far, and how many each event had, if the rest is asked for
// with them.
func (r *Rest) IDs() (ids []uint32, lens []uint16) { return r.ids, r.lens }

// Rest returns how to ask for the rest of a stream. body is the request's. The reason is empty,
// or a reason such as NotResumableAPI.
func (a *Answer) Rest(body []byte) (rest *Rest, reason string) {
	if reason = a.WhyNotResumable(); reason != "" {
		return nil, reason
	}
	if a.exactly() {
		rest = a.rest(WayExact)
		rest.ids, rest.lens, rest.Tokens = a.ids.ids, a.ids.lens, int64(len(a.ids.ids))
		rest.Splicer.ids = true
		return rest, ""
	}
	if !a.first {
		return a.rest(WayWhole), ""
	}
	return a.textRest(body), ""
}

// End returns the last event of a stream that lacks nothing else, apart from its usage. It is empty if the
// client lacks more, or if the API has no such event.
func (a *Answer) End() string {
	if a.finished < a.req.Answers() {
		return ""
	}
	switch a.req.API.Name() {
	case NameChat, NameCompletions:
		return "data: [DONE]\n\n"
	case NameMessages:
		return "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"
	}
	return ""
}

func (a *Answer) rest(way string) *Rest {
	s := &Splicer{answer: a, prompt: unknown, cached: unknown, events: a.track.events, blocks: a.track.blocks}
	if way != WayWhole {
		s.prompt, s.cached = a.prompt, a.cached
	}
	return &Rest{Way: way, Exact: true, Splicer: s, req: a.req}
}

// textRest returns how to ask for the rest with the text so far.
func (a *Answer) textRest(body []byte) *Rest {
	rest := a.rest(WayText)
	s := rest.Splicer
	rest.Tokens, rest.Exact = a.Tokens()
	rest.Text = rawjson.Text(a.kept.raw)
	kept := splitAt(rest.Text, stops(a.req.Editor(body)), a.req.API.Name() != NameCompletions)
	if rest.Text, s.duplicate = rest.Text[:kept], rest.Text[kept:]; s.duplicate != "" {
		rest.Exact = false
		if last := a.kept.raw[len(a.kept.raw)-a.track.last:]; strings.HasSuffix(s.duplicate, rawjson.Text(last)) {
			rest.Tokens-- // a token that the engine gives again
		}
	}
	if rest.Text == "" {
		rest.Way, rest.Tokens, rest.Exact = WayWhole, 0, true
	}
	return rest
}

// splitAt returns how much of a text the prompt goes on with. The engine writes what is behind
// that again. That may be the beginning of a stop string, which it would not see in the prompt.
// With trim, white space at the end belongs to it, because templates may cut that off.
func splitAt(text string, stops []string, trim bool) int {
	kept := len(text)
	for _, stop := range stops {
		for n := min(len(stop)-1, len(text)); n > 0; n-- {
			if strings.HasSuffix(text, stop[:n]) {
				kept = min(kept, len(text)-n)
				break
			}
		}
	}
	if trim {
		kept = len(strings.TrimRight(text[:kept], " \t\r\n"))
	}
	return kept
}

func stops(e *rawjson.Editor) (list []string) {
	for _, name := range [...]string{"stop", "stop_sequences"} {
		v := e.At(name)
		if v.First(e.Body) == '"' {
			list = append(list, v.Text(e.Body))
		}
		for v := range v.Elements(e.Body) {
			list = append(list, v.Text(e.Body))
		}
	}
	return list
}

// whyNotResumable returns why the request's answer cannot be continued; empty if it can. e has the body.
func (r *Request) whyNotResumable(e *rawjson.Editor) string {
	switch {
	case e == nil || r.Kind == None:
		return NotResumablePrompt
	case r.Choices > 1 || r.prompts > 1:
		return NotResumableChoices
	}
	for name, v := range e.All() {
		if why := preventing[name]; why != "" && !isFree(name, e.Body, v) {
			return why
		}
	}
	return ""
}

// preventing are the members that keep an answer from being continued, and why.
var preventing = map[string]string{
	"response_format": NotResumableFormat, "tool_choice": NotResumableFormat, "output_config": NotResumableFormat, "structured_outputs": NotResumableFormat,
	"guided_json": NotResumableFormat, "guided_regex": NotResumableFormat, "guided_choice": NotResumableFormat, "guided_grammar": NotResumableFormat,
	"guided_decoding": NotResumableFormat, "structural_tag": NotResumableFormat, "grammar": NotResumableFormat, "json_schema": NotResumableFormat,
	"regex": NotResumableFormat, "ebnf": NotResumableFormat,
	"logprobs": NotResumableLogprobs, "prompt_logprobs": NotResumableLogprobs, "return_logprob": NotResumableLogprobs,
	"use_beam_search": NotResumableChoices,
	"echo":            NotResumablePrompt, "suffix": NotResumablePrompt, "prompt_embeds": NotResumablePrompt, "input_embeds": NotResumablePrompt,
}

// isFree returns whether such a member has a value that lets the answer be continued.
func isFree(key string, body []byte, v rawjson.Span) bool {
	kind := v.Text(body) + v.Get(body, "type").Text(body)
	switch {
	case isNo(v.Of(body)):
		return true
	case key == "response_format":
		return kind == "text"
	case key == "tool_choice":
		return kind == "auto" || kind == "none"
	case key == "output_config":
		return !v.Get(body, "format").HasContent(body)
	}
	return false
}

var limits = [...]string{"max_tokens", "max_completion_tokens", "n_predict"}

// leastLimit is the number of tokens in an answer of completions whose request has no limit.
const leastLimit = 16

// Fits returns whether the prompt can go on with the answer. It spoils the editor.
func (r *Rest) Fits(e *rawjson.Editor) bool {
	return r.Way != WayText || e != nil && r.continuePrompt(e)
}

// Ask edits the request's body, which Fits, so that the engine gives the rest. unlimited: the
// engine sets no limit of its own.
func (r *Rest) Ask(e *rawjson.Editor, unlimited bool) {
	if r.Way == WayWhole {
		return
	}
	if r.Splicer.tokens = r.Tokens; r.Way == WayExact {
		return // the caller of IDs sets the limits
	}
	r.continuePrompt(e)
	limit := func(name string, n, least int64) {
		e.Set(name, strconv.AppendInt(nil, max(n-r.Tokens, least), 10))
	}
	limited := false
	for _, name := range limits {
		if n, ok := integer(e.Value(name)); ok && n > 0 {
			limited = true
			limit(name, n, 1)
		}
	}
	if !limited && r.req.API.Name() == NameCompletions && !unlimited {
		limit("max_tokens", leastLimit, 1)
	}
	if n, ok := integer(e.Value("min_tokens")); ok && n > 0 {
		limit("min_tokens", n, 0)
	}
}

// continuePrompt puts the answer so far behind the prompt.
func (r *Rest) continuePrompt(e *rawjson.Editor) bool {
	text := rawjson.AppendString(nil, r.Text)
	switch r.req.API.Name() {
	case NameChat, NameMessages:
		return appendMessage(e, text)
	case NameCompletions:
		v := e.At("prompt")
		if v.End == 0 {
			return false
		}
		at, add := v.End-1, text[1:len(text)-1]
		for v := range v.Elements(e.Body) { // a list of one text
			at = v.End - 1
		}
		e.Replace(rawjson.Edit{Span: rawjson.Span{Start: at, End: at}, Text: add})
		return true
	}
	return false
}

// appendMessage adds the assistant's message of this text, which is a JSON string. If the last
// message is the assistant's, and to be continued, its text goes on.
func appendMessage(e *rawjson.Editor, text []byte) bool {
	list := e.At("messages")
	var last rawjson.Span
	for v := range list.Elements(e.Body) {
		last = v
	}
	if last.End == 0 {
		return false
	}
	role := last.Get(e.Body, "role").Text(e.Body)
	at, add := list.End-1, slices.Concat([]byte(`,{"role":"assistant","content":`), text, []byte{'}'})
	if string(e.Value("continue_final_message")) == "true" {
		content := last.Get(e.Body, "content")
		if content.First(e.Body) != '"' {
			return false
		}
		at, add = content.End-1, text[1:len(text)-1]
	} else if role == string(roleAssistant) {
		return false
	}
	e.Replace(rawjson.Edit{Span: rawjson.Span{Start: at, End: at}, Text: add})
	return true
}

// Ends returns whether the stream shows that it has ended. Some engines give no reason for the end
// of chats and completions; those that do have the member in each choice.
func (a *Answer) Ends() bool {
	t := a.req.API.traits()
	return t.joins && (t.chunk == "" || !a.first || a.track.reasons)
}
