package handler

import (
	"slices"
	"sync"
	"sync/atomic"
)

// Bounds of speculative prefills.
const (
	// maxSpeculative and maxSpeculativeWorker are how many there are at a time,
	// in a pool and on one worker.
	maxSpeculative, maxSpeculativeWorker = 64, 2
	// maxForeseen is the most memory, in bytes, that a pool keeps for them:
	// the bodies of requests whose answers are under way.
	maxForeseen = 256 << 20
	// maxKeptText is the longest answer, in bytes of JSON, that is kept to be a
	// part of the next turn's prompt.
	maxKeptText = 256 << 10
)

// The outcomes of speculative prefills.
const (
	speculativeOK       = "ok"        // it was computed
	speculativeFailed   = "failed"    // the worker did not answer, or with an error
	speculativeTimeout  = "timeout"   // it took too long
	speculativeNextTurn = "next_turn" // the session's next turn came first
	speculativeYielded  = "yielded"   // its place on a full worker was needed
	speculativeStopped  = "stopped"   // the configuration ended
	speculativeBusy     = "busy"      // the worker had too much to do
	speculativeLimit    = "limit"     // there were as many as there may be
	speculativeMemory   = "memory"    // the body could not be kept
	speculativeUnfit    = "unfit"     // the turn did not end well, or its answer is not all text
	speculativeOff      = "off"       // the operator does not allow it
)

// speculations are the speculative prefills of a pool, from when the turn's answer
// begins.
type speculations struct {
	open atomic.Int32 // how many there are; read without the lock

	mu       sync.Mutex
	bytes    int64                   // kept
	sessions map[string]*speculation // the latest of each session
	running  []*speculation
}

// expect records one whose turn has not ended. It returns false if there is no memory
// for it.
func (l *speculations) expect(s *speculation) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.bytes+s.size > maxForeseen {
		return false
	}
	l.bytes += s.size
	l.open.Add(1)
	if s.session != "" {
		if l.sessions == nil {
			l.sessions = make(map[string]*speculation)
		}
		l.sessions[s.session] = s
	}
	return true
}

// start records that the turn has ended well. It returns the outcome if the prefill
// must not begin, else nothing.
func (l *speculations) start(s *speculation) (outcome string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	there := 0
	for _, o := range l.running {
		if o.worker == s.worker {
			there++
		}
	}
	switch {
	case s.over != "":
		return s.over
	case len(l.running) >= maxSpeculative || there >= maxSpeculativeWorker:
		return speculativeLimit
	}
	l.running = append(l.running, s)
	s.worker.speculative.Add(1)
	return ""
}

// end removes one, and returns its outcome, which may have been set before.
func (l *speculations) end(s *speculation, outcome string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if s.over == "" {
		s.over = outcome
	}
	if l.sessions[s.session] == s {
		delete(l.sessions, s.session)
	}
	if i := slices.Index(l.running, s); i >= 0 {
		l.running = slices.Delete(l.running, i, i+1)
		s.worker.speculative.Add(-1)
	}
	l.bytes -= s.size
	l.open.Add(-1)
	return s.over
}

// callOff ends those that are meant. Their workers have their slots back when it
// returns.
func (l *speculations) callOff(outcome string, meant func(*speculation) bool) (ended bool) {
	l.mu.Lock()
	var list []*speculation
	for _, s := range l.running {
		if s.over == "" && meant(s) {
			s.over = outcome
			list = append(list, s)
		}
	}
	l.mu.Unlock()
	for _, s := range list {
		s.cancel()
		<-s.done
	}
	return len(list) > 0
}

// count returns how many run.
func (l *speculations) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.running)
}

// nextTurn ends the speculative prefill for a request that has come.
func (p *pool) nextTurn(plan *plan) {
	l := &p.speculations
	if l.open.Load() == 0 || !plan.computes || plan.request == nil {
		return
	}
	if key := plan.session.key; key != "" {
		l.mu.Lock()
		if s := l.sessions[key]; s != nil && s.over == "" && !slices.Contains(l.running, s) && s.precedes(plan) {
			s.over = speculativeNextTurn // it has not begun, and will not
		}
		l.mu.Unlock()
	}
	l.callOff(speculativeNextTurn, func(s *speculation) bool { return s.precedes(plan) })
}

// precedes tells whether the plan is that of the next turn. In a session, the next
// turn begins with this turn's prompt: clients make other requests in a session, too,
// such as one for its title. Without a session it also begins with the answer.
func (s *speculation) precedes(p *plan) bool {
	if s.session != "" && s.session == p.session.key {
		return len(s.turn.Blocks) == 0 || p.score.Root == s.turn.Root && beginsWith(p.score.Blocks, s.turn.Blocks)
	}
	return len(s.blocks) > 0 && p.score.Root == s.turn.Root && beginsWith(p.score.Blocks, s.blocks)
}

// beginsWith tells whether a prompt begins with another. It compares the last block
// only.
func beginsWith(prompt, start []uint64) bool {
	n := len(start)
	return len(prompt) >= n && prompt[n-1] == start[n-1]
}

// yield ends those on a worker, and tells whether there were any.
func (p *pool) yield(w *worker) bool {
	return w.speculative.Load() > 0 &&
		p.speculations.callOff(speculativeYielded, func(s *speculation) bool { return s.worker == w })
}
