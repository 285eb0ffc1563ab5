package dispatch

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestFaultsNameTheirCode looks up each name of the table of faults in the code.
func TestFaultsNameTheirCode(t *testing.T) {
	page, err := os.ReadFile("../../docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(page), "| fault | code |\n|---|---|\n")
	table, _, _ = strings.Cut(table, "\n\n")
	name, checked := regexp.MustCompile("`([a-zA-Z.]+)`"), 0
	for line := range strings.Lines(table) {
		cells := strings.Split(line, "|")
		found := name.FindAllStringSubmatch(cells[2], -1)
		if len(found) == 0 {
			t.Errorf("no code is named for%s", cells[1])
		}
		for _, m := range found {
			folder, rest := ".", strings.Split(m[1], ".")
			switch rest[0] {
			case "pool", "response", "worker", "attempt":
				folder, rest = "../"+rest[0], rest[1:]
			case "kvscore":
				folder, rest = "../../kvscore", rest[1:]
			}
			if !declares(t, folder, rest[len(rest)-1]) {
				t.Errorf("%s is not declared", m[1])
			}
			checked++
		}
	}
	if checked < 17 {
		t.Errorf("%d names, want at least one a row", checked)
	}
}

// declares returns whether a folder's code declares a function, a method or a constant.
func declares(t *testing.T, folder, name string) bool {
	t.Helper()
	files, err := filepath.Glob(folder + "/*.go")
	if err != nil {
		t.Fatal(err)
	}
	re := regexp.MustCompile(`(?m)^(func (\([^)]*\) )?` + name + `\(|(const |\t)` + name + `\b( |$))`)
	for _, f := range files {
		src, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasSuffix(f, "_test.go") && re.Match(src) {
			return true
		}
	}
	return false
}
