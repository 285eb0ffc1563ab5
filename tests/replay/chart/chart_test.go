package chart

import (
	"bytes"
	"encoding/xml"
	"io"
	"strings"
	"testing"
)

// elements parses a document and counts its elements.
func elements(t *testing.T, doc []byte) map[string]int {
	t.Helper()
	n := make(map[string]int)
	for d := xml.NewDecoder(bytes.NewReader(doc)); ; {
		token, err := d.Token()
		if err == io.EOF {
			return n
		} else if err != nil {
			t.Fatalf("%v in %s", err, doc)
		}
		if e, ok := token.(xml.StartElement); ok {
			n[e.Name.Local]++
		}
	}
}

func TestBars(t *testing.T) {
	names := []string{"a", "b<c>", "d"}
	groups := make([]Group, 30)
	for i := range groups {
		groups[i] = Group{Lines: []string{"one & two", "low"}, Values: []float64{1, 0.3 + float64(i)/10, 0}}
	}
	var first, second bytes.Buffer
	if err := Bars(&first, "title", names, groups); err != nil {
		t.Fatal(err)
	}
	if err := Bars(&second, "title", names, groups); err != nil || !bytes.Equal(first.Bytes(), second.Bytes()) {
		t.Error("two drawings of the same differ")
	}
	// The background, three in the legend, and two in each group.
	if n := elements(t, first.Bytes()); n["rect"] != 1+3+60 {
		t.Errorf("%v", n)
	}
	if s := first.String(); strings.Contains(s, "NaN") || strings.Contains(s, "Inf") || strings.Contains(s, "%!") {
		t.Error(s)
	}
}

func TestLines(t *testing.T) {
	panels := []Panel{
		{Name: "wide", Lines: [][]Point{{{0, 1}, {5, 100}, {10, 0}}, {{0, 2}, {10, 3}}}},
		{Name: "narrow", Lines: [][]Point{{{0, 10}, {10, 12}}, nil}},
		{Name: "nothing", Lines: [][]Point{nil, nil}},
	}
	var b bytes.Buffer
	if err := Lines(&b, "title", []string{"a", "b"}, panels); err != nil {
		t.Fatal(err)
	}
	if n := elements(t, b.Bytes()); n["polyline"] != 6 {
		t.Errorf("%v", n)
	}
	if s := b.String(); strings.Contains(s, "NaN") || strings.Contains(s, "Inf") || strings.Contains(s, "%!") {
		t.Error(s)
	}
}
