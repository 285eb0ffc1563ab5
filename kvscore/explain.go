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
func (s *Scheduler) Explain(now time.Time, r *Request, among []TargetRef, bound int, p Policy, sel *Selection) Explanation {
	i := s.dry(now, r, among, p, sel)
	e := Explanation{Chosen: i, Preferred: i, Fault: sel.Fault}
	if len(sel.Drawn) > 1 {
		e.Drawn = sel.Drawn
	}
	if bound >= 0 && bound < len(among) {
		e.Chosen = bound
	}
	return e
}

// dry returns the position that the policy would choose, -1 without targets.
func (s *Scheduler) dry(now time.Time, r *Request, among []TargetRef, p Policy, sel *Selection) int {
	sel.Dry, sel.Drawn, sel.Fault = true, sel.Drawn[:0], false
	if len(among) == 0 {
		return -1
	}
	s.lookUp(now, r, sel)
	s.mu.Lock()
	defer s.mu.Unlock()
	defer sel.view.Drop()
	s.snapshot(now, r, among, sel)
	return s.choose(now, r, among, p, sel)
}
