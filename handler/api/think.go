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

// thinkWatch finds reasoning that an engine without a reasoning parser leaves in
// the text. Such a text begins with <think>, or has a </think>, which is alone if
// the template wrote the opening. Templates drop reasoning from earlier turns.
type thinkWatch struct {
	past bool   // the text does not begin with <think>
	tail []byte // the end of the text, which may begin one of the two
}

// saw reads on. It returns whether there is reasoning in what it has read, of which the rest does not matter.
func (w *thinkWatch) saw(raw []byte) bool {
	if w.past && len(w.tail) == 0 && bytes.IndexByte(raw, '<') < 0 && !bytes.Contains(raw, []byte(`\u003`)) {
		return false
	}
	var buf [128]byte
	text := rawjson.AppendText(append(buf[:0], w.tail...), raw)
	found := bytes.Contains(text, []byte(thinkShut))
	if !w.past {
		text = bytes.TrimLeft(text, " \t\r\n")
		found = found || bytes.HasPrefix(text, []byte(thinkOpen))
		w.past = !strings.HasPrefix(thinkOpen, rawjson.View(text))
	}
	if w.past {
		text = text[max(0, bytes.LastIndexByte(text, '<')):]
		if !strings.HasPrefix(thinkShut, rawjson.View(text)) {
			text = nil
		}
	}
	w.tail = append(w.tail[:0], text...)
	return found
}

// chatText reads a piece of a message's text, given between its quotes.
func (a *Answer) chatText(raw []byte) {
	a.repeat.chat = true
	if len(raw) > 0 && (a.predictable || a.track.on) && (a.calls.open || a.think.saw(raw)) {
		a.predictable = false
		a.pinStream(NotResumableReasoning)
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
