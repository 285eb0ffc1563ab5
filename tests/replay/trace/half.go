package trace

import "slices"

// Half returns the first or the second half of the trace: of an open loop by time,
// of a closed one every other session. What is tuned on one half can be tested
// on the other.
func (t *Trace) Half(second bool) *Trace {
	h := *t
	h.Requests = nil
	if t.Closed {
		h.Name += pick(second, ", odd sessions", ", even sessions")
		odd := true
		for i := range t.Requests {
			if i == 0 || t.Requests[i].Session != t.Requests[i-1].Session {
				odd = !odd
			}
			if odd == second {
				h.Requests = append(h.Requests, t.Requests[i])
			}
		}
		return &h
	}
	h.Name += pick(second, ", second half", ", first half")
	middle := t.Duration() / 2
	n := len(t.Requests)
	for i := range t.Requests {
		if t.Requests[i].At >= middle {
			n = i
			break
		}
	}
	if !second {
		h.Requests = t.Requests[:n:n]
		return &h
	}
	h.Requests = slices.Clone(t.Requests[n:])
	for i := range h.Requests {
		h.Requests[i].At -= middle
	}
	return &h
}

func pick(second bool, yes, no string) string {
	if second {
		return yes
	}
	return no
}
