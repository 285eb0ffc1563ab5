package rawjson

import (
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// walk passes over the members of an object.
func walk(b []byte) error {
	c, _ := Open(b)
	for c.Next() {
		c.Value()
	}
	if c.Err == nil && !c.Alone() {
		return ErrMalformed
	}
	return c.Err
}

func TestReadAndElements(t *testing.T) {
	b := []byte(` {"a":1,"b":"x\ny","a":2,"l":[1,{"b":"z"},[2],null,{}],"n":null,"\u0062b":[ ]}`)
	c, ok := Open(b)
	if !ok || !c.Empty {
		t.Fatal("no object")
	}
	var first, l Span
	end := ReadAt(b, c.At-1, To("a", &first), To("l", &l))
	if end != len(b) || string(first.Of(b)) != "2" {
		t.Errorf("up to %d, a is %s", end, first.Of(b))
	}
	whole := Span{1, len(b)}
	if s := whole.Get(b, "b").Text(b); s != "x\ny" {
		t.Errorf("b is %q", s)
	}
	if v := whole.Get(b, "bb"); v.First(b) != '[' || v.HasContent(b) {
		t.Errorf("bb is %s", v.Of(b))
	}
	if v := whole.Get(b, "n"); !v.IsNull(b) || v.HasContent(b) || v.Len() != 4 {
		t.Errorf("n is %s", v.Of(b))
	}
	if v := whole.Get(b, "none"); v != (Span{}) || v.First(b) != 0 {
		t.Errorf("none is %v", v)
	}
	if n := len(slices.Collect(l.Elements(b))); n != 5 {
		t.Errorf("%d elements", n)
	}
	if n := len(slices.Collect(l.Objects(b))); n != 2 {
		t.Errorf("%d objects", n)
	}
	if n := testing.AllocsPerRun(10, func() {
		whole.Get(b, "n")
		for v := range l.Objects(b) {
			v.Read(b, To("b", &first), To("c", &l))
		}
	}); n > 1 { // for the key with an escape
		t.Errorf("%v allocations", n)
	}
}

// FuzzCursor checks the walk against encoding/json, and that members are cut out
// and spliced back.
func FuzzCursor(f *testing.F) {
	f.Add([]byte(`{"a":[1,{"b":"]}\""}],"\u00e9\ud83d\ude00":null,"c":-1.5e3}`), uint64(5))
	f.Add([]byte(` { } `), uint64(0))
	f.Add([]byte("\xef\xbb\xbf{}"), uint64(0))
	f.Add([]byte(`{"a":1,"a":2,"":{}}x`), uint64(2))
	f.Add([]byte(`{"a":"\\","b":tru,}`), uint64(1))
	for _, escaped := range []string{`\n\"\\\/`, `\u00e9\b\f\r\t`, `\ud83d`, `\ude00\ud83d`, `\ud83d\u0061`, `\ud83da`, `\uD83D\uDE00`, `\u0000`, `é😀\u0001`} {
		f.Add([]byte(`{"`+escaped+`":1}`), uint64(0))
	}
	f.Fuzz(func(t *testing.T, b []byte, drop uint64) {
		var want map[string]json.RawMessage
		valid := json.Unmarshal(b, &want) == nil && want != nil && utf8.Valid(b)
		err := walk(b)
		if !valid {
			return // it must end, and not panic
		}
		if err != nil {
			if errors.Is(err, ErrDepth) {
				return
			}
			t.Fatalf("%s: %v", b, err)
		}
		got, kept := map[string]json.RawMessage{}, map[string]json.RawMessage{}
		c, _ := Open(b)
		cut, element := EditAt(b, c.At-1, len(b)), 0
		for n := 0; c.Next(); n++ {
			name := Text(b[c.KeyAt+1 : c.KeyEnd-1])
			v := c.Value()
			if key := unescapeKey(b[c.KeyAt+1 : c.KeyEnd-1]); len(name) <= maxKey && len(key) <= maxKey && string(key) != name {
				t.Fatalf("key %q and name %q", key, name)
			}
			got[name] = v.Of(b)
			if drop>>(n%64)&1 == 0 {
				kept[name] = v.Of(b)
			}
		}
		cut.Drop(func(string, Span) bool {
			element++
			return drop>>((element-1)%64)&1 == 1
		})
		same := func(a, b json.RawMessage) bool { return bytes.Equal(a, b) }
		if !maps.EqualFunc(got, want, same) {
			t.Fatalf("%s: read as %s", b, got)
		}
		var left map[string]json.RawMessage
		out := cut.Apply()
		if err := json.Unmarshal(out, &left); err != nil || !maps.EqualFunc(left, kept, same) {
			t.Fatalf("%s: cut to %s, want %s: %v", b, out, kept, err)
		}
	})
}

// textsOf returns the texts of a document as name=text.
func textsOf(doc string, depth int) (all []string) {
	Texts([]byte(doc), depth, func(name, text string) bool {
		all = append(all, name+"="+text)
		return text != "stop"
	})
	return all
}

func TestTexts(t *testing.T) {
	for doc, want := range map[string]string{
		`{"id":"a","n":1,"b":{"job_id":"b","x":null},"file_ids":["c","d"]}`: "id=a job_id=b file_ids=c file_ids=d",
		`{"a":{"b":{"c":{"id":"deep"}}},"id":"x"}`:                          "id=x",
		`{"id":"x","b64":"AAAA`:                                             "id=x",
		`[{"id":"x"},"y"]`:                                                  "id=x =y",
		`"x"`:                                                               "=x",
		`{"a":"stop","b":"x"}`:                                              "a=stop",
		`{"id":"a\u0062"}`:                                                  "id=ab",
		``:                                                                  "", `{`: "", `7`: "",
	} {
		got := slices.DeleteFunc(textsOf(doc, 3), func(s string) bool { return strings.HasPrefix(s, "b64=") }) // of a cut text
		if s := strings.Join(got, " "); s != want {
			t.Errorf("%s: %q, want %q", doc, s, want)
		}
	}
	if n := len(textsOf("["+strings.Repeat(`"x",`, 5000)+`"x"]`, 3)); n >= maxValues {
		t.Errorf("%d texts", n)
	}
}

// FuzzTexts has any document, cut anywhere.
func FuzzTexts(f *testing.F) {
	f.Add(`{"id":"a","b":{"job_id":["b"]}}`, uint16(20))
	f.Add(`[[[["x"]]]]`, uint16(3))
	f.Fuzz(func(t *testing.T, doc string, cut uint16) {
		for _, s := range []string{doc, doc[:min(len(doc), int(cut))]} {
			if n := len(textsOf(s, 3)); n > maxValues {
				t.Errorf("%d texts", n)
			}
		}
	})
}
