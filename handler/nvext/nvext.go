// Package nvext reads the protocol between clients and the router: the nvext
// member of a request body, which is NVIDIA Dynamo's name and form for request
// extensions. So far it reads the session id only.
//
// The package judges: an nvext that is not well-formed is an error, which the
// caller answers with a 400, because whoever writes one means the router and
// would otherwise not learn that it was not understood. It does not find the
// member in a body, nor cut it out; that is package api. It imports neither
// Caddy nor net/http.
package nvext

import (
	"errors"
	"strings"
	"unsafe"

	"github.com/tidwall/gjson"
)

// Ext is what a request's nvext says.
type Ext struct {
	// SessionID is session_control.session_id, as the client chose it: of any
	// length, and not scoped to a tenant. It is empty if there is none.
	SessionID string
}

// FieldError says which field of an nvext is not what it should be.
type FieldError struct {
	// Field is the path to the field, such as "nvext.session_control".
	Field string
	// Want is the type that it should have.
	Want string
	// Got is the type that it has, and the value if that is short and no
	// text of the client's.
	Got string
}

// Error is fit to be shown to the client.
func (e *FieldError) Error() string {
	return e.Field + ": expected " + e.Want + ", got " + e.Got
}

// ErrMalformed says that an nvext is not valid JSON.
var ErrMalformed = errors.New("nvext: malformed JSON")

// Parse reads the value of an nvext member. Null, as a value or of a field,
// counts as absent, an empty id too, and of fields of one name the last
// counts. Fields that are not known are passed over. The error is
// ErrMalformed or a [*FieldError], and names the first field that is wrong.
//
// The nesting of raw must be bounded, as it is in a body that package api has
// read, for the JSON is validated recursively. The result does not point into
// raw.
func Parse(raw []byte) (Ext, error) {
	var ext Ext
	// A view and not a copy: an nvext may hold a whole prompt's token ids.
	json := unsafe.String(unsafe.SliceData(raw), len(raw)) //nolint:gosec // raw is not changed meanwhile
	if !gjson.Valid(json) {
		return ext, ErrMalformed
	}
	var session gjson.Result
	if err := members(gjson.Parse(json), "nvext", func(key string, v gjson.Result) {
		if key == "session_control" {
			session = v
		}
	}); err != nil {
		return ext, err
	}
	const field = "nvext.session_control"
	var id gjson.Result
	if err := members(session, field, func(key string, v gjson.Result) {
		if key == "session_id" {
			id = v
		}
	}); err != nil {
		return ext, err
	}
	switch id.Type {
	case gjson.Null:
	case gjson.String:
		// The view ends here, the id does not.
		ext.SessionID = strings.Clone(id.Str)
	case gjson.False, gjson.True, gjson.Number, gjson.JSON:
		return ext, &FieldError{field + ".session_id", "a string", describe(id)}
	}
	return ext, nil
}

// members calls f for each member of an object, in order. There are none if v
// is absent or null; anything else is an error.
func members(v gjson.Result, field string, f func(key string, v gjson.Result)) error {
	if v.Type == gjson.Null {
		return nil
	}
	if !v.IsObject() {
		return &FieldError{field, "an object", describe(v)}
	}
	v.ForEach(func(key, v gjson.Result) bool {
		f(key.Str, v)
		return true
	})
	return nil
}

// maxShown is the length of the longest number that an error repeats, bytes.
const maxShown = 32

// describe names a value's type in JSON's words. Numbers and booleans are
// shown, as they are rarely secret and often the mistake itself.
func describe(v gjson.Result) string {
	switch v.Type {
	case gjson.Null:
		return "null"
	case gjson.False, gjson.True:
		return "boolean " + v.Raw
	case gjson.Number:
		if len(v.Raw) > maxShown {
			return "number " + v.Raw[:maxShown] + "..."
		}
		return "number " + v.Raw
	case gjson.String:
		return "string"
	case gjson.JSON:
		if v.IsArray() {
			return "array"
		}
	}
	return "object"
}
