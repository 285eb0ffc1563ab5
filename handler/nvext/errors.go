package nvext

import (
	"errors"
	"strconv"
	"strings"
)

// ErrMalformed says that an nvext is not valid JSON, or nests deeper than
// rawjson.MaxDepth.
var ErrMalformed = errors.New("nvext: malformed JSON")

// FieldError says which field of an nvext is wrong.
type FieldError struct {
	// Field is the path to the field, such as "nvext.session_control".
	Field string
	// Want is what the field should be.
	Want string
	// Got is the type that the field has. It includes short values, but a text
	// of the client only if the field allows just a few words.
	Got string
	// Value says that the type is right and the value is wrong.
	Value bool
}

// Error returns a text that may be shown to the client.
func (e *FieldError) Error() string {
	return e.Field + ": expected " + e.Want + ", got " + e.Got
}

// UnknownError lists the unknown fields of an nvext, for [Options.Strict].
type UnknownError struct {
	// Fields are the paths to the first of them.
	Fields []string
	// More is the number of further ones.
	More int
}

// Error returns a text that may be shown to the client.
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
	// maxShown is how many bytes of a number, word or name an error repeats.
	maxShown = 32
)

// addUnknown records an unknown field if that is an error.
func (p *parser) addUnknown(section, name string) {
	if !p.opt.Strict {
		return
	}
	if p.unknown == nil {
		p.unknown = new(UnknownError)
	}
	if len(p.unknown.Fields) == maxUnknown {
		p.unknown.More++
		return
	}
	p.unknown.Fields = append(p.unknown.Fields, pathOf(section)+shownName(name))
}

// wrong records that the value has a wrong type.
func (p *parser) wrong(want string) {
	if p.err == nil {
		p.err = &FieldError{Field: p.path(), Want: want, Got: describe(p.at.Of(p.raw))}
	}
}

// invalid records that the value is wrong. It is an error now if the field needs
// no grant, else an error of Restrict.
func (p *parser) invalid(want, got string) {
	bad := &p.err
	if g := p.field.needs; g != 0 {
		bad = &p.ext.bad[g.number()]
	}
	if *bad == nil {
		*bad = &FieldError{Field: p.path(), Want: want, Got: got, Value: true}
	}
}

// path returns the path to the parser's place.
func (p *parser) path() string {
	switch {
	case p.field == nil:
		return "nvext"
	case p.item == inMember:
		return pathOf(p.section) + p.field.name + "." + shownName(p.member)
	case p.item > 0:
		return pathOf(p.section) + p.field.name + "[" + strconv.Itoa(p.item-1) + "]"
	}
	return pathOf(p.section) + p.field.name
}

// pathOf returns what precedes the names of a section's fields.
func pathOf(section string) string {
	if section == "" {
		return "nvext."
	}
	return "nvext." + section + "."
}

// describe names the type of a valid value. It shows numbers and booleans: they
// are rarely secret and often the mistake itself.
func describe(raw []byte) string {
	switch raw[0] {
	case 'n':
		return "null"
	case 't', 'f':
		return "boolean " + string(raw)
	case '"':
		return "string"
	case '[':
		return "array"
	case '{':
		return "object"
	}
	return "number " + short(string(raw))
}

// describeWord is describe for a text that should be one of a few words.
func describeWord(s string) string { return "string " + strconv.Quote(short(s)) }

func lengthOf(s string) string { return "one of " + strconv.Itoa(len(s)) }

// short returns a copy of a text's beginning.
func short(s string) string {
	if len(s) > maxShown {
		return s[:maxShown] + "..."
	}
	return strings.Clone(s)
}

// shownName returns the part of a client's name that an error repeats.
func shownName(s string) string { return strings.ToValidUTF8(short(s), "\ufffd") }
