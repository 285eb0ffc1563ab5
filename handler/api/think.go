package api

import (
	"bytes"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

const (
	thinkOpen = "<think>"
	thinkShut = "</think>"
)

// thinkWatch finds reasoning that an engine without a reasoning parser leaves in
// the text. Such a text begins with <think>, or has a </think>, which is alone if
// the template wrote the opening. Templates drop reasoning from earlier turns.
type thinkWatch struct {
	past       bool // the text does not begin with <think>
	open, shut int  // matched so far
}

// saw reads on. It returns true once it has found reasoning.
func (w *thinkWatch) saw(raw []byte) bool {
	if w.past && w.shut == 0 && bytes.IndexByte(raw, '<') < 0 && bytes.IndexByte(raw, '\\') < 0 {
		return false
	}
	r := rawjson.Runs{Raw: raw}
	for p := r.Next(); p != nil; p = r.Next() {
		if slices.ContainsFunc(p, w.byte) {
			return true
		}
	}
	return false
}

func (w *thinkWatch) byte(c byte) bool {
	if !w.past && (w.open > 0 || c != ' ' && c != '\n' && c != '\r' && c != '\t') {
		if c == thinkOpen[w.open] {
			if w.open++; w.open == len(thinkOpen) {
				return true
			}
		} else {
			w.past = true
		}
	}
	switch c {
	case thinkShut[w.shut]:
		w.shut++
	case '<':
		w.shut = 1
	default:
		w.shut = 0
	}
	return w.shut == len(thinkShut)
}

// chatText reads a piece of a message's text, given between its quotes.
func (a *Answer) chatText(raw []byte) {
	a.repeat.chat = true
	if len(raw) > 0 && (a.predictable || a.track.on) && (a.calls.open || a.think.saw(raw)) {
		a.predictable = false
		a.stay(StaysReasoning)
	}
	a.text(raw)
}

// withoutThinking cuts such reasoning off, as templates do. It returns nothing if
// the text is reasoning to its end.
func withoutThinking(raw []byte) []byte {
	if !bytes.Contains(raw, []byte("think")) && bytes.IndexByte(raw, '\\') < 0 {
		return raw
	}
	text := []byte(rawjson.Text(raw))
	i := bytes.LastIndex(text, []byte(thinkShut))
	switch {
	case i >= 0:
		text = bytes.TrimLeft(text[i+len(thinkShut):], " \t\r\n")
	case bytes.HasPrefix(bytes.TrimLeft(text, " \t\r\n"), []byte(thinkOpen)):
		return nil
	default:
		return raw
	}
	out := make([]byte, 0, len(text))
	for k := range text {
		out = spell(out, text[k:k+1])
	}
	return out
}
