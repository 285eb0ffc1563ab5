package main

import (
	"sync"
	"time"
)

// sample is one turn that was answered. Times are the engines'.
type sample struct {
	at             time.Duration // when it was asked, since the run's beginning
	ttft, total    time.Duration
	prompt, cached int64 // tokens
}

// tally is what came of a run so far.
type tally struct {
	mu      sync.Mutex
	samples []sample
	asked   int
	failed  int // there was no answer
	broken  int // the answer had begun
	silent  int // of these, without a token
	givenUp int // turns without a whole answer after all attempts
	// The time to first token of the whole answers, each from the sending of its
	// own request, in sum.
	waited time.Duration
	workingSet
}

// add takes in a turn that was answered. Its answer's own request waited so long
// for the first token.
func (t *tally) add(s sample, waited time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.samples = append(t.samples, s)
	t.waited += waited
}

// perAnswer returns the mean time that a whole answer's own request waited for the
// first token.
func (t *tally) perAnswer() time.Duration {
	return t.waited / time.Duration(max(len(t.samples), 1))
}

// giveUp takes in that a turn had no whole answer.
func (t *tally) giveUp() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.givenUp++
}

// count takes in what came of a request.
func (t *tally) count(a *answer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.asked++
	switch {
	case a.whole:
	case !a.began:
		t.failed++
	default:
		t.broken++
		if a.first.IsZero() {
			t.silent++
		}
	}
}

// hold takes in that a conversation about a document has grown from so many tokens
// to so many. Those of one that has not begun, or has ended, are 0.
func (t *tally) hold(document string, before, after int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.grow(document, before, after)
}

// workingSet counts the tokens of the conversations that are under way. A document
// counts once, however many conversations are about it.
type workingSet struct {
	open, peak int64 // tokens now, and the most there were
	readers    map[string]int
}

func (s *workingSet) grow(document string, before, after int64) {
	s.open += after - before
	switch {
	case document == "" || (before == 0) == (after == 0):
	case before == 0:
		if s.readers == nil {
			s.readers = make(map[string]int)
		}
		if s.readers[document]++; s.readers[document] > 1 {
			s.open -= tokensOf(document)
		}
	default:
		if s.readers[document]--; s.readers[document] > 0 {
			s.open += tokensOf(document)
		}
	}
	s.peak = max(s.peak, s.open)
}

func tokensOf(text string) int64 { return int64(len(text) / bytesPerToken) }
