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

// Arrived records that the attempt has its header, or failed before it. See Stay.
func (a *Attempt) Arrived() (moved bool) {
	a.waiting.Store(false)
	return a.Stay()
}

// Stay records that the attempt cannot move any more. It returns whether it was canceled to move.
func (a *Attempt) Stay() (moved bool) {
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

// IsHung returns whether the worker is hung.
func (w *Worker) IsHung() bool { return w.progress.hungSince.Load() != 0 }

// HungSince returns when the worker was found hung.
func (w *Worker) HungSince() time.Time { return tickTime(w.progress.hungSince.Load()) }

// MarkHung records that the worker is hung, and marks it down.
func (w *Worker) MarkHung(t time.Time) {
	w.progress.hungSince.Store(ticks(t))
	w.Health.MarkHung(t)
}

// EndHung records that the worker is not hung, and returns since when it was.
func (w *Worker) EndHung() (since time.Time) { return tickTime(w.progress.hungSince.Swap(0)) }

// OutputSince returns whether output of the worker came after a time.
func (w *Worker) OutputSince(t time.Time) bool { return w.progress.lastOutput.Load() > ticks(t) }

// AnsweredSince returns whether the worker answered a question of the router's own after a time.
func (w *Worker) AnsweredSince(t time.Time) bool { return w.progress.lastAnswer.Load() > ticks(t) }

// AnsweredRouter records that the worker answered a question of the router's own.
func (w *Worker) AnsweredRouter(t time.Time) { w.progress.lastAnswer.Store(ticks(t)) }

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

// HungCheck is the time between two checks for hung workers.
const HungCheck = time.Second

// Silence is how long a worker has been silent, and what waits for it.
type Silence struct {
	Since   time.Time
	Stalled bool     // output came after the first of the streams had begun
	Longest *Attempt // the stream with the most prefill ahead
	Waiting int      // number of streams that wait for output
}

// Silence returns the worker's silence. waited is false if no stream waits for output.
func (w *Worker) Silence() (s Silence, waited bool) {
	f := &w.progress
	f.mu.Lock()
	defer f.mu.Unlock()
	for a := range f.attempts {
		if a.Kind == KindStream && a.waiting.Load() {
			if s.Waiting == 0 || a.Begun.Before(s.Since) {
				s.Since = a.Begun
			}
			s.Waiting++
		}
	}
	if last := tickTime(f.lastOutput.Load()); s.Since.Before(last) {
		s.Since, s.Stalled = last, true
	}
	for a := range f.attempts {
		// an attempt that begins later does not explain the silence
		if a.Kind == KindStream && (s.Longest == nil || a.Ahead >= s.Longest.Ahead) && a.Begun.Before(s.Since.Add(HungCheck)) {
			s.Longest = a
		}
	}
	return s, s.Waiting > 0
}
