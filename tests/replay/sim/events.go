package sim

import "time"

// event is the end of engine n's step, what a router told, the arrival of request n, the end of its
// transfer, or anything else.
type event struct {
	at      time.Duration
	arrival bool
	n       int
	tell    *telling
	moved   bool
	do      func()
}

// before orders events: at the same time ends of steps come first, arrivals last, then by number.
func (e *event) before(f *event) bool {
	switch {
	case e.at != f.at:
		return e.at < f.at
	case e.arrival != f.arrival:
		return f.arrival
	case e.moved != f.moved:
		return f.moved
	case (e.do != nil) != (f.do != nil):
		return f.do != nil
	case (e.tell != nil) != (f.tell != nil):
		return f.tell != nil
	}
	return e.n < f.n
}

// events is a heap. container/heap would allocate for each event.
type events []event

func (q *events) push(e event) {
	*q = append(*q, e)
	list, i := *q, len(*q)-1
	for i > 0 && list[i].before(&list[(i-1)/2]) {
		list[i], list[(i-1)/2] = list[(i-1)/2], list[i]
		i = (i - 1) / 2
	}
}

func (q *events) pop() event {
	list, last := *q, len(*q)-1
	first := list[0]
	list[0] = list[last]
	list = list[:last]
	*q = list
	for i := 0; 2*i+1 < last; {
		child := 2*i + 1
		if child+1 < last && list[child+1].before(&list[child]) {
			child++
		}
		if !list[child].before(&list[i]) {
			break
		}
		list[i], list[child] = list[child], list[i]
		i = child
	}
	return first
}
