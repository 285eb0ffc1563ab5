package api

import (
	"bytes"
	"strings"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

const (
	thinkOpen = "<think>"
	thinkShut = "</think>"
)

// thinks returns whether a piece of the text has reasoning that an engine without a
// reasoning parser leaves there. Such a text begins with <think>, or has a </think>,
// which is alone if the template wrote the opening. Both are one token in most models,
// and so in one piece. Templates drop reasoning from earlier turns.
func (a *Answer) thinks(raw []byte) bool {
	if bytes.Contains(raw, []byte(thinkShut)) {
		return true
	}
	if a.spoke {
		return false
	}
	text := strings.TrimSpace(rawjson.Text(raw))
	a.spoke = text != ""
	return strings.HasPrefix(text, thinkOpen)
}

// chatText reads a piece of a message's text, given between its quotes.
func (a *Answer) chatText(raw []byte) {
	a.repeat.chat = true
	if a.predictable && (a.calls.open || a.thinks(raw)) {
		a.unpredictable()
	}
	a.text(raw)
}
