package nvext

import (
	"bytes"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// roomFor returns an empty list with room for the ids of a JSON list.
func roomFor(list []byte) []uint32 {
	return make([]uint32, 0, min(MaxTokens, bytes.Count(list, []byte{','})+1))
}

// scanTokens reads the list of 32-bit integers at b[i]. It returns the index
// behind the list, 0 if the value is anything else. If keep is not nil, the
// first MaxTokens ids are appended to it.
func scanTokens(b []byte, i int, keep []uint32) (ids []uint32, count, end int) {
	if b[i] != '[' {
		return nil, 0, 0
	}
	if i = rawjson.SkipSpace(b, i+1); i < len(b) && b[i] == ']' {
		return keep, 0, i + 1
	}
	for ; i < len(b); i = rawjson.SkipSpace(b, i+1) {
		n, first := uint64(0), i
		for ; i < len(b) && b[i]-'0' <= 9 && n < 1<<32; i++ {
			n = n*10 + uint64(b[i]-'0')
		}
		if i == first || n >= 1<<32 || b[first] == '0' && i > first+1 {
			return nil, 0, 0
		}
		if keep != nil && len(keep) < MaxTokens {
			keep = append(keep, uint32(n))
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
		return nil, 0, 0
	}
	return keep, count, i + 1
}

// AppendIDs appends the token ids of the JSON list at s in raw to ids, such as
// those of a TokenSpan. If there is no such list, it returns ids unchanged.
func AppendIDs(ids []uint32, raw []byte, s rawjson.Span) []uint32 {
	if s.End == 0 {
		return ids
	}
	if ids == nil {
		ids = roomFor(raw[s.Start:s.End])
	}
	more, _, end := scanTokens(raw, s.Start, ids)
	if end == 0 {
		return ids
	}
	return more
}
