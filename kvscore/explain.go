package kvscore

import "time"

// Explanation is the choice that Select would make.
type Explanation struct {
	// Chosen is the position of the target that would be booked; -1 if there
	// are no targets.
	Chosen int
	// Preferred is the position that the policy would choose. It differs from
	// Chosen only where the choice is already made for another target.
	Preferred int
	// Drawn are the positions that Preferred was drawn from, if chance decides
	// among several: Select may draw another one of them. It is the
	// Selection's.
	Drawn []int
	// Fault says that the policy made no choice: see Selection.Fault.
	Fault bool
}

// drawAny takes in that chance may choose any candidate.
func (s *Selection) drawAny() {
	if !s.Dry {
		return
	}
	for i := range s.Candidates {
		s.Drawn = append(s.Drawn, i)
	}
}

// Explain tells what Select would choose at this moment, and why: sel then has
// each candidate's terms, with costs also where bound says that the choice is
// already made. Nothing is booked, and nothing remembered: sel.Dry tells the
// policy so.
func (s *Scheduler) Explain(now time.Time, r *Request, targets []Target, bound int, p Policy, sel *Selection) Explanation {
	sel.Dry, sel.Drawn = true, sel.Drawn[:0]
	if len(targets) == 0 {
		return Explanation{Chosen: -1, Preferred: -1}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	among := sel.among(targets)
	s.snapshot(now, r, among, sel)
	e := Explanation{Preferred: s.choose(now, r, among, p, sel)}
	e.Fault = sel.Fault
	if len(sel.Drawn) > 1 {
		e.Drawn = sel.Drawn
	}
	e.Chosen = e.Preferred
	if bound >= 0 && bound < len(targets) {
		e.Chosen = bound
	}
	return e
}
