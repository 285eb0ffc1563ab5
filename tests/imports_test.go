package tests

import (
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const modulePath = "github.com/caddy-kvrouter/kvrouter/"

// layers are the rooms of the project from the top down. A package may import the
// packages of lower layers only, and what sideways lists.
var layers = [][]string{
	{"handler"},
	{"handler/admin", "handler/speculative"},
	{"handler/dispatch"},
	{"handler/split", "handler/resume"},
	{"handler/attempt"},
	{"handler/turn", "handler/discovery"},
	{"handler/plan", "handler/response", "handler/pool", "handler/upstream"},
	{"handler/worker", "handler/queue"},
	{"handler/engine", "handler/journal", "handler/observe"},
	{"handler/body", "handler/api", "handler/nvext"},
	{"handler/rawjson", "handler/endpointslices", "affinity", "kvscore/events", "handler/quota"},
	{"kvscore", "kvscore/texts", "kvscore/events/zmtp"},
	{"kvscore/cache"},
	{"kvscore/cache/internal/exact", "kvscore/cache/internal/textmap"}, // Go keeps the others out
	{"kvscore/cache/internal/approx"},
	{"docs"},
}

// pure are the packages that import neither Caddy nor net/http, so that they can be
// tested, fuzzed and replayed alone.
var pure = []string{"kvscore", "kvscore/events", "kvscore/events/zmtp", "kvscore/texts", "kvscore/cache", "kvscore/cache/internal/approx", "kvscore/cache/internal/exact", "kvscore/cache/internal/textmap", "affinity", "handler/rawjson", "handler/api", "handler/nvext", "handler/journal", "handler/queue", "handler/quota"}

func TestImportsPointDown(t *testing.T) {
	layer := make(map[string]int)
	for i, rooms := range layers {
		for _, room := range rooms {
			layer[room] = i
		}
	}
	seen := 0
	for _, top := range []string{"handler", "kvscore", "affinity", "docs"} {
		for room, imports := range importsBelow(t, top) {
			from, known := layer[room]
			if !known {
				t.Errorf("package %s: is in no layer of this test", room)
				continue
			}
			seen++
			for _, path := range imports {
				if slices.Contains(pure, room) && (path == "net/http" || strings.HasPrefix(path, "github.com/caddyserver/")) {
					t.Errorf("package %s: must not import %s", room, path)
				}
				target, ours := strings.CutPrefix(path, modulePath)
				if !ours {
					continue
				}
				if to, known := layer[target]; !known || to <= from {
					t.Errorf("package %s: must not import %s, which is not in a lower layer", room, target)
				}
			}
		}
	}
	if seen < 8 {
		t.Errorf("found %d packages: the test looks in the wrong place", seen)
	}
}

// importsBelow returns the imports of each package below a folder, tests left out.
func importsBelow(t *testing.T, folder string) map[string][]string {
	t.Helper()
	found := make(map[string][]string)
	root := filepath.Join("..", folder)
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		room := filepath.ToSlash(strings.TrimPrefix(filepath.Dir(path), ".."+string(filepath.Separator)))
		for _, spec := range file.Imports {
			found[room] = append(found[room], strings.Trim(spec.Path.Value, `"`))
		}
		return nil
	})
	noError(t, err)
	return found
}
