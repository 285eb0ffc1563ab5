package main

import (
	"fmt"
	"math/rand/v2"
	"slices"
)

// talk is one conversation. Each prompt is the one before, its answer and a question.
type talk struct {
	number   int
	name     string // of the case, in reports
	api      api
	stream   bool
	spelling spelling // how the client writes JSON
	session  string   // the value of X-Session-Id; empty: the client sends none
	salt     string
	model    string
	system   string
	head     []uint32 // of a talk of token ids: how it begins
	turns    []string // what the user says; token ids are drawn
	answer   int      // tokens of each answer, at most
	edit     edit
	branches int // further questions at the same time in each later turn
	rng      *rand.Rand

	history []spoken
	taken   int    // turns
	tokens  int    // of the last prompt
	held    int    // tokens that an engine has cached of the last turn
	at      target // that answered it
}

// edit is how a client changes its history.
type edit int

const (
	keep   edit = iota
	change      // changes a message in the middle
	drop        // drops the oldest question and its answer
)

// shape is how large conversations are.
type shape struct {
	model            string
	apis             []api
	conversations    int // of each API
	turns            int
	minText, maxText int // bytes of each text of a user, and of each system prompt
	seed             uint64
}

func (s *shape) rng(stream int) *rand.Rand {
	return rand.New(rand.NewPCG(s.seed, uint64(stream))) //nolint:gosec // not a secret
}

// newTokens returns token ids that are no special tokens of any model.
func newTokens(rng *rand.Rand, n int) []uint32 {
	ids := make([]uint32, n)
	for i := range ids {
		ids[i] = uint32(10 + rng.IntN(2000)) //nolint:gosec // small
	}
	return ids
}

// say draws the texts of a conversation. A third of conversations have one kind of
// text, a third another one in each message, and a third several in a message.
func (s *shape) say(t *talk, i int) {
	own := kinds[i/3%len(kinds)]
	text := func() string {
		size := s.minText + t.rng.IntN(s.maxText-s.minText+1)
		switch i % 3 {
		case 0:
			return textOf(t.rng, own, size)
		case 1:
			return textOf(t.rng, pick(t.rng, kinds), size)
		default:
			return mixed(t.rng, size)
		}
	}
	t.system = text()
	for range s.turns {
		t.turns = append(t.turns, text())
	}
}

// own returns conversations that have nothing in common. Every second one is streamed.
func (s *shape) own(name string) (all []*talk) {
	for i := range s.conversations {
		for _, api := range s.apis {
			t := &talk{
				number: len(all), name: name, api: api, stream: i%2 == 0, spelling: spelling(i / 2 % int(spellings)),
				model: s.model, rng: s.rng(i*len(apis) + int(api)),
			}
			t.answer = 20 + t.rng.IntN(80)
			s.say(t, i)
			if i%4 > 1 {
				t.session = fmt.Sprintf("%s-%v-%d", name, api, i)
			}
			all = append(all, t)
		}
	}
	return all
}

// shared returns conversations of which each group has one beginning. The first ones of
// each group come apart: the others find what these have left in the caches.
func (s *shape) shared(name string, group int) (first, others []*talk) {
	for n, t := range s.own(name) {
		i := n / len(s.apis)
		// Prompts are the same within an API alone: each writes them otherwise.
		rng := s.rng(1<<20 + i/group*len(apis) + int(t.api))
		document := textOf(rng, pick(rng, kinds), 3*s.maxText)
		t.system, t.turns[0], t.head = mixed(rng, 2*s.maxText), document+"\n\n"+t.turns[0], newTokens(rng, s.maxText)
		if i%group == 0 {
			t.name = "first to share"
			first = append(first, t)
		} else {
			others = append(others, t)
		}
	}
	return first, others
}

// edited returns conversations with a history that the client changes: every second
// time a message in the middle, else the oldest one.
func (s *shape) edited(name string) []*talk {
	all := s.own(name)
	for i, t := range all {
		t.edit = change + edit(i/len(s.apis)%2)
	}
	return all
}

// parallel returns conversations in which the client asks three questions at once.
func (s *shape) parallel(name string) []*talk {
	all := s.own(name)
	for _, t := range all {
		t.branches = 2
	}
	return all
}

// plans returns all conversations by text, in the lists that follow each other.
func (s *shape) plans(more bool) [][]*talk {
	own := s.own("own")
	if !more {
		return [][]*talk{own}
	}
	few := *s
	few.conversations = max(4, s.conversations/5)
	first, others := few.shared("shared", 4)
	return [][]*talk{own, first, others, few.edited("edited"), few.parallel("parallel")}
}

// question returns what the user says next.
func (t *talk) question() spoken {
	m := spoken{role: "user"}
	if t.api == tokenIDs {
		m.ids = newTokens(t.rng, 50+t.rng.IntN(350))
	} else {
		m.text = t.turns[t.taken]
	}
	return m
}

// change changes the history before a turn, as the talk's edit says. The oldest message
// stays where it has the system prompt in it.
func (t *talk) change() {
	switch i := t.taken; {
	case t.edit == change && i > 1 && i%2 == 0:
		t.history = slices.Clone(t.history)
		m := &t.history[len(t.history)/2]
		m.text = "(shortened) " + m.text[len(m.text)/2:]
		for len(m.text) > 12 && m.text[12]&0xc0 == 0x80 { // not within a character
			m.text = m.text[:12] + m.text[13:]
		}
		m.ids, m.item = m.ids[len(m.ids)/2:], nil
	case t.edit == drop && i > 2 && t.api != tokenIDs:
		t.history = slices.Clone(t.history[2:])
	}
}
