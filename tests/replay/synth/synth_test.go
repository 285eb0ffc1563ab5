package synth

import (
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
