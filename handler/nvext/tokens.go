package nvext

import (
	"bytes"
	"strconv"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/tidwall/gjson"
)

// tokens reads the value of token_data where the cursor stands, if it is a list
// of ids, and passes it: it may be most of a body, and is looked at once. What
// is not read stands there for the caller.
func (p *parser) tokens(c *rawjson.Cursor) (at rawjson.Span, read bool) {
	p.ext.TokenData, p.ext.TokenCount, p.ext.TokenSpan = nil, 0, rawjson.Span{}
	var keep []uint32
	if p.opt.Tokens {
		n := bytes.IndexByte(p.raw[c.At:], ']')
		keep = make([]uint32, 0, min(MaxTokens, bytes.Count(p.raw[c.At:c.At+max(n, 0)], []byte{','})+1))
	}
	ids, count, end := scanTokens(p.raw, c.At, keep)
	p.counted = end > 0
	if !p.counted {
		return at, false
	}
	at = rawjson.Span{Start: c.At, End: end}
	c.At = end
	p.ext.TokenData, p.ext.TokenCount, p.ext.TokenSpan = ids, count, at
	return at, true
}

// scanTokens reads the array of integers of 32 bits at b[i]. It returns the
// index behind it, 0 if it is anything else. The first MaxTokens ids are
// appended to keep, if that is not nil.
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
		if i = rawjson.SkipSpace(b, i); i == len(b) || b[i] != ',' {
			break
		}
	}
	if i >= len(b) || b[i] != ']' {
		return nil, 0, 0
	}
	return keep, count, i + 1
}

// tokensLeft judges a token_data that is no list of ids, or too long a one.
func (p *parser) tokensLeft(o *object) {
	if p.counted {
		if p.ext.TokenCount > MaxTokens {
			o.invalid(fTokenData, 0, wantPrompt, strconv.Itoa(p.ext.TokenCount))
		}
		return
	}
	o.list(fTokenData, 0, MaxTokens, wantPrompt, func(n int, v gjson.Result) bool {
		if !isInteger(v) {
			return p.fail(&FieldError{Field: o.element(fTokenData, n), Want: wantU32, Got: describe(v)})
		}
		if _, err := strconv.ParseUint(v.Raw, 10, 32); err != nil {
			return p.invalid(0, &FieldError{Field: o.element(fTokenData, n), Want: wantU32, Got: describe(v)})
		}
		return true
	})
}

// AppendIDs appends the token ids of a list as JSON, which is in raw at s, to
// ids: those of a TokenSpan that were not asked for. It returns ids as they
// were if there is no such list.
func AppendIDs(ids []uint32, raw []byte, s rawjson.Span) []uint32 {
	if s.End == 0 {
		return ids
	}
	if ids == nil {
		ids = make([]uint32, 0, min(MaxTokens, bytes.Count(raw[s.Start:s.End], []byte{','})+1))
	}
	more, _, end := scanTokens(raw, s.Start, ids)
	if end == 0 {
		return ids
	}
	return more
}
