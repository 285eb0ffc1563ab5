package main

import (
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// bytesPerToken is what the engines' tokenizer makes of made-up words.
const bytesPerToken = 4

// span is from least to most, both included. Values in it are equally likely.
type span struct{ least, most int }

func (s span) draw(rng *rand.Rand) int { return s.least + rng.IntN(s.most-s.least+1) }

// shape describes a workload. Lengths are in tokens, times are the engines'.
type shape struct {
	title    string
	about    string
	sessions int
	window   time.Duration // in which sessions begin; 0: all at once
	system   int           // the system prompt that all sessions share
	shared   int           // documents that sessions share; 0: each has its own
	document span          // before the first question
	turns    span
	heavy    float64 // the share of sessions that have heavyTurns
	heavyIs  span
	question span
	answer   span
	// think is about the mean time between an answer and the next question. A fifth of
	// it always passes; the rest is exponential, with an end at three times the mean.
	think  time.Duration
	deaths int  // engines that die in turn; each comes back
	alone  bool // each question stands alone, and the answers in the time count
	inTurn bool // one question at a time, in a fixed order, whenever sessions begin
	slow   bool // the first engine takes slowdown times as long as the others
}

// window is how long sessions begin, in the engines' time.
const window = 78 * time.Second

// shapes are the demo's workloads. Answers are short, for the time to first token
// hardly depends on them and each token costs this machine's time.
var shapes = []shape{
	{
		title: "Chat", about: "sessions with documents of their own",
		sessions: 18, window: window, system: 300,
		document: span{500, 3000}, turns: span{3, 6}, question: span{20, 120}, answer: span{16, 40}, think: 5 * time.Second,
	},
	{
		title: "Shared documents", about: "many sessions, one or two questions each",
		sessions: 50, window: window, system: 300,
		shared: 12, document: span{2000, 4000}, turns: span{1, 2}, question: span{20, 120}, answer: span{16, 40}, think: 5 * time.Second,
	},
	{
		title: "Agents", about: "a quarter of the sessions do most of the work",
		sessions: 14, window: window * 2 / 3, system: 1200,
		document: span{250, 1000}, turns: span{2, 5}, heavy: 0.25, heavyIs: span{12, 18},
		question: span{50, 600}, answer: span{16, 40}, think: 1500 * time.Millisecond,
	},
	{
		title: "Engines die", about: "chat; three engines die in turn and come back",
		sessions: 32, window: window, system: 300,
		document: span{2500, 5000}, turns: span{2, 4}, question: span{20, 120}, answer: span{16, 40}, think: 5 * time.Second, deaths: 3,
	},
	{
		title: "One system prompt", about: "12 clients of one application, all at once after a restart",
		sessions: 12, system: 4000, turns: span{4, 4}, question: span{20, 120}, answer: span{200, 200}, alone: true,
	},
	{
		title: "One slow engine", about: "chat; one of the engines takes three times as long",
		sessions: 18, window: window, system: 300,
		document: span{500, 3000}, turns: span{3, 6}, question: span{20, 120}, answer: span{16, 40}, think: 5 * time.Second, slow: true,
	},
}

// workload is all that is asked, and when. It follows from a shape and a seed, and
// never changes.
type workload struct {
	shape
	prompt   string // the system prompt
	sessions []*session
}

// session is one conversation.
type session struct {
	id       int
	begins   time.Duration // since the run's beginning
	document string
	turns    []turn
}

// turn is one question.
type turn struct {
	think    time.Duration // before it
	question string
	answer   int // tokens
}

func newWorkload(s shape, seed uint64) *workload {
	rng := rand.New(rand.NewPCG(seed, 0)) //nolint:gosec // not a secret
	w := &workload{shape: s, prompt: prose(rng, s.system)}
	library := make([]string, s.shared)
	for i := range library {
		library[i] = prose(rng, s.document.draw(rng))
	}
	begins := make([]time.Duration, s.sessions)
	for i := range begins {
		begins[i] = time.Duration(rng.Int64N(int64(max(s.window, 1))))
	}
	slices.Sort(begins)
	for i, at := range begins {
		c := &session{id: i, begins: at}
		if s.shared > 0 {
			c.document = library[popular(rng, s.shared)]
		} else {
			c.document = prose(rng, s.document.draw(rng))
		}
		c.turns = newTurns(s, rng)
		w.sessions = append(w.sessions, c)
	}
	return w
}

// popular draws one of n: number k with a weight of 1/(k+1), as Zipf's law has it.
func popular(rng *rand.Rand, n int) int {
	sum := 0.0
	for k := range n {
		sum += 1 / float64(k+1)
	}
	x := rng.Float64() * sum
	for k := range n {
		if x -= 1 / float64(k+1); x < 0 {
			return k
		}
	}
	return n - 1
}

func newTurns(s shape, rng *rand.Rand) []turn {
	n := s.turns.draw(rng)
	if rng.Float64() < s.heavy {
		n = s.heavyIs.draw(rng)
	}
	turns := make([]turn, n)
	for i := range turns {
		t := &turns[i]
		t.question, t.answer = prose(rng, s.question.draw(rng)), s.answer.draw(rng)
		if i > 0 {
			t.think = s.think/5 + time.Duration(min(rng.ExpFloat64(), 3)*float64(s.think)*4/5)
		}
	}
	return turns
}

// requests returns how many questions there are.
func (w *workload) requests() (n int) {
	for _, c := range w.sessions {
		n += len(c.turns)
	}
	return n
}

var syllables = [...]string{"an", "ber", "co", "dis", "el", "for", "gen", "hol", "in", "ker", "lo", "men", "no", "pre", "ra", "sen", "ti", "un", "ver", "wa"}

// prose returns made-up sentences of a number of tokens. They need no escapes in JSON.
func prose(rng *rand.Rand, tokens int) string {
	var b strings.Builder
	size := tokens * bytesPerToken
	b.Grow(size + 16)
	for b.Len() < size {
		for range 1 + rng.IntN(4) {
			b.WriteString(syllables[rng.IntN(len(syllables))])
		}
		if rng.IntN(12) == 0 {
			b.WriteByte('.')
		}
		b.WriteByte(' ')
	}
	return b.String()[:size]
}
