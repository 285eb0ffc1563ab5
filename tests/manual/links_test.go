package manual

import (
	"fmt"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

var repository = os.DirFS("../..")

// ownURL is where the repository's files are on GitHub.
const ownURL = "https://github.com/caddy-kvrouter/kvrouter/blob/main/"

// pages are the manual.
var pages = []string{
	"getting-started", "concepts", "configuration", "routing", "sessions", "apis", "engines", "reliability", "nvext",
	"speculative-prefill", "security", "observability", "admin-api", "operations", "troubleshooting", "capacity",
	"benchmarks", "migrating", "extending", "architecture",
}

// needManual fails a test if a page of the manual is missing.
func needManual(t *testing.T) {
	t.Helper()
	for _, name := range pages {
		if _, err := fs.Stat(repository, "docs/"+name+".md"); err != nil {
			t.Fatalf("docs/%s.md: %v", name, err)
		}
	}
}

// markdownFiles returns the paths of all Markdown files but test data.
func markdownFiles(files fs.FS) (paths []string, err error) {
	err = fs.WalkDir(files, ".", func(name string, d fs.DirEntry, err error) error {
		switch base := d.Name(); {
		case err != nil:
			return err
		case d.IsDir() && (base == "testdata" || base == "node_modules" || base != "." && base[0] == '.'):
			return fs.SkipDir
		case !d.IsDir() && strings.HasSuffix(base, ".md"):
			paths = append(paths, name)
		}
		return nil
	})
	return paths, err
}

// checkLinks returns the links between the repository's files that lead nowhere.
func checkLinks(files fs.FS) (found []string, err error) {
	paths, err := markdownFiles(files)
	if err != nil {
		return nil, err
	}
	for _, name := range paths {
		p, err := readPage(files, name)
		if err != nil {
			return nil, err
		}
		for _, l := range p.links {
			if problem := follow(files, name, l.target); problem != "" {
				found = append(found, fmt.Sprintf("%s:%d: link %s: %s", name, l.line, l.target, problem))
			}
		}
	}
	return found, nil
}

// follow returns what is wrong with a link in a file, "" if nothing is.
func follow(files fs.FS, from, target string) string {
	if local, ok := strings.CutPrefix(target, ownURL); ok {
		from, target = "README.md", local
	}
	if strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
		return ""
	}
	file, anchor, _ := strings.Cut(target, "#")
	to := from
	if file != "" {
		to = path.Join(path.Dir(from), file)
	}
	if _, err := fs.Stat(files, strings.TrimSuffix(to, "/")); err != nil {
		return "there is no such file"
	}
	if anchor == "" || !strings.HasSuffix(to, ".md") {
		return ""
	}
	p, err := readPage(files, to)
	if err != nil {
		return err.Error()
	}
	if !p.anchors[anchor] {
		return "there is no such heading"
	}
	return ""
}

func TestLinksLeadSomewhere(t *testing.T) {
	needManual(t)
	found, err := checkLinks(repository)
	if err != nil {
		t.Fatal(err)
	}
	report(t, found)
}

// checkLengths returns the pages that are missing, too short or too long.
func checkLengths(files fs.FS) (found []string) {
	length := func(name string, least, most int) {
		p, err := readPage(files, name)
		if err != nil {
			found = append(found, err.Error())
		} else if p.lines < least || p.lines > most {
			found = append(found, fmt.Sprintf("%s: %d lines, want %d to %d", name, p.lines, least, most))
		}
	}
	length("README.md", 1, 200)
	for _, name := range pages {
		length("docs/"+name+".md", 50, 350)
	}
	others, _ := fs.Glob(files, "docs/*.md")
	for _, name := range others {
		if base := strings.TrimSuffix(path.Base(name), ".md"); !slices.Contains(pages, base) {
			found = append(found, name+": is not in the list of the manual's pages, see links_test.go")
		}
	}
	return found
}

func TestPagesHaveTheirLengths(t *testing.T) {
	needManual(t)
	report(t, checkLengths(repository))
}

var (
	alertName  = regexp.MustCompile(`^\s*- alert:\s*(\S+)`)
	runbookURL = regexp.MustCompile(`^\s*runbook_url:\s*(\S+)`)
)

