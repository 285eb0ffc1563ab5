package synth

import (
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestTracesAreWellFormed(t *testing.T) {
	for _, name := range Names() {
		tr, err := Make(name, 1)
		if err != nil {
			t.Fatal(err)
		}
		before, last := map[uint64]uint64{}, time.Duration(0)
		for i := range tr.Requests {
			q := &tr.Requests[i]
			if q.In < 1 || q.Out < 1 || q.In+q.Out > 128_000 || len(q.Blocks) != q.In/block {
				t.Fatalf("%s: request %d has %d + %d tokens in %d blocks", name, i, q.In, q.Out, len(q.Blocks))
			}
			if q.At < 0 || q.Think < 0 || !tr.Closed && q.At < last {
				t.Fatalf("%s: request %d comes at %v after %v", name, i, q.At, last)
			}
			last = q.At
			parent := uint64(0)
			for _, h := range q.Blocks { // a hash stands for its whole prefix
				if p, known := before[h]; known && p != parent {
					t.Fatalf("%s: request %d has a block behind another one than before", name, i)
				}
				before[h], parent = parent, h
			}
			if tr.Closed && i > 0 && tr.Requests[i-1].Session == q.Session && tr.Requests[i-1].Turn >= q.Turn {
				t.Fatalf("%s: request %d has turn %d after %d", name, i, q.Turn, tr.Requests[i-1].Turn)
			}
		}
		if n := len(tr.Requests); n < 300 || n > 8000 {
			t.Errorf("%s: %d requests", name, n)
		}
	}
}

func TestASeedDecidesAll(t *testing.T) {
	for _, name := range Names() {
		a, _ := Make(name, 5)
		b, _ := Make(name, 5)
		c, _ := Make(name, 6)
		if !reflect.DeepEqual(a, b) {
			t.Errorf("%s: two traces of one seed differ", name)
		}
		if reflect.DeepEqual(a.Requests, c.Requests) {
			t.Errorf("%s: another seed changes nothing", name)
		}
	}
	if _, err := Make("x", 1); err == nil || !strings.Contains(err.Error(), `"x"`) {
		t.Errorf("error %v", err)
	}
}
