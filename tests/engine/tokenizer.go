package engine

import (
	"strings"
	"unicode/utf8"
)

// The tokenizer is made up, but has what matters of a real one. English text has
// about four bytes a token, ids fit 31 bits, and text comes back exactly. A
// text's tokens, except the last, stay the same when more text is appended. It
// has no table: an id is the bytes that it stands for.
//
// A token is a special one, or up to four ASCII bytes, of which only the last may
// be a newline, or one other rune.
const (
	asciiBase = 16 // the special tokens are below
	runeBase  = asciiBase + 128 + 128*128 + 128*128*128 + 128*128*128*128
	// vocabulary is how many ids there are without Config.Words.
	vocabulary = runeBase + utf8.MaxRune + 1
)

// specials are the tokens that stand for themselves.
var specials = [...]string{"<|endoftext|>", "<|im_start|>", "<|im_end|>"}

// endToken ends an answer.
const endToken = uint32(2)

// special returns the id of the special token at the beginning of text.
func special(text string) (uint32, bool) {
	if text[0] != '<' {
		return 0, false
	}
	for id, s := range specials {
		if strings.HasPrefix(text, s) {
			return uint32(id), true
		}
	}
	return 0, false
}

// tokens returns the tokens of a text. first returns the one at the beginning, and its bytes.
func tokens(text string, first func(string) (uint32, int)) []uint32 {
	out := make([]uint32, 0, len(text)/4+8)
	for len(text) > 0 {
		id, n := first(text)
		out = append(out, id)
		text = text[n:]
	}
	return out
}

// tokenize returns the tokens of a text.
func (e *Engine) tokenize(text string) []uint32 {
	if e.cfg.Words {
		return tokens(text, firstWord)
	}
	return tokens(text, firstRun)
}

// firstRun returns the token at the beginning of text, and its bytes.
func firstRun(text string) (uint32, int) {
	if id, ok := special(text); ok {
		return id, len(specials[id])
	}
	if text[0] >= utf8.RuneSelf {
		r, n := utf8.DecodeRuneInString(text)
		return runeBase + uint32(r), n
	}
	n := run(text)
	return packed(text[:n]), n
}

// run returns the length of the ASCII token at the beginning of text.
func run(text string) int {
	n := 1
	for ; n < 4 && n < len(text); n++ {
		if text[n-1] == '\n' || text[n] >= utf8.RuneSelf {
			break
		}
		if _, ok := special(text[n:]); ok {
			break
		}
	}
	return n
}

// packed returns the id of one to four ASCII bytes: the shorter ones first, then
// by value.
func packed(s string) uint32 {
	base, span, value := uint32(asciiBase), uint32(128), uint32(s[0])
	for i := 1; i < len(s); i++ {
		base += span
		span *= 128
		value = value*128 + uint32(s[i])
	}
	return base + value
}

// tokenText returns the text that a token stands for.
func tokenText(id uint32) string {
	switch {
	case id < uint32(len(specials)):
		return specials[id]
	case id >= wordsEnd || id < asciiBase:
		return "" // accepted in prompts
	case id >= letterBase:
		return wordText(id)
	case id >= runeBase:
		return string(rune(id - runeBase))
	}
	var buf [4]byte
	value, span, n := id-asciiBase, uint32(128), 1
	for value >= span {
		value -= span
		span *= 128
		n++
	}
	for i := n - 1; i >= 0; i-- {
		buf[i] = byte(value % 128)
		value /= 128
	}
	return string(buf[:n])
}

// detokenize returns the text of tokens.
func detokenize(ids []uint32) string {
	var b strings.Builder
	for _, id := range ids {
		b.WriteString(tokenText(id))
	}
	return b.String()
}
