package kvscore

import "time"

// Explanation is the choice that Select would make.
type Explanation struct {
	// Chosen is the position of the target that Select would book; -1 if there are no
	// targets.
	Chosen int
	// Preferred is the position that the policy would choose. It differs from
	// Chosen only if bound names another target.
	Preferred int
	// Drawn are the positions among which chance decides: Select may choose another one
	// of them. Nil if chance decides nothing. The slice belongs to the Selection.
	Drawn []int
	// Fault says that the policy returned an invalid choice: see Selection.Fault.
	Fault bool
}

// drawAny records in a dry run that chance decides among all candidates.
func (s *Selection) drawAny() {
	if !s.Dry {
		return
	}
	for i := range s.Candidates {
		s.Drawn = append(s.Drawn, i)
	}
}

// Explain returns the choice that Select would make now. It leaves each candidate's terms
// and cost in sel, with costs even if bound names a target. It books and remembers
// nothing: it sets sel.Dry for the policy.
func (s *Scheduler) Explain(now time.Time, r *Request, targets []Target, bound int, p Policy, sel *Selection) Explanation {
	sel.Dry, sel.Drawn = true, sel.Drawn[:0]
	if len(targets) == 0 {
		return Explanation{Chosen: -1, Preferred: -1}
	}
	s.lookUp(now, r, sel)
	s.mu.Lock()
	defer s.mu.Unlock()
	among := sel.among(targets)
	s.snapshot(now, r, among, sel)
	e := Explanation{Preferred: s.choose(now, r, among, p, sel)}
	sel.view.Drop()
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
