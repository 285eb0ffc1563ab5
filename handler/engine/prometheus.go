package engine

import (
	"bytes"
	"strconv"
)

// labels are those of one sample, as they are written: name="value" pairs.
type labels []byte

// samples calls f for each sample of a page in Prometheus' text format. It reads
// what it understands and skips all other lines: a page that is cut, or has one
// odd line, still tells the rest.
func samples(page []byte, f func(name []byte, l labels, value float64)) {
	for line := range bytes.Lines(page) {
		line = bytes.TrimSpace(line)
		if len(line) == 0 || line[0] == '#' || !ofInterest(line) {
			continue
		}
		end := bytes.IndexAny(line, "{ \t")
		if end < 0 {
			continue
		}
		name, rest := line[:end], line[end:]
		var l labels
		if rest[0] == '{' {
			n := labelsEnd(rest)
			if n < 0 {
				continue
			}
			l, rest = labels(rest[1:n]), rest[n+1:]
		}
		fields := bytes.Fields(rest)
		if len(fields) == 0 {
			continue
		}
		if v, err := strconv.ParseFloat(string(fields[0]), 64); err == nil {
			f(name, l, v)
		}
	}
}

// ofInterest tells by its beginning whether a line is worth reading: pages have
// thousands.
func ofInterest(line []byte) bool {
	return bytes.HasPrefix(line, []byte("vllm:cache_config_info")) || bytes.HasPrefix(line, []byte("process_start_time_seconds"))
}

// labelsEnd returns the position of the bracket that closes the labels at the
// beginning of b, negative if there is none.
func labelsEnd(b []byte) int {
	quoted := false
	for i := 1; i < len(b); i++ {
		switch {
		case quoted && b[i] == '\\':
			i++
		case b[i] == '"':
			quoted = !quoted
		case !quoted && b[i] == '}':
			return i
		}
	}
	return -1
}

// get returns the value of a label, empty if it is not there.
func (l labels) get(name string) string {
	for rest := []byte(l); len(rest) > 0; {
		key, after, ok := bytes.Cut(rest, []byte(`="`))
		if !ok {
			return ""
		}
		end := 0
		for end < len(after) && after[end] != '"' {
			if after[end] == '\\' {
				end++
			}
			end++
		}
		if end >= len(after) {
			return ""
		}
		if string(bytes.Trim(key, ", ")) == name {
			return string(after[:end]) // no name or number has an escape
		}
		rest = after[end+1:]
	}
	return ""
}

// count returns a label that is a positive whole number, 0 for anything else.
func (l labels) count(name string) int64 {
	n, err := strconv.ParseInt(l.get(name), 10, 64)
	if err != nil || n < 1 || n > maxCount {
		return 0
	}
	return n
}
