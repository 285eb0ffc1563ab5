package rawjson

import "github.com/tidwall/gjson"

// maxValues bounds the values that Texts visits.
const maxValues = 1000

// Texts passes the texts in a JSON document to each, with the names of their members, until each
// returns false. Those in a list have the list's name. The document may be cut or malformed:
// behind such a place there may be none. Texts visits a thousand values, at most depth deep.
func Texts(doc []byte, depth int, each func(name, text string) bool) {
	left := maxValues
	texts("", gjson.ParseBytes(doc), depth, &left, each)
}

func texts(name string, v gjson.Result, depth int, left *int, each func(name, text string) bool) (more bool) {
	switch *left--; {
	case *left < 0:
		return false
	case v.Type == gjson.String:
		return each(name, v.Str)
	case depth == 0 || v.Type != gjson.JSON:
		return true
	}
	more = true
	object := v.IsObject()
	v.ForEach(func(key, value gjson.Result) bool {
		within := name
		if object {
			within = key.Str
		}
		more = texts(within, value, depth-1, left, each)
		return more
	})
	return more
}
