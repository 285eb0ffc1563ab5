package main

import (
	"regexp"
	"strings"
)

var (
	fence     = regexp.MustCompile("^\\s*(?:[-*+]\\s+|\\d+[.)]\\s+)?(```+|~~~+)")
	listItem  = regexp.MustCompile(`^\s*(?:>\s*)*(?:[-*+]|\d+[.)])\s+`)
	quote     = regexp.MustCompile(`^\s*(?:>\s*)+`)
	tableRule = regexp.MustCompile(`^\s*\|?[\s:|-]+\|[\s:|-]*$`)
	linkTo    = regexp.MustCompile(`!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])`)
	linkDef   = regexp.MustCompile(`^\s*\[[^\]]+\]:\s`)
	htmlTag   = regexp.MustCompile(`(?s)<!--.*?-->|</?[a-zA-Z][^>]*>`)
)

// paragraphs gathers lines to texts.
type paragraphs struct {
	texts []text
	open  []string
	line  int // of the first of open
}

func (p *paragraphs) add(line int, s string) {
	if len(p.open) == 0 {
		p.line = line
	}
	p.open = append(p.open, s)
}

// end ends the paragraph, if there is one.
func (p *paragraphs) end() {
	s := strings.Join(p.open, "\n")
	p.open = nil
	if s = linkTo.ReplaceAllString(s, "$1"); strings.TrimSpace(s) != "" {
		p.texts = append(p.texts, text{p.line, s})
	}
}

// markdownTexts returns the paragraphs, headings, list items and table cells of a
// document. It skips code blocks, HTML and the targets of links.
func markdownTexts(doc string) []text {
	var p paragraphs
	doc = htmlTag.ReplaceAllStringFunc(doc, func(tag string) string { return strings.Repeat("\n", strings.Count(tag, "\n")) })
	inside := ""
	for i, s := range strings.Split(doc, "\n") {
		line := i + 1
		if inside != "" {
			if strings.HasPrefix(strings.TrimSpace(s), inside) {
				inside = ""
			}
			continue
		}
		if m := fence.FindStringSubmatch(s); m != nil {
			p.end()
			inside = m[1]
			continue
		}
		p.take(line, s)
	}
	p.end()
	return p.texts
}

// take adds a line outside code blocks.
func (p *paragraphs) take(line int, s string) {
	switch {
	case strings.TrimSpace(s) == "" || linkDef.MatchString(s) || tableRule.MatchString(s):
		p.end()
	case strings.HasPrefix(strings.TrimSpace(s), "|") || strings.Contains(s, " | "): // godoc has no outer bars
		p.end()
		p.cells(line, s)
	case strings.HasPrefix(s, "#"):
		p.end()
		p.add(line, strings.TrimLeft(s, "# "))
		p.end()
	case listItem.MatchString(s):
		p.end()
		p.add(line, listItem.ReplaceAllString(s, ""))
	default:
		p.add(line, quote.ReplaceAllString(s, ""))
	}
}

// cells adds the cells of a table's row. A bar within a code span separates none.
func (p *paragraphs) cells(line int, row string) {
	row = strings.ReplaceAll(row, `\|`, "/")
	row = codeSpan.ReplaceAllStringFunc(row, func(s string) string { return strings.ReplaceAll(s, "|", "/") })
	for cell := range strings.SplitSeq(row, "|") {
		p.add(line, cell)
		p.end()
	}
}

var annotation = regexp.MustCompile(`^\s*(?:summary|description):\s*(?:>-)?|^\s*#`)

// hashTexts returns the comments of a Caddyfile, and the summaries and descriptions in a
// file of Prometheus rules.
func hashTexts(src string) []text {
	var p paragraphs
	inside := false
	for i, s := range strings.Split(src, "\n") {
		key := annotation.FindString(s)
		name, _, isKey := strings.Cut(strings.TrimLeft(s, " -"), ":")
		switch {
		case key != "":
			if !strings.HasSuffix(key, "#") || !inside {
				p.end()
			}
			inside = true
			p.add(i+1, strings.Trim(s[len(key):], " '#"))
		case strings.TrimSpace(s) == "" || isKey && !strings.Contains(name, " ") || !strings.HasPrefix(s, "    "):
			p.end()
			inside = false
		case inside:
			p.add(i+1, s)
		}
	}
	p.end()
	return p.texts
}
