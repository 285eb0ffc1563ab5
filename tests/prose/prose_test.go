package main

import (
	"flag"
	"os"
	"strings"
	"testing"
	"testing/fstest"
)

// TestMain lets go keep no result: the tests read files of another module, whose changes go
// does not notice.
func TestMain(m *testing.M) {
	flag.Parse()
	_ = flag.Set("test.testlogfile", "")
	os.Exit(m.Run())
}

// TestRepository checks all texts of the repository.
func TestRepository(t *testing.T) {
	if testing.Short() {
		t.Skip("texts are the same in the short form, and the race detector makes this slow")
	}
	found, err := checkFiles(os.DirFS("../.."), []string{"."})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range found {
		t.Error(f)
	}
}

const long = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen " +
	"sixteen seventeen eighteen nineteen twenty a b c d e f"

// TestErrorsAreFound has one deliberate error in each kind of text.
func TestErrorsAreFound(t *testing.T) {
	for _, v := range []struct{ name, file, src, want string }{
		{"LongSentence", "a.md", "Short.\n\nShort one. " + long + ".\n", "a.md:3: 26 words"},
		{"Heading", "a.md", "# Backends\n", `a.md:1: "Backends"`},
		{"Manual", "docs/a.md", "It goes home.\n", `docs/a.md:1: "home"`},
		{"Cell", "a.md", "| a | b |\n|---|---|\n| `x|y` | count takes in what came |\n", `a.md:3: "takes in what"`},
		{"Link", "a.md", "See [the mirror](x.md).\n", `a.md:1: "mirror"`},
		{"AfterFence", "a.md", "```sh\nmirror\n```\nOf the request the body is read.\n", `a.md:4: "Of the"`},
		{"Comment", "a.go", "package a\n\n// F does. So do those\n// of others.\nfunc F() {}\n", `a.go:3: "So do those"`},
		{"LogText", "a.go", "package a\n\nfunc f() {\n\tlogger.Warn(\"the worker is ill again\")\n}\n", `a.go:4: "is ill"`},
		{"TestMessage", "a_test.go", "package a\n\nfunc f() {\n\tt.Errorf(\"%d nodes are left\", n)\n}\n", `a_test.go:4: "nodes"`},
		{"Alert", "alerts.yml", "annotations:\n  summary: All is well.\n  description: >-\n    The nodes\n    are down.\n", `alerts.yml:4: "nodes"`},
		{"CaddyfileComment", "Caddyfile.example", "# all nodes\n:80\n", `Caddyfile.example:1: "nodes"`},
	} {
		t.Run(v.name, func(t *testing.T) {
			found := checkOne(t, v.file, v.src)
			if len(found) != 1 || !strings.HasPrefix(found[0].String(), v.want) {
				t.Errorf("found %v, want one that begins with %s", found, v.want)
			}
		})
	}
}

// TestCorrectTextsPass has what looks like an error and is none.
func TestCorrectTextsPass(t *testing.T) {
	for _, v := range []struct{ name, file, src string }{
		{"TwoSentences", "a.md", strings.Replace(long, " twelve", ". twelve", 1)},
		{"CodeSpan", "a.md", "The field `backend_instance_id` and `" + long + "`."},
		{"LinkTarget", "a.md", "[here](https://example.com/backend/nodes)"},
		{"Fence", "a.md", "- item\n\n  ```\n  mirror\n  ```\n\n~~~\nnodes\n~~~\n"},
		{"CodeInComment", "a.go", "// Package a is this:\n//\n//\tnodes := backend()\npackage a\n"},
		{"TestData", "a_test.go", "package a\n\nvar prompt = \"all the nodes that there are\"\n"},
		{"ClientsWho", "a.md", "Clients who send a key keep their worker."},
	} {
		t.Run(v.name, func(t *testing.T) {
			if found := checkOne(t, v.file, v.src); len(found) > 0 {
				t.Errorf("found %v", found)
			}
		})
	}
}

func checkOne(t *testing.T, name, src string) []finding {
	t.Helper()
	found, err := checkFiles(fstest.MapFS{name: {Data: []byte(src)}}, []string{"."})
	if err != nil {
		t.Fatal(err)
	}
	return found
}
