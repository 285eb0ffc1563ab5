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

// shape is what the conversations are like. Lengths are in tokens, times are the
// engines'.
type shape struct {
	window    time.Duration // in which conversations begin
	rate      float64       // how many begin in a second
	system    int           // the system prompt that all share
	documents float64       // the share of conversations about a document
	document  span
	shared    float64 // the share of documents that several conversations are about
	readers   span    // how many more conversations these are
	turns     span
	question  span
	answer    span
	// think is the mean of the time between an answer and the next question, of
	// which thinkLeast is always taken; the rest is exponential.
	think, thinkLeast time.Duration
}

// chats are the demo's: people who ask about documents, their own or their team's,
// and people who just chat, with an assistant that all know by one system prompt.
var chats = shape{
	window:     270 * time.Second,
	rate:       0.76,
	system:     1500,
	documents:  0.65,
	document:   span{8000, 20000},
	shared:     1.0 / 8,
	readers:    span{1, 3},
	turns:      span{3, 9},
	question:   span{30, 200},
	answer:     span{60, 200},
	think:      14 * time.Second,
	thinkLeast: 3 * time.Second,
}

// workload is all that is asked, and when. It follows from a shape and a seed, and
// is never changed.
type workload struct {
	window        time.Duration
	system        string
	conversations []*conversation // in order of their beginning
}

// conversation is one chat.
type conversation struct {
	id       int
	begins   time.Duration // since the run's beginning
	document string        // before the first question; empty: there is none
	turns    []turn
}

// turn is a question, and how long an answer it has.
type turn struct {
	think    time.Duration // before it
	question string
	answer   int
}

func newWorkload(s shape, seed uint64) *workload {
	rng := rand.New(rand.NewPCG(seed, 0)) //nolint:gosec // not a secret
	w := &workload{window: s.window, system: prose(rng, s.system)}
	n := max(1, int(s.rate*s.window.Seconds()+0.5))
	begins := make([]time.Duration, n)
	for i := range begins {
		begins[i] = time.Duration(rng.Int64N(int64(s.window)))
	}
	slices.Sort(begins)
	var shared shelf
	for i, at := range begins {
		// A conversation of its own seed stays the same when there are more of them.
		rng := rand.New(rand.NewPCG(seed, uint64(i)+1)) //nolint:gosec // not a secret
		c := newConversation(s, rng)
		c.id, c.begins = i, at
		if rng.Float64() < s.documents {
			c.document = shared.pick(s, rng)
		}
		w.conversations = append(w.conversations, c)
	}
	return w
}

// shelf has the documents that more conversations will be about.
type shelf []*loan

type loan struct {
	document string
	readers  int // conversations to come
}

// pick returns the document of a conversation: one that others read, as long as
// there are some, in half of the cases, else a new one.
func (f *shelf) pick(s shape, rng *rand.Rand) string {
	if list := *f; len(list) > 0 && rng.IntN(2) == 0 {
		i := rng.IntN(len(list))
		l := list[i]
		if l.readers--; l.readers == 0 {
			*f = slices.Delete(list, i, i+1)
		}
		return l.document
	}
	document := prose(rng, s.document.draw(rng))
	if rng.Float64() < s.shared {
		*f = append(*f, &loan{document, s.readers.draw(rng)})
	}
	return document
}

func newConversation(s shape, rng *rand.Rand) *conversation {
	c := &conversation{turns: make([]turn, s.turns.draw(rng))}
	for i := range c.turns {
		t := &c.turns[i]
		t.question, t.answer = prose(rng, s.question.draw(rng)), s.answer.draw(rng)
		if i > 0 {
			t.think = s.thinkLeast + time.Duration(rng.ExpFloat64()*float64(s.think-s.thinkLeast))
		}
	}
	return c
}

// question returns what the user says in a turn.
func (c *conversation) question(i int) string {
	if i == 0 && c.document != "" {
		return c.document + "\n\n" + c.turns[0].question
	}
	return c.turns[i].question
}

// turns returns how many questions there are.
func (w *workload) turns() (n int) {
	for _, c := range w.conversations {
		n += len(c.turns)
	}
	return n
}

var syllables = [...]string{"an", "ber", "co", "dis", "el", "for", "gen", "hol", "in", "ker", "lo", "men", "no", "pre", "ra", "sen", "ti", "un", "ver", "wa"}

// prose returns made-up sentences of so many tokens.
func prose(rng *rand.Rand, tokens int) string {
	var b strings.Builder
	size := tokens * bytesPerToken
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
