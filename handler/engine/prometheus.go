package engine

import (
	"bytes"
	"regexp"
	"strconv"
)

// labels are the labels of one sample by name.
type labels map[string]string

var (
	sampleLine = regexp.MustCompile(`^([\w:]+)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\}|\s)\s*(\S+)`)
	labelPair  = regexp.MustCompile(`(\w+)="((?:[^"\\]|\\.)*)"`)
)

// samples calls f for each sample of a page in Prometheus' text format that this
// package uses. It skips lines that it cannot read.
func samples(page []byte, f func(name string, l labels, value float64)) {
	for line := range bytes.Lines(page) {
		// A page has thousands of other lines.
		if !bytes.HasPrefix(line, []byte(cacheConfig)) && !bytes.HasPrefix(line, []byte(processStart)) {
			continue
		}
		m := sampleLine.FindSubmatch(line)
		if m == nil {
			continue
		}
		l := make(labels)
		for _, pair := range labelPair.FindAllSubmatch(m[2], -1) {
			l[string(pair[1])] = string(pair[2])
		}
		if v, err := strconv.ParseFloat(string(m[3]), 64); err == nil {
			f(string(m[1]), l, v)
		}
	}
}

// count returns a label's positive whole number, 0 for anything else.
func (l labels) count(name string) int64 {
	n, err := strconv.ParseInt(l[name], 10, 64)
	if err != nil || n < 1 || n > maxCount {
		return 0
	}
	return n
}
