package sim

import (
	"container/heap"
	"time"
)

// event is the end of engine n's step, what a router told, the arrival of request n, or the end of
// its transfer.
type event struct {
	at      time.Duration
	arrival bool
	n       int
	tell    *telling
	moved   bool
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
	case (e.tell != nil) != (f.tell != nil):
		return f.tell != nil
	}
	return e.n < f.n
}

// events is a heap.
type events []event

func (q events) Len() int           { return len(q) }
func (q events) Less(i, j int) bool { return q[i].before(&q[j]) }
func (q events) Swap(i, j int)      { q[i], q[j] = q[j], q[i] }

// Push implements heap.Interface.
func (q *events) Push(e any) { *q = append(*q, e.(event)) }

// Pop implements heap.Interface.
func (q *events) Pop() any {
	last := len(*q) - 1
	e := (*q)[last]
	*q = (*q)[:last]
	return e
}

func (q *events) push(e event) { heap.Push(q, e) }
func (q *events) pop() event   { return heap.Pop(q).(event) }
