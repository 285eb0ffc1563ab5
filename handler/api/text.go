package api

import (
	"strconv"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
)

// textLen returns how many bytes a JSON string has once unescaped.
func textLen(raw []byte) (n int64) {
	r := rawjson.Runs{Raw: raw}
	for p := r.Next(); p != nil; p = r.Next() {
		n += int64(len(p))
	}
	return n
}

// compact yields a JSON value without the whitespace outside its strings, in
// pieces that point into it.
type compact struct{ raw []byte }

// next returns the next piece, never an empty one, or nil at the end.
func (c *compact) next() []byte {
	b := c.raw
	at := rawjson.SkipSpace(b, 0)
	for i := at; i < len(b); {
		switch b[i] {
		case '"':
			end, _ := rawjson.SkipString(b, i)
			if end < 0 {
				end = len(b)
			}
			i = end
		case ' ', '\n', '\t', '\r':
			c.raw = b[i:]
			return b[at:i]
		default:
			i++
		}
	}
	c.raw = nil
	if at == len(b) {
		return nil
	}
	return b[at:]
}

// integer reads a JSON number that is a whole one, also when it is written as
// 1e3 or 5.0.
func integer(b []byte) (int64, bool) {
	if len(b) == 0 || b[0] != '-' && (b[0] < '0' || b[0] > '9') {
		return 0, false
	}
	s := rawjson.View(b)
	if n, err := strconv.ParseInt(s, 10, 64); err == nil {
		return n, true
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || f != float64(int64(f)) || f >= 1<<63 || f < -1<<63 {
		return 0, false
	}
	return int64(f), true
}
