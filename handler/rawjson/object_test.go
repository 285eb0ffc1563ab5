package rawjson

import (
	"encoding/json"
	"math"
	"testing"
)

func TestAppendStringIsJSON(t *testing.T) {
	for _, s := range []string{"", "é\u2028<>&\x00", "\"\\\n\r\t", "id-1"} {
		var got string
		if err := json.Unmarshal(AppendString(nil, s), &got); err != nil || got != s {
			t.Errorf("%q became %q, %v", s, got, err)
		}
	}
}

func TestObject(t *testing.T) {
	o := Object{Buf: []byte("x"), More: true}
	o.Uint("a", math.MaxUint64)
	o.Float("b", math.NaN())
	o.Name("c")
	o.Open()
	o.Close()
	o.Name("d")
	o.Open()
	o.Float("e", 0.5)
	o.Float("f", math.Inf(-1))
	o.Raw("g", []byte("[]"))
	o.Close()
	o.Raw("h", []byte("null"))
	const want = `x,"a":18446744073709551615,"c":{},"d":{"e":0.5,"g":[]},"h":null`
	if string(o.Buf) != want {
		t.Errorf("%s, want %s", o.Buf, want)
	}
}
