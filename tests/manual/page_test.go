package manual

import (
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// page is what the checks read of a Markdown file.
type page struct {
	path   string
	lines  int
	blocks []block
	// anchors are those of the headings, as GitHub makes them, and of HTML.
	anchors map[string]bool
	links   []link
	rows    []row
	terms   map[string]bool // of list items that begin with one in bold type
	spans   map[string]int  // code spans, with a line that has them
}

// block is a fenced block.
type block struct {
	line       int // of its first line of text
	lang, text string
}

type link struct {
	line   int
	target string
}

// row is a row of a table below its header.
type row struct {
	line          int
	header, cells []string
}

var (
	fence      = regexp.MustCompile("^\\s*(`{3,}|~{3,})\\s*([\\w-]*)")
	codeSpan   = regexp.MustCompile("`[^`]+`")
	inlineLink = regexp.MustCompile(`\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^()\s>]+(?:\([^)]*\))?)>?(?:\s+"[^"]*")?\)`)
	linkDef    = regexp.MustCompile(`^\s{0,3}\[[^\]]+\]:\s*<?(\S+?)>?(?:\s|$)`)
	htmlLink   = regexp.MustCompile(`<(?:a|img)\s[^>]*?(?:href|src)="([^"]+)"`)
	htmlAnchor = regexp.MustCompile(`<a\s[^>]*?(?:id|name)="([^"]+)"`)
	linkText   = regexp.MustCompile(`!?\[([^\]]*)\]\([^)]*\)`)
	boldItem   = regexp.MustCompile(`^\s*[-*+]\s+\*\*(.+?)\*\*`)
	tableRule  = regexp.MustCompile(`^\s*\|?[\s:|-]*-[\s:|-]*$`)
	notAnchor  = regexp.MustCompile(`[^\pL\pN\s_-]`)
)

// anchorOf returns the anchor that GitHub gives a heading, without a number.
func anchorOf(heading string) string {
	heading = linkText.ReplaceAllString(strings.TrimSpace(heading), "$1")
	return strings.ReplaceAll(notAnchor.ReplaceAllString(strings.ToLower(heading), ""), " ", "-")
}

func readPage(files fs.FS, path string) (*page, error) {
	doc, err := fs.ReadFile(files, path)
	if err != nil {
		return nil, err
	}
	lines := strings.Split(strings.TrimSuffix(string(doc), "\n"), "\n")
	p := &page{path: path, lines: len(lines), anchors: make(map[string]bool), terms: make(map[string]bool), spans: make(map[string]int)}
	var header []string
	for i := 0; i < len(lines); i++ {
		s := lines[i]
		if m := fence.FindStringSubmatch(s); m != nil {
			b := block{line: i + 2, lang: m[2]}
			indent := len(s) - len(strings.TrimLeft(s, " "))
			for i++; i < len(lines) && !strings.HasPrefix(strings.TrimSpace(lines[i]), m[1]); i++ {
				b.text += strings.TrimPrefix(lines[i], s[:indent]) + "\n"
			}
			p.blocks = append(p.blocks, b)
			continue
		}
		p.readLinks(i+1, s)
		for _, span := range spans(strings.ReplaceAll(s, `\|`, "|")) {
			p.spans[span] = i + 1
		}
		cells := cellsOf(s)
		switch {
		case cells == nil:
			header = nil
		case header == nil && i+1 < len(lines) && tableRule.MatchString(lines[i+1]):
			header = cells
			i++
		case header != nil:
			p.rows = append(p.rows, row{i + 1, header, cells})
		}
		if text := strings.TrimLeft(s, "#"); text != s && strings.HasPrefix(text, " ") {
			p.addAnchor(anchorOf(text))
		}
		if m := boldItem.FindStringSubmatch(s); m != nil {
			p.terms[strings.Trim(m[1], "`")] = true
		}
	}
	return p, nil
}

// addAnchor adds a heading's anchor. GitHub numbers those that occur again.
func (p *page) addAnchor(a string) {
	unique := a
	for n := 1; p.anchors[unique]; n++ {
		unique = fmt.Sprintf("%s-%d", a, n)
	}
	p.anchors[unique] = true
}

func (p *page) readLinks(line int, s string) {
	for _, m := range htmlAnchor.FindAllStringSubmatch(s, -1) {
		p.anchors[m[1]] = true
	}
	s = codeSpan.ReplaceAllString(s, "`x`")
	for _, pattern := range []*regexp.Regexp{inlineLink, linkDef, htmlLink} {
		for _, m := range pattern.FindAllStringSubmatch(s, -1) {
			p.links = append(p.links, link{line, m[1]})
		}
	}
}

// cellsOf returns the cells of a table's row, nil for another line.
func cellsOf(s string) []string {
	s = strings.TrimSpace(s)
	if !strings.HasPrefix(s, "|") {
		return nil
	}
	s = strings.ReplaceAll(s, `\|`, "\x00")
	s = codeSpan.ReplaceAllStringFunc(s, func(span string) string { return strings.ReplaceAll(span, "|", "\x00") })
	cells := strings.Split(strings.TrimSuffix(strings.TrimPrefix(s, "|"), "|"), "|")
	for i, c := range cells {
		cells[i] = strings.TrimSpace(strings.ReplaceAll(c, "\x00", "|"))
	}
	return cells
}

// spans returns the texts of the code spans in s.
func spans(s string) []string {
	all := codeSpan.FindAllString(s, -1)
	for i, span := range all {
		all[i] = strings.TrimSpace(strings.Trim(span, "`"))
	}
	return all
}

// cell returns the cell of the row below a column's name, "" if there is none.
func (r row) cell(column string) string {
	if i := slices.Index(r.header, column); i >= 0 && i < len(r.cells) {
		return r.cells[i]
	}
	return ""
}

// column returns the code spans below a column's name, in all tables of a page, with
// their lines.
func (p *page) column(name string) map[string]int {
	found := make(map[string]int)
	for _, r := range p.rows {
		for _, span := range spans(r.cell(name)) {
			found[span] = r.line
		}
	}
	return found
}

// mustPage reads a page.
func mustPage(t *testing.T, name string) *page {
	t.Helper()
	p, err := readPage(repository, name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// mustPages reads README.md and the manual.
func mustPages(t *testing.T) (all []*page) {
	t.Helper()
	names, _ := fs.Glob(repository, "docs/*.md")
	for _, name := range append(names, "README.md") {
		all = append(all, mustPage(t, name))
	}
	return all
}
