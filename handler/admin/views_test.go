package admin

import (
	"encoding"
	"encoding/json"
	"reflect"
	"testing"
)

// TestEveryMemberHasItsName looks for fields that the API would show under the name of their Go
// field.
func TestEveryMemberHasItsName(t *testing.T) {
	for _, v := range []any{poolView{}, workerView{}, sessionPage{}, explanation{}} {
		checkNames(t, reflect.TypeOf(v))
	}
}

func checkNames(t *testing.T, of reflect.Type) {
	for of.Kind() == reflect.Pointer || of.Kind() == reflect.Slice {
		of = of.Elem()
	}
	if of.Kind() != reflect.Struct || of.Implements(reflect.TypeFor[json.Marshaler]()) || of.Implements(reflect.TypeFor[encoding.TextMarshaler]()) {
		return
	}
	for i := range of.NumField() {
		f := of.Field(i)
		name := f.Tag.Get("json")
		if name == "-" || !f.IsExported() {
			continue
		}
		if name == "" && !f.Anonymous {
			t.Errorf("%s.%s has no name", of, f.Name)
		}
		checkNames(t, f.Type)
	}
}
