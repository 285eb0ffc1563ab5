package sim

import (
	"cmp"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/engine"
)

// near is how many of the next arrivals a request may change places with.
const near = 8

// Hindsight moves the requests of c.Counted to other engines while that lowers a figure of theirs,
// and returns the best result. It begins with c.Places. It ends where no move helps, or after the
// given number of replays. All is known to it that comes later. A move is of one request, of one and
// those behind it on its engine that begin like it, or of two that change places.
func Hindsight(c Config, figure func(*Figures) float64, replays int) (*Result, error) {
	c.Places = slices.Clone(c.Places)
	start, err := replayed(c)
	if err != nil {
		return nil, err
	}
	s := &climb{Config: c, figure: figure, left: replays, best: start.result(), position: make([]int, len(c.Places))}
	for n := range start.requests {
		if s.position[n] = -1; c.Counted[n] {
			s.order = append(s.order, n)
		}
	}
	slices.SortStableFunc(s.order, func(a, b int) int { return cmp.Compare(start.requests[a].arrived, start.requests[b].arrived) })
	for i, n := range s.order {
		s.position[n] = i
	}
	for helped := true; helped && s.left > 0 && err == nil; {
		helped, err = s.sweep()
	}
	return s.best, err
}

// climb is a search in progress. Config has the best places so far.
type climb struct {
	Config
	figure   func(*Figures) float64
	left     int // replays
	best     *Result
	order    []int // requests by arrival
	position []int // of each request in order, -1: it has none

	before *replay // the arrivals that may be placed elsewhere
	err    error
}

// sweep tries the moves of each request, in their order.
func (s *climb) sweep() (helped bool, err error) {
	if s.before, err = begun(s.Config); err != nil {
		return false, err
	}
	for i, n := range s.order {
		s.before.run(func() bool { e := &s.before.events[0]; return e.arrival && s.position[e.n] >= i })
		alike := s.alike(i)
		for w := range s.Workers {
			helped = s.try(s.order[i:i+1], w, w) || helped
			helped = len(alike) > 1 && s.try(alike, w, w) || helped
		}
		for k := i + 1; k < min(i+1+near, len(s.order)); k++ {
			helped = s.try([]int{n, s.order[k]}, s.Places[s.order[k]], s.Places[n]) || helped
		}
	}
	return helped, s.err
}

// alike returns a request and those behind it on its engine that share half of its prompt.
func (s *climb) alike(i int) (all []int) {
	n := s.order[i]
	a := s.Trace.Requests[n].Blocks
	half := (len(a) - 1) / 2
	for _, m := range s.order[i:] {
		b := s.Trace.Requests[m].Blocks
		if s.Places[m] == s.Places[n] && len(a) > 0 && len(b) > half && a[half] == b[half] {
			all = append(all, m)
		}
	}
	return all
}

// try places requests elsewhere, the first one and the others, and keeps that if it helps.
func (s *climb) try(requests []int, first, others int) bool {
	if s.Places[requests[0]] == first || s.left <= 0 || s.err != nil {
		return false
	}
	s.left--
	r := s.before.clone()
	r.Places = slices.Clone(s.Places)
	for _, n := range requests {
		r.Places[n] = others
	}
	r.Places[requests[0]] = first
	r.run(func() bool { return len(r.tally.ttft) == len(s.order) })
	if s.err = r.err; s.err != nil {
		return false
	}
	res := r.result()
	if s.figure(&res.Figures) >= s.figure(&s.best.Figures) {
		return false
	}
	res.Places = r.Places
	s.best, s.Places, s.before.Places = res, r.Places, r.Places
	return true
}

// clone returns a copy of a replay without routers.
func (r *replay) clone() *replay {
	c := *r
	c.requests, c.events, c.stepping = slices.Clone(r.requests), slices.Clone(r.events), slices.Clone(r.stepping)
	c.tally.ttft = slices.Clone(r.tally.ttft)
	c.engines = make([]*engine.Engine, len(r.engines))
	for i, e := range r.engines {
		c.engines[i] = e.Clone(func(j *engine.Job) *engine.Job { return &c.requests[j.Number].Job })
	}
	c.view.Engines = c.engines
	return &c
}
