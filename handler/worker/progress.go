package worker

import (
	"slices"
	"time"
)

// Enter counts the attempt in the worker's progress, and as a trial in its health.
func (a *Attempt) Enter(trial bool) {
	if a.trial = trial; trial {
		a.ticket = a.Worker.Health.Admit(a.Begun)
	}
	a.entered = true
	if a.Kind == KindOther {
		return
	}
	a.waiting.Store(true)
	f := &a.Worker.progress
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.attempts == nil {
		f.attempts = make(map[*Attempt]struct{})
	}
	f.attempts[a] = struct{}{}
}

// Exit ends Enter. Only the first call counts.
func (a *Attempt) Exit() {
	if !a.entered {
		return
	}
	a.entered = false
	if a.trial {
		a.Worker.Health.Leave(a.ticket)
	}
	f := &a.Worker.progress
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.attempts, a)
}

// Waits records that the attempt waits for the worker, or no longer does.
func (a *Attempt) Waits(waits bool) { a.waiting.Store(waits) }

// Progress records that a part of a good answer has come.
func (a *Attempt) Progress(t time.Time) {
	if a.Kind != KindOther {
		a.Worker.progress.lastOutput.Store(ticks(t))
	}
}

// canceled is the move of an attempt that was canceled to move.
var canceled = new(Move)

// MayMove lets the attempt move to another worker. The caller then sends it.
func (a *Attempt) MayMove(m *Move) { a.move.CompareAndSwap(nil, m) }

// Arrived records that the attempt has its header, or failed before it. See ForbidMove.
func (a *Attempt) Arrived() (moved bool) {
	a.waiting.Store(false)
	return a.ForbidMove()
}

// ForbidMove records that the attempt cannot move any more. It returns whether it was canceled to move.
func (a *Attempt) ForbidMove() (moved bool) {
	a.move.CompareAndSwap(a.Movable(), nil)
	return a.Moved()
}

// Moved returns whether the attempt was canceled to move.
func (a *Attempt) Moved() bool { return a.move.Load() == canceled }

// Movable returns how the attempt can move, nil if it cannot.
func (a *Attempt) Movable() *Move {
	if m := a.move.Load(); m != canceled {
		return m
	}
	return nil
}

// Cancel cancels the attempt so that it moves, unless it cannot move any more.
func (a *Attempt) Cancel(drained bool) {
	if m := a.Movable(); m != nil && a.move.CompareAndSwap(m, canceled) {
		m.Cancel(drained)
	}
}

// MayEnd lets the attempt be ended with an error if it cannot move.
func (a *Attempt) MayEnd(end func()) { a.end.Store(&end) }

// End ends the attempt, unless it can move, does not wait for the worker, or must not be ended.
func (a *Attempt) End() {
	if end := a.end.Load(); end != nil && a.move.Load() == nil && a.waiting.Load() {
		(*end)()
	}
}

// started is the zero of ticks, before all times of the process. It has a monotonic reading, so a change
// of the system's clock makes no worker hung.
var started = time.Now().Add(-time.Hour)

// ticks returns a time as nanoseconds since started, at least 1.
func ticks(t time.Time) int64 { return max(int64(t.Sub(started)), 1) }

// tickTime is the reverse of ticks.
func tickTime(n int64) time.Time { return started.Add(time.Duration(n)) }

// outputSince returns whether output of the worker came after a time.
func (w *Worker) outputSince(t time.Time) bool { return w.progress.lastOutput.Load() > ticks(t) }

// Attempts returns the attempts that can move to another worker or be ended, oldest first.
func (w *Worker) Attempts() []*Attempt {
	f := &w.progress
	f.mu.Lock()
	defer f.mu.Unlock()
	var list []*Attempt
	for a := range f.attempts {
		if a.Movable() != nil || a.end.Load() != nil {
			list = append(list, a)
		}
	}
	slices.SortFunc(list, func(a, b *Attempt) int { return a.Begun.Compare(b.Begun) })
	return list
}
