package trace

import (
	"os"
	"path/filepath"
)

// Files lists the traces of a directory, by name; of anything else, its path alone.
func Files(path string) (files []string, err error) {
	if info, err := os.Stat(path); err != nil || !info.IsDir() {
		return []string{path}, nil //nolint:nilerr // whoever reads the file reports it
	}
	for _, pattern := range []string{"*.jsonl", "*.jsonl.gz"} {
		found, err := filepath.Glob(filepath.Join(path, pattern))
		if err != nil {
			return nil, err
		}
		files = append(files, found...)
	}
	return files, nil
}
