package api

import "github.com/caddy-kvrouter/kvrouter/handler/rawjson"

// Inner returns where the values of a member are in what another member of the
// body has: an object, or a list of objects and nulls. Of several of one name it
// has all, for readers differ in which of them counts. Nothing and null have none.
// It is not ok if the value is something else, or has too many.
func (e *Editor) Inner(name, member string) (at []rawjson.Span, ok bool) {
	i := e.last(name)
	if i < 0 {
		return nil, true
	}
	if at, ok = e.InnerAt(e.members[i].Span, member); ok {
		e.dropBefore(name, i)
	}
	return at, ok
}

// InnerAt is Inner for a value at a place of the body.
func (e *Editor) InnerAt(value rawjson.Span, member string) (at []rawjson.Span, ok bool) {
	switch value.First(e.body) {
	case '{':
		return e.valuesIn(nil, value.Start, member)
	case '[':
		for v := range value.Elements(e.body) {
			if v.IsNull(e.body) {
				continue
			}
			if v.First(e.body) != '{' {
				return nil, false
			}
			if at, ok = e.valuesIn(at, v.Start, member); !ok {
				return nil, false
			}
		}
		return at, true
	}
	return nil, value.IsNull(e.body)
}

// valuesIn appends where the values of a member are in the object that opens at
// body[i].
func (e *Editor) valuesIn(at []rawjson.Span, i int, member string) (all []rawjson.Span, ok bool) {
	c := rawjson.Enter(e.body, i)
	for c.Next() {
		is := string(c.Key()) == member
		v := c.Value()
		if !is {
			continue
		}
		if len(at) == maxElements {
			return nil, false
		}
		at = append(at, v)
	}
	return at, c.Err == nil
}
