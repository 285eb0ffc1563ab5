package rawjson

import (
	"slices"
	"strings"
	"testing"
)

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
