package nvext

import (
	"sync"

	"github.com/caddy-kvrouter/kvrouter/handler/rawjson"
	"github.com/tidwall/gjson"
)

// Parse reads the value of an nvext member. Null, as the whole value or as a
// field's, counts as absent. If a field occurs several times, the last one
// counts. Integers have neither a point nor an exponent. router_config_override
// may contain allowed_worker_ids, which then replaces the one beside it.
//
// The error is ErrMalformed, an [*UnknownError], or a [*FieldError] that names
// one of the wrong fields. A wrong value of a field that needs a grant is an
// error of Restrict instead, and only if the client has that grant.
func Parse(raw []byte, o Options) (Ext, error) {
	p := parsers.Get().(*parser)
	defer func() {
		*p = parser{} // release the body
		parsers.Put(p)
	}()
	*p = parser{raw: raw, opt: o}
	switch ok := p.nvext(); {
	case !ok:
		return Ext{}, ErrMalformed
	case p.err != nil:
		return Ext{}, p.err
	case p.unknown != nil:
		return Ext{}, p.unknown
	}
	return p.ext, nil
}

// parsers keeps parsers for reuse: the functions of the field table make a
// parser escape to the heap.
var parsers = sync.Pool{New: func() any { return new(parser) }}

// parser reads one nvext into ext. It continues after an error and keeps the
// first one.
type parser struct {
	raw []byte
	opt Options
	ext Ext

	place
	counted bool // token_data is a list of token ids
	err     *FieldError
	unknown *UnknownError
}

// place is the value that a parser reads.
type place struct {
	section string // the name of the object that has the field; empty at the top
	field   *field // nil for the whole nvext
	item    int    // 1 + the index of a list's element; inMember; 0 for the field itself
	member  string // the client's name of a member, for inMember
	at      rawjson.Span
}

const inMember = -1

// nvext reads the whole value. It returns false if that is not valid JSON.
func (p *parser) nvext() bool {
	c, ok := rawjson.Open(p.raw)
	if ok {
		return p.object("", fields, &c) && c.Alone()
	}
	p.at, ok = rawjson.ValueAt(p.raw, c.At)
	if !ok || !p.valid(p.at) || rawjson.SkipSpace(p.raw, p.at.End) < len(p.raw) {
		return false
	}
	if !p.at.IsNull(p.raw) {
		p.wrong(wantObject)
	}
	return true
}

// valid returns whether a value is valid JSON. The cursor has bounded its
// nesting: this check recurses.
func (p *parser) valid(s rawjson.Span) bool { return gjson.Valid(rawjson.View(s.Of(p.raw))) }

// object reads the object at a cursor: it finds the last value of each field,
// then reads the values in the table's order. It returns false if the object is
// not valid JSON. The objects within nvext have been checked as its values.
func (p *parser) object(section string, fields []field, c *rawjson.Cursor) bool {
	var last [maxFields]rawjson.Span
	for c.Next() {
		name := c.Name()
		n := indexOf(fields, name)
		if n < 0 {
			p.addUnknown(section, name)
		}
		v := rawjson.Span{Start: c.At}
		if n >= 0 && fields[n].name == nameTokenData && p.tokens(c) {
			v.End = c.At
		} else if v = c.Value(); c.Err != nil || section == "" && !p.valid(v) {
			return false
		}
		if section == "" && !p.valid(rawjson.Span{Start: c.KeyAt, End: c.KeyEnd}) {
			return false
		}
		if n >= 0 {
			last[n] = v
		}
	}
	for n := range fields {
		p.place = place{section: section, field: &fields[n], at: last[n]}
		p.read()
	}
	return c.Done
}

// read reads the value of a field. The fields of a section come before the
// section's own function.
func (p *parser) read() {
	f, at := p.field, p.at
	switch {
	case at.End == 0 || at.IsNull(p.raw):
		if f.required {
			p.invalid(wantString, "nothing")
		}
		return
	case f.in != nil && at.First(p.raw) != '{':
		p.wrong(wantObject)
		return
	case f.in != nil:
		c := rawjson.Enter(p.raw, at.Start)
		p.object(f.name, f.in, &c)
		p.place = place{field: f, at: at}
	}
	if f.read != nil {
		f.read(p)
	}
}
