package engine

import (
	"strings"
	"unicode/utf8"
)

// Config.Words cuts text at the borders of words, as real tokenizers do, so that
// the bytes of a token depend on the kind of text. JSON has about 2, short words
// have 3 to 4, long words and Cyrillic have 6. A token is the longest at its
// place of:
//
//   - up to 6 small letters, with the space before them;
//   - up to 3 Cyrillic letters, with the space before them;
//   - up to 3 digits;
//   - up to 4 spaces, tabs and newlines, but for a space before a letter;
//   - up to 2 other ASCII characters, or one other rune, or a special token.
//
// Appending text changes none of a text's tokens but the last one.
const (
	letterBase   = vocabulary // each of the kinds with and without a space before it
	letterSpan   = 27 * 27 * 27 * 27 * 27 * 27
	cyrillicBase = letterBase + 2*letterSpan
	cyrillicSpan = 128 * 128 * 128
	wordsEnd     = cyrillicBase + 2*cyrillicSpan

	mostLetters, mostCyrillic = 6, 3
	firstCyrillic             = 0x400 // 127 letters from here: 0 is none
)

func small(c byte) bool { return c >= 'a' && c <= 'z' }

func blank(c byte) bool { return c == ' ' || c == '\n' || c == '\t' || c == '\r' }

func digit(c byte) bool { return c >= '0' && c <= '9' }

func sign(c byte) bool {
	return c < utf8.RuneSelf && !small(c) && !blank(c) && !digit(c)
}

func cyrillic(text string) bool {
	r, _ := utf8.DecodeRuneInString(text)
	return r >= firstCyrillic && r < firstCyrillic+127
}

// firstWord returns the token at the beginning of text, and its bytes.
func firstWord(text string) (id uint32, n int) {
	if id, ok := special(text); ok {
		return id, len(specials[id])
	}
	spaced, rest := uint32(0), text
	if text[0] == ' ' {
		spaced, rest = 1, text[1:]
	}
	switch c := text[0]; {
	case rest != "" && small(rest[0]):
		return letters(spaced, rest)
	case rest != "" && cyrillic(rest):
		return cyrillics(spaced, rest)
	case blank(c):
		n = blanks(text)
	case digit(c):
		n = prefix(text, 3, digit)
	case sign(c):
		if n = prefix(text, 2, sign); n == 2 {
			if _, ok := special(text[1:]); ok {
				n = 1
			}
		}
	default:
		r, n := utf8.DecodeRuneInString(text)
		return runeBase + uint32(r), n
	}
	return packed(text[:n]), n
}

// prefix returns how many of the first bytes are of one class, most at most.
func prefix(text string, most int, class func(byte) bool) int {
	n := 0
	for n < min(most, len(text)) && class(text[n]) {
		n++
	}
	return n
}

// blanks leaves the last space to the word behind it.
func blanks(text string) int {
	n := prefix(text, 4, blank)
	if n > 1 && n < len(text) && text[n-1] == ' ' && (small(text[n]) || cyrillic(text[n:])) {
		n--
	}
	return n
}

func letters(spaced uint32, text string) (id uint32, n int) {
	n = prefix(text, mostLetters, small)
	for i := range n {
		id = id*27 + uint32(text[i]-'a') + 1
	}
	return letterBase + spaced*letterSpan + id, n + int(spaced)
}

func cyrillics(spaced uint32, text string) (id uint32, n int) {
	for n < 2*mostCyrillic && cyrillic(text[n:]) {
		r, size := utf8.DecodeRuneInString(text[n:])
		id = id*128 + uint32(r-firstCyrillic) + 1
		n += size
	}
	return cyrillicBase + spaced*cyrillicSpan + id, n + int(spaced)
}

// wordText returns the text of a token of letters.
func wordText(id uint32) string {
	base, span, digits, first := uint32(letterBase), uint32(letterSpan), uint32(27), 'a'
	if id >= cyrillicBase {
		base, span, digits, first = cyrillicBase, cyrillicSpan, 128, firstCyrillic
	}
	space := strings.Repeat(" ", int((id-base)/span))
	var runes []rune
	for id = (id - base) % span; id > 0; id /= digits {
		runes = append([]rune{first + rune(id%digits) - 1}, runes...)
	}
	return space + string(runes)
}
