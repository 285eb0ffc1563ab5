package nvext

import (
	"bytes"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// scanTokens counts the 32-bit integers of the list at b[i]. It returns the index
// behind the list, 0 if the value is anything else.
func scanTokens(b []byte, i int) (count, end int) {
	if b[i] != '[' {
		return 0, 0
	}
	if i = rawjson.SkipSpace(b, i+1); i < len(b) && b[i] == ']' {
		return 0, i + 1
	}
	for ; i < len(b); i = rawjson.SkipSpace(b, i+1) {
		n, first := uint64(0), i
		for ; i < len(b) && b[i]-'0' <= 9 && n < 1<<32; i++ {
			n = n*10 + uint64(b[i]-'0')
		}
		if i == first || n >= 1<<32 || b[first] == '0' && i > first+1 {
			return 0, 0
		}
		count++
		if i < len(b) && b[i] == ',' {
			continue // the usual form
		}
		if i = rawjson.SkipSpace(b, i); i == len(b) || b[i] != ',' {
			break
		}
	}
	if i >= len(b) || b[i] != ']' {
		return 0, 0
	}
	return count, i + 1
}

// IDs returns a JSON list of at most MaxTokens token ids, as a copy without white space, and
// their number. It is nil if list is anything else.
func IDs(list []byte) (ids []byte, n int) {
	if len(list) == 0 {
		return nil, 0
	}
	n, end := scanTokens(list, 0)
	if end != len(list) || n > MaxTokens {
		return nil, 0
	}
	ids = make([]byte, 0, len(list))
	for part := range bytes.FieldsSeq(list) {
		ids = append(ids, part...)
	}
	return ids, n
}
