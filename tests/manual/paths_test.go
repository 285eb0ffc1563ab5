package manual

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestPathsOfTheArchitectureExist looks up each path that the page on the architecture names. A name
// without a folder is that of a file in any of them.
func TestPathsOfTheArchitectureExist(t *testing.T) {
	const root = "../.."
	page, err := os.ReadFile(root + "/docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	files := make(map[string]bool) // by name
	for _, top := range []string{"handler", "kvscore", "affinity"} {
		err = filepath.WalkDir(filepath.Join(root, top), func(path string, _ fs.DirEntry, err error) error {
			files[filepath.Base(path)] = true
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	seen := 0
	for _, m := range regexp.MustCompile("`([a-z_]+(?:/[a-z_<>]+)*(?:\\.go)?)`").FindAllStringSubmatch(string(page), -1) {
		path := m[1]
		folder, _, is := strings.Cut(path, "/")
		switch {
		case path == "net/http", !is && !strings.HasSuffix(path, ".go"):
			continue
		case !is && files[path]:
		case folder == "internal": // of kvscore/cache
			path = "kvscore/cache/" + path
			fallthrough
		default:
			found, err := filepath.Glob(filepath.Join(root, strings.ReplaceAll(path, "<name>", "*")))
			if err != nil || len(found) == 0 {
				t.Errorf("docs/architecture.md names %s, which does not exist", m[1])
			}
		}
		seen++
	}
	if seen < 40 {
		t.Errorf("%d paths: the test looks in the wrong place", seen)
	}
}
