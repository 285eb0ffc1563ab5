package nvext

import (
	"reflect"
	"slices"
)

// field is a field of nvext, or of an object within it, by its tags in wire.
type field struct {
	name  string
	needs Grants
	own   bool
	in    []field // of a value that is an object
}

// maxFields is the largest number of fields in one object.
const maxFields = 22

var fields = fieldsOf(reflect.TypeFor[wire]())

func fieldsOf(t reflect.Type) (list []field) {
	for in := range t.Fields() {
		f := field{name: in.Tag.Get("json"), own: in.Tag.Get("own") != ""}
		f.needs, _ = ParseGrant(in.Tag.Get("grant"))
		if of := in.Type; of.Kind() == reflect.Struct {
			f.in = fieldsOf(of)
		} else if of.Kind() == reflect.Pointer && of.Elem().Kind() == reflect.Struct {
			f.in = fieldsOf(of.Elem())
		}
		list = append(list, f)
	}
	return list
}

func indexOf(fields []field, name string) int {
	return slices.IndexFunc(fields, func(f field) bool { return f.name == name })
}
