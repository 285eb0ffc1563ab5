package handler

import (
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

// TestPeek wants no more to be read than shows what a body is, and nothing to be
// lost.
func TestPeek(t *testing.T) {
	long := strings.Repeat(" \r\n\t", maxSpace/4)
	for _, v := range []struct {
		body  string
		first byte
		err   bool
	}{
		{"", nothing, false},
		{" \n", nothing, false},
		{"{}", '{', false},
		{"\t\r\n {}", '{', false},
		{"\x00\x00", 0, false},
		{long[1:] + "x", 'x', false},
		{long + "x", ' ', false},
		{long, ' ', false},
		{"  ", nothing, true},
	} {
		for _, slow := range []bool{false, true} {
			var body io.Reader = strings.NewReader(v.body)
			if v.err {
				body = io.MultiReader(body, iotest.ErrReader(errors.New("broken")))
			}
			if slow {
				body = iotest.OneByteReader(body)
			}
			begin, first, err := peek(body)
			if first != v.first || (err != nil) != v.err {
				t.Errorf("%q, slow %v: first %q, error %v; want %q, error %v", v.body, slow, first, err, v.first, v.err)
			}
			rest, _ := io.ReadAll(body)
			if whole := string(begin) + string(rest); err == nil && whole != v.body {
				t.Errorf("%q, slow %v: %q is left", v.body, slow, whole)
			}
		}
	}
}
