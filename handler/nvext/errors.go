package nvext

import (
	"errors"
	"strconv"
	"strings"

	"github.com/tidwall/gjson"
)

// ErrMalformed says that an nvext is not valid JSON, or nests deeper than
// rawjson.MaxDepth.
var ErrMalformed = errors.New("nvext: malformed JSON")

// FieldError says which field of an nvext is not what it should be.
type FieldError struct {
	// Field is the path to the field, such as "nvext.session_control".
	Field string
	// Want is what it should be.
	Want string
	// Got is the type that it has, and the value if that is short and no
	// text of the client's, except where only a few words are known.
	Got string
	// Value tells that the type is right and the value is not.
	Value bool
}

// Error is fit to be shown to the client.
func (e *FieldError) Error() string {
	return e.Field + ": expected " + e.Want + ", got " + e.Got
}

// UnknownError says which fields of an nvext are not known, where that is an
// error.
type UnknownError struct {
	// Fields are the paths to the first of them.
	Fields []string
	// More is how many there are besides.
	More int
}

// Error is fit to be shown to the client.
func (e *UnknownError) Error() string {
	s := strings.Join(e.Fields, ", ")
	if e.More > 0 {
		s += " and " + strconv.Itoa(e.More) + " more"
	}
	if len(e.Fields)+e.More == 1 {
		return s + ": unknown field"
	}
	return s + ": unknown fields"
}

const (
	// maxUnknown is how many unknown fields an error names.
	maxUnknown = 8
	// maxShown is how much of a number, word or name an error repeats, bytes.
	maxShown = 32
)

// describe names a value's type in JSON's words. Numbers and booleans are
// shown, as they are rarely secret and often the mistake itself.
func describe(v gjson.Result) string {
	switch v.Type {
	case gjson.Null:
		return "null"
	case gjson.False, gjson.True:
		return "boolean " + v.Raw
	case gjson.Number:
		return "number " + short(v.Raw)
	case gjson.String:
		return "string"
	case gjson.JSON:
		if v.IsArray() {
			return "array"
		}
	}
	return "object"
}

// describeWord is describe for a text that should be one of a few words.
func describeWord(v gjson.Result) string {
	return "string " + strconv.Quote(short(v.Str))
}

// short returns a text's beginning.
func short(s string) string {
	if len(s) > maxShown {
		return s[:maxShown] + "..."
	}
	return strings.Clone(s)
}

// shownName returns what an error repeats of a name of the client's.
func shownName(s string) string { return strings.ToValidUTF8(short(s), "\ufffd") }

// nothing is what an absent field has.
const nothing = "nothing"
