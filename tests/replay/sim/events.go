package sim

import "time"

// event is the end of engine n's step or the arrival of request n.
type event struct {
	at      time.Duration
	arrival bool
	n       int
}

// before orders events: at the same time ends of steps come first, then by number.
func (e *event) before(f *event) bool {
	switch {
	case e.at != f.at:
		return e.at < f.at
	case e.arrival != f.arrival:
		return f.arrival
	}
	return e.n < f.n
}

// events is a heap, without the interface calls of container/heap.
type events []event

func (q *events) push(e event) {
	h := append(*q, e)
	*q = h
	for i := len(h) - 1; i > 0; {
		up := (i - 1) / 2
		if !h[i].before(&h[up]) {
			return
		}
		h[i], h[up] = h[up], h[i]
		i = up
	}
}

func (q *events) pop() event {
	h := *q
	top, last := h[0], len(h)-1
	h[0] = h[last]
	h = h[:last]
	*q = h
	for i := 0; ; {
		down := 2*i + 1
		if down >= last {
			return top
		}
		if down+1 < last && h[down+1].before(&h[down]) {
			down++
		}
		if !h[down].before(&h[i]) {
			return top
		}
		h[i], h[down] = h[down], h[i]
		i = down
	}
}
