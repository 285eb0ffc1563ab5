package manual

import (
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// code is the text of the module's Go files, without tests, by folder. Strings that are
// cut into several literals are joined.
type code map[string]string

var joined = regexp.MustCompile(`"\s*\+\s*"`)

// mustCode reads the code of this module.
func mustCode(t *testing.T) code {
	t.Helper()
	c := make(code)
	for _, folder := range []string{"handler", "kvscore", "affinity"} {
		err := fs.WalkDir(repository, folder, func(name string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
				return err
			}
			src, err := fs.ReadFile(repository, name)
			c[path.Dir(name)] += joined.ReplaceAllString(string(src), "")
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return c
}

// all returns what the first group of a pattern matches in the folders below a path, sorted.
func (c code) all(below, pattern string) (found []string) {
	expr := regexp.MustCompile(pattern)
	for folder, src := range c {
		if !strings.HasPrefix(folder, below) {
			continue
		}
		for _, m := range expr.FindAllStringSubmatch(src, -1) {
			found = append(found, m[1])
		}
	}
	slices.Sort(found)
	return slices.Compact(found)
}

// anything stands in a text for what only a running program knows.
const anything = "\x00"

// messages are the log messages at level warn and error, and the conditions. anything
// stands for their variable parts.
func (c code) messages() (lines, conditions []string) {
	const text = `"([^"]+"\+?)`
	lines = append(c.all("", `\.(?:Warn|Error)\(`+text), c.all("", `\.Check\(zap(?:core)?\.(?:Warn|Error)Level, `+text)...)
	for _, pattern := range []string{
		`\.(?:Raise|meets)\([^"\n]*, ` + text, `\bincident\w* *:?= ` + text, `\bwarn[A-Z]\w* *= ` + text, `\bErrNoWorker *= errors\.New\(` + text,
	} {
		conditions = append(conditions, c.all("handler", pattern)...)
	}
	for _, list := range [][]string{lines, conditions} {
		for i, s := range list {
			list[i] = strings.NewReplacer(`"+`, anything, `"`, "").Replace(s)
		}
	}
	lines = slices.DeleteFunc(lines, func(s string) bool { return s == "condition begins" })
	return lines, conditions
}

// placeholders returns the names below http.kv_router.
func (c code) placeholders() []string {
	names := c.all("handler/attempt", `\bname: "(\w+)".*\bclient: true`)
	for room, function := range map[string]string{"handler/dispatch": ") placeholder(", "handler/plan": ") Placeholder("} {
		_, body, _ := strings.Cut(c[room], function)
		body, _, _ = strings.Cut(body, "\n}\n")
		for _, m := range regexp.MustCompile(`case "(\w+)"`).FindAllStringSubmatch(body, -1) {
			names = append(names, m[1])
		}
	}
	return names
}

// optionPart is a part of a table of options: its beginning, an option, or its end with
// the name of its block. The end of a function is one, too.
var optionPart = regexp.MustCompile(`\boptions\{|"(\w+)": |\}\.readBlock\(d, "([^"]+)"\)|\n\}\n`)

// options returns the Caddyfile's options as paths: "pool", "index memory". Those of
// policies begin with "policy" and the policy's name.
func (c code) options() (paths []string) {
	var open [][]string // the tables that have begun
	end := func(block string) {
		for _, name := range open[len(open)-1] {
			paths = append(paths, strings.TrimSpace(block+" "+name))
		}
		open = open[:len(open)-1]
	}
	for _, m := range optionPart.FindAllStringSubmatch(c["handler"], -1) {
		switch {
		case m[0] == "options{":
			open = append(open, nil)
		case len(open) == 0:
		case m[1] != "":
			open[len(open)-1] = append(open[len(open)-1], m[1])
		case m[2] != "":
			policy, ok := strings.CutPrefix(m[2], "option of ")
			if !ok {
				policy = strings.TrimSuffix(m[2], " option")
			}
			end(policy)
		default: // the function ends with the table of the directive itself
			end("")
		}
	}
	slices.Sort(paths)
	return paths
}