// checkRunbooks returns the alerts whose runbook_url is missing or leads nowhere.
func checkRunbooks(files fs.FS, rules string) (found []string) {
	alert, has := "", true
	end := func() {
		if !has {
			found = append(found, alert+": has no runbook_url")
		}
	}
	for line := range strings.Lines(rules) {
		if m := alertName.FindStringSubmatch(line); m != nil {
			end()
			alert, has = m[1], false
		}
		if m := runbookURL.FindStringSubmatch(line); m != nil {
			has = true
			if !strings.HasPrefix(m[1], ownURL+"docs/") || !strings.Contains(m[1], "#") {
				found = append(found, alert+": runbook_url must be an anchor below "+ownURL+"docs/, got "+m[1])
			} else if problem := follow(files, "", m[1]); problem != "" {
				found = append(found, alert+": runbook_url "+m[1]+": "+problem)
			}
		}
	}
	end()
	return found
}

func TestAlertsHaveRunbooks(t *testing.T) {
	needManual(t)
	rules, err := fs.ReadFile(repository, "handler/operations/alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	report(t, checkRunbooks(repository, string(rules)))
}

// TestBrokenLinksAreFound has one deliberate error of each kind.
func TestBrokenLinksAreFound(t *testing.T) {
	files := fstest.MapFS{
		"README.md": {Data: []byte("# A\n[a](docs/b.md) [b](docs/c.md) [c](docs/b.md#two-words) [d](docs/b.md#three)\n" +
			"[e](#a) [f](#b) [g](https://example.com/none) ![h](x.svg) `[i](none.md)`\n[j]: none.md\n```\n[k](none.md)\n```\n" +
			"[l](" + ownURL + "docs/b.md#none) <img src=\"y.svg\">\n")},
		"docs/b.md": {Data: []byte("# Two `words`\n## Again, again!\n## Again again\n[a](../README.md#a) [b](#again-again-1) [c](#again-again-2)\n")},
	}
	found, err := checkLinks(files)
	if err != nil {
		t.Fatal(err)
	}
	wantFindings(t, found,
		"README.md:2: link docs/c.md", "README.md:2: link docs/b.md#three", "README.md:3: link #b", "README.md:3: link x.svg",
		"README.md:4: link none.md", "README.md:8: link "+ownURL+"docs/b.md#none", "README.md:8: link y.svg", "docs/b.md:4: link #again-again-2")
}

func TestBadLengthsAreFound(t *testing.T) {
	files := fstest.MapFS{
		"README.md":  {Data: []byte(strings.Repeat("x\n", 201))},
		"docs/b.md":  {Data: []byte("x\n")},
		"docs/c.txt": {Data: []byte("x\n")},
	}
	for i, name := range pages {
		files["docs/"+name+".md"] = &fstest.MapFile{Data: []byte(strings.Repeat("x\n", 49+302*min(i, 1)-1*min(max(i-1, 0), 1)))}
	}
	delete(files, "docs/"+pages[len(pages)-1]+".md")
	wantFindings(t, checkLengths(files), "README.md: 201 lines", "docs/getting-started.md: 49 lines", "docs/concepts.md: 351 lines",
		"open docs/architecture.md", "docs/b.md: is not in the list")
}

func TestBadRunbooksAreFound(t *testing.T) {
	files := fstest.MapFS{"docs/b.md": {Data: []byte("## Fine\n")}}
	wantFindings(t, checkRunbooks(files, `
  - alert: Fine
    annotations:
      runbook_url: `+ownURL+`docs/b.md#fine
  - alert: None
  - alert: Nowhere
      runbook_url: `+ownURL+`docs/b.md#bad
  - alert: Elsewhere
      runbook_url: https://example.com/#fine
  - alert: Last
`), "None: has no", "Nowhere: runbook_url", "Elsewhere: runbook_url must", "Last: has no")
}

// wantFindings fails the test unless there are exactly the findings with these
// beginnings, in any order.
func wantFindings(t *testing.T, found []string, want ...string) {
	t.Helper()
	for _, w := range want {
		if !slices.ContainsFunc(found, func(f string) bool { return strings.HasPrefix(f, w) }) {
			t.Errorf("no finding begins with %q", w)
		}
	}
	if len(found) != len(want) {
		t.Errorf("%d findings, want %d:\n%s", len(found), len(want), strings.Join(found, "\n"))
	}
}
