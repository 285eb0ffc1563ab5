package engine

import (
	"bytes"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// sample is one line of a page of metrics, in Prometheus' text format.
type sample struct {
	name   string
	labels map[string]string // by name; the values as they are written
	value  float64
}

var (
	sampleLine = regexp.MustCompile(`^([\w:]+)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})? (\S+)`)
	labelPair  = regexp.MustCompile(`(\w+)="((?:[^"\\]|\\.)*)"`)
)

// maxSamples is the number of samples that are read of a page.
const maxSamples = 2 * maxRanks

// samplesOf returns the samples of some metrics. It skips what it cannot read. A page has
// thousands of other lines, which cost little.
func samplesOf(page []byte, names ...string) (list []sample) {
	for line := range bytes.Lines(page) {
		begins := func(name string) bool { return len(line) > len(name) && string(line[:len(name)]) == name }
		if !slices.ContainsFunc(names, begins) || len(list) == maxSamples {
			continue
		}
		parts := sampleLine.FindStringSubmatch(strings.TrimSpace(string(line)))
		if parts == nil || !slices.Contains(names, parts[1]) {
			continue
		}
		value, err := strconv.ParseFloat(parts[3], 64)
		if err != nil {
			continue
		}
		s := sample{parts[1], make(map[string]string), value}
		for _, pair := range labelPair.FindAllStringSubmatch(parts[2], -1) {
			s.labels[pair[1]] = pair[2]
		}
		list = append(list, s)
	}
	return list
}

// count returns a label's positive whole number, 0 for anything else.
func (s *sample) count(label string) int64 {
	n, err := strconv.ParseInt(s.labels[label], 10, 64)
	if err != nil || n < 1 || n > maxCount {
		return 0
	}
	return n
}
