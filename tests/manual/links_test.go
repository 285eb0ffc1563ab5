package manual

import (
	"cmp"
	"flag"
	"io/fs"
	"os"
	"path"
	"regexp"
	"strings"
	"testing"
)

var repository = os.DirFS("../..")

// TestMain lets go keep no result: the tests read files of another module, whose changes go
// does not notice.
func TestMain(m *testing.M) {
	flag.Parse()
	_ = flag.Set("test.testlogfile", "")
	os.Exit(m.Run())
}

// ownURL is where the repository's files are on GitHub.
const ownURL = "https://github.com/caddy-kvrouter/kvrouter/blob/main/"

var (
	alertName  = regexp.MustCompile(`^\s*- alert:\s*(\S+)`)
	runbookURL = regexp.MustCompile(`^\s*runbook_url:\s*(\S+)`)
)

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
	paths, err := markdownFiles(repository)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range paths {
		p := mustPage(t, name)
		for _, l := range p.links {
			if problem := follow(repository, name, l.target); problem != "" {
				t.Errorf("%s:%d: link %s: %s", name, l.line, l.target, problem)
			}
		}
	}
	for _, none := range []string{"docs/none.md", "docs/routing.md#none", "#none"} {
		if follow(repository, "README.md", none) == "" {
			t.Errorf("the link %s leads somewhere", none)
		}
	}
}

func TestFrontPageHasEachPage(t *testing.T) {
	linked := make(map[string]bool)
	for _, l := range mustPage(t, "README.md").links {
		linked[l.target] = true
	}
	for _, p := range mustPages(t) {
		if p.path != "README.md" && !linked[p.path] {
			t.Errorf("README.md has no link to %s", p.path)
		}
	}
}

func TestPagesHaveTheirLengths(t *testing.T) {
	lengths := map[string]int{"README.md": 200, "docs/configuration.md": 500} // the latter describes each option
	for _, p := range mustPages(t) {
		if most := cmp.Or(lengths[p.path], 350); p.lines > most {
			t.Errorf("%s: %d lines, want at most %d", p.path, p.lines, most)
		}
	}
}

func TestAlertsHaveRunbooks(t *testing.T) {
	rules, err := fs.ReadFile(repository, "handler/operations/alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	alerts, runbooks := 0, 0
	for line := range strings.Lines(string(rules)) {
		if alertName.MatchString(line) {
			alerts++
		}
		m := runbookURL.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		runbooks++
		if problem := follow(repository, "", m[1]); problem != "" || !strings.HasPrefix(m[1], ownURL+"docs/") || !strings.Contains(m[1], "#") {
			t.Errorf("runbook_url %s: %s; it must be an anchor below %sdocs/", m[1], problem, ownURL)
		}
	}
	if alerts == 0 || alerts != runbooks {
		t.Errorf("%d alerts have %d runbooks", alerts, runbooks)
	}
}
