package rawjson

import (
	"bytes"

	"github.com/tidwall/gjson"
)

// OrString returns a text as JSON: without the space around it, and as a string if it is none. An empty
// text stays empty.
func OrString(text []byte) []byte {
	if text = bytes.TrimSpace(text); len(text) == 0 || gjson.ValidBytes(text) {
		return text
	}
	return AppendString(nil, string(text))
}

// Object appends an object, or members of one, to Buf.
type Object struct {
	Buf  []byte
	More bool // a member stands before the next one
}

// Open appends the opening bracket.
func (o *Object) Open() { o.Buf, o.More = append(o.Buf, '{'), false }

// Close appends the closing bracket.
func (o *Object) Close() { o.Buf, o.More = append(o.Buf, '}'), true }

// Name appends what comes before a member's value. The name has no characters
// that JSON escapes.
func (o *Object) Name(name string) {
	if o.More {
		o.Buf = append(o.Buf, ',')
	}
	o.More = true
	o.Buf = append(o.Buf, '"')
	o.Buf = append(o.Buf, name...)
	o.Buf = append(o.Buf, '"', ':')
}

// Raw appends a member whose value is JSON.
func (o *Object) Raw(name string, value []byte) {
	o.Name(name)
	o.Buf = append(o.Buf, value...)
}

// Text appends a member that is a text.
func (o *Object) Text(name, s string) {
	o.Name(name)
	o.Buf = AppendString(o.Buf, s)
}

// AppendString appends a text as a JSON string.
func AppendString(dst []byte, s string) []byte { return gjson.AppendJSONString(dst, s) }
