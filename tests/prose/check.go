package main

import (
	_ "embed"
	"fmt"
	"regexp"
	"strings"
	"unicode"
)

// maxWords is the most words of a sentence.
const maxWords = 25

// text is a paragraph, a list item, a table cell, a comment's paragraph or a string.
type text struct {
	line int // of its beginning in the file
	s    string
}

// finding is one sentence that breaks one rule.
type finding struct {
	file     string
	line     int
	rule     string
	sentence string
}

func (f finding) String() string {
	return fmt.Sprintf("%s:%d: %s: %s", f.file, f.line, f.rule, f.sentence)
}

// rule is a line of words.txt.
type rule struct {
	pattern *regexp.Regexp
	advice  string
	manual  bool // it holds in docs only
}

//go:embed words.txt
var wordList string

var rules = readRules(wordList)

// readRules reads lines of the form `pattern => advice`.
func readRules(list string) []rule {
	var rules []rule
	manual := false
	for line := range strings.Lines(list) {
		line = strings.TrimSpace(line)
		manual = manual || strings.HasPrefix(line, "## In docs only")
		if line == "" || line[0] == '#' {
			continue
		}
		pattern, advice, ok := strings.Cut(line, " => ")
		if !ok {
			panic("words.txt: a line without ` => `: " + line)
		}
		rules = append(rules, rule{regexp.MustCompile("(?i)" + strings.TrimSpace(pattern)), strings.TrimSpace(advice), manual})
	}
	return rules
}

var (
	codeSpan = regexp.MustCompile("(?s)``.+?``|`[^`]*`")
	// sentenceEnd is followed by the next sentence's first character.
	sentenceEnd = regexp.MustCompile("[.!?][\"'”)*_\\]]*\\s+")
	notAnEnd    = regexp.MustCompile(`(?i)(^|[\s("])(e\.g|i\.e|etc|cf|vs|approx|no|fig)\.\s+$`)
)

// check returns the findings in a text.
func check(file string, t text) []finding {
	var found []finding
	s := codeSpan.ReplaceAllStringFunc(t.s, func(span string) string {
		return "`x`" + strings.Repeat("\n", strings.Count(span, "\n"))
	})
	line := t.line
	for _, sentence := range sentences(s) {
		begin := line + strings.Count(sentence[:len(sentence)-len(strings.TrimLeftFunc(sentence, unicode.IsSpace))], "\n")
		line += strings.Count(sentence, "\n")
		sentence = strings.Join(strings.Fields(sentence), " ")
		if n := countWords(sentence); n > maxWords {
			found = append(found, finding{file, begin, fmt.Sprintf("%d words", n), sentence})
		}
		for _, r := range rules {
			if hit := r.pattern.FindString(sentence); hit != "" && (!r.manual || strings.HasPrefix(file, "docs/")) {
				found = append(found, finding{file, begin, fmt.Sprintf("%q: %s", hit, r.advice), sentence})
			}
		}
	}
	return found
}

// sentences cuts a text after each sentence, without loss.
func sentences(s string) []string {
	var all []string
	begin := 0
	for _, end := range sentenceEnd.FindAllStringIndex(s, -1) {
		if notAnEnd.MatchString(s[begin:end[1]]) {
			continue
		}
		all = append(all, s[begin:end[1]])
		begin = end[1]
	}
	return append(all, s[begin:])
}

// countWords counts what has a letter or a digit. A code span is one word.
func countWords(sentence string) int {
	n := 0
	for word := range strings.FieldsSeq(sentence) {
		if strings.ContainsFunc(word, func(r rune) bool { return unicode.IsLetter(r) || unicode.IsDigit(r) }) {
			n++
		}
	}
	return n
}
