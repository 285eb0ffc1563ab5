package engine

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// checkText checks both tokenizers. A text comes back from its tokens, its tokens
// come back from the text, and appending changes none but the last.
func checkText(t *testing.T, s, more string) {
	t.Helper()
	checkCut(t, s, more, firstRun, vocabulary)
	checkCut(t, s, more, firstWord, wordsEnd)
}

func checkCut(t *testing.T, s, more string, first func(string) (uint32, int), end uint32) {
	t.Helper()
	ids := tokens(s, first)
	if got := detokenize(ids); got != s {
		t.Fatalf("%q came back as %q", s, got)
	}
	for _, id := range ids {
		if id >= end {
			t.Fatalf("%q has token %d", s, id)
		}
	}
	if strings.Contains(s, "<") || strings.Contains(more, "<") {
		return // half of a special token may be completed
	}
	longer := tokens(s+more, first)
	if n := max(0, len(ids)-1); len(longer) < n || !slices.Equal(longer[:n], ids[:n]) {
		t.Fatalf("%q: appending %q changed %v to %v", s, more, ids, longer)
	}
}

func TestTokenizer(t *testing.T) {
	for s, want := range map[string]int{
		"":                              0,
		"a":                             1,
		"abcdefgh":                      2,
		"abcdefghi":                     3,
		"ab\ncd":                        2,
		"\n\n":                          2,
		"añb":                           3,
		"日本":                            2,
		"hello<|im_end|>\n":             4,
		"<|im_start|>assistant\nbakemi": 6,
		"a<b":                           1,
	} {
		if got := tokens(s, firstRun); len(got) != want {
			t.Errorf("%q has tokens %v, want %d of them", s, got, want)
		}
		for _, more := range []string{"a", "xyz and more", "\n", "é"} {
			checkText(t, s, more)
		}
	}
	english := strings.Repeat("The quick brown fox jumps over the lazy dog. ", 100)
	if n := len(tokens(english, firstRun)); n != len(english)/4 {
		t.Errorf("%d bytes are %d tokens", len(english), n)
	}
	if wordsEnd > 1<<31 {
		t.Errorf("ids go up to %d", wordsEnd)
	}
}

// TestWords has the tokens of each kind of text.
func TestWords(t *testing.T) {
	for s, want := range map[string]int{
		"":                                 0,
		"the cat":                          2,
		"internationalization":             4,
		" configuration":                   3,
		"кот и память":                     4,
		"a  b":                             3,
		"\n\t\tif x":                       3,
		"12345":                            2,
		`{"id":1,"b":[]}`:                  9,
		"日本é":                              3,
		"<|im_start|>assistant\nba <|im_e": 10,
	} {
		if got := tokens(s, firstWord); len(got) != want {
			t.Errorf("%q has %d tokens, want %d", s, len(got), want)
		}
		for _, more := range []string{"a", " b", "  ", "\n", "é", "ж", "1", "{"} {
			checkText(t, s, more)
		}
	}
}

func FuzzTokenizer(f *testing.F) {
	f.Add("abc <|im_end|>\n日", "d")
	f.Add(" кот  ёж 12345 {}[] internationalization", "ж")
	f.Fuzz(func(t *testing.T, s, more string) {
		if utf8.ValidString(s) && utf8.ValidString(more) { // as all strings from JSON are
			checkText(t, s, more)
		}
	})
}

// TestNextTurnExtendsThePrompt has a chat whose next prompt begins with this one
// and its answer, token by token.
func TestNextTurnExtendsThePrompt(t *testing.T) {
	messages := []message{{Role: "system", Content: "You are brief."}, {Role: "user", Content: "Why? é"}}
	tools := json.RawMessage(`[{"type": "function"}]`)
	first := tokens(renderChat(messages, tools, true, false), firstRun)
	answer := words(1, 33)
	messages = append(messages, message{Role: "assistant", Content: content(detokenize(answer))}, message{Role: "user", Content: "And?"})
	second := tokens(renderChat(messages, tools, true, false), firstRun)
	if n := len(first) + len(answer); !slices.Equal(second[:n], slices.Concat(first, answer)) {
		t.Error("the second turn's prompt does not begin with the first one's and its answer")
	}
}
