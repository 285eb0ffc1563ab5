// Command prose checks the project's English: documentation, Go comments, log and error
// texts, and alerts. It finds sentences that are too long, banned phrases, and words for
// which the project has another one. words.txt lists the phrases and words.
//
//	go run ./tests/prose [file or folder ...]
//
// prints the findings in these files and folders, by default in the whole repository.
// `go test ./tests/prose` checks the repository.
package main

import (
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

func main() {
	paths := os.Args[1:]
	if len(paths) == 0 {
		paths = []string{"."}
	}
	found, err := checkFiles(os.DirFS("."), paths)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	for _, f := range found {
		fmt.Println(f)
	}
	if len(found) > 0 {
		fmt.Fprintf(os.Stderr, "%d findings\n", len(found))
		os.Exit(1)
	}
}

// checkFiles returns the findings in files and in all files below folders.
func checkFiles(root fs.FS, paths []string) ([]finding, error) {
	var found []finding
	for _, p := range paths {
		err := fs.WalkDir(root, path.Clean(filepath.ToSlash(p)), func(name string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			if d.IsDir() {
				if base := d.Name(); base != "." && strings.HasPrefix(base, ".") || base == "testdata" || base == "node_modules" {
					return fs.SkipDir
				}
				return nil
			}
			src, err := fs.ReadFile(root, name)
			if err != nil {
				return err
			}
			texts, err := textsOf(name, src)
			for _, t := range texts {
				found = append(found, check(name, t)...)
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return found, nil
}

// textsOf returns the texts of a file, none for a kind of file that it does not know.
func textsOf(name string, src []byte) ([]text, error) {
	switch base := path.Base(name); {
	case strings.HasSuffix(base, ".md"):
		return markdownTexts(string(src)), nil
	case strings.HasSuffix(base, ".go"):
		return goTexts(name, src)
	case base == "alerts.yml" || strings.HasPrefix(base, "Caddyfile"):
		return hashTexts(string(src)), nil
	}
	return nil, nil
}
