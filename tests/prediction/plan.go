package prediction

import (
	"fmt"
	"math/rand/v2"
)

// Plan is what a client says in one conversation.
type Plan struct {
	// Case names the group of conversations in a report.
	Case   string
	API    API
	Stream bool
	// Spelling is how the client writes JSON.
	Spelling Spelling
	// Session is the value of X-Session-Id. Empty: the client sends none.
	Session string
	System  string
	Turns   []string // what the user says
	Answer  int      // tokens of each answer, at most
	// Edit is what the client does to its history before some turns.
	Edit Edit
	// Branches is how many more questions the client asks at the same time in
	// each later turn, of which it forgets the answers.
	Branches int
}

// Edit is how a client changes its history.
type Edit int

// The edits.
const (
	Keep   Edit = iota
	Change      // changes a message in the middle
	Drop        // drops the oldest question and its answer
)

// Shape is how large conversations are.
type Shape struct {
	Conversations int // of each API
	Turns         int
	// MinText and MaxText bound each text of a user and each system prompt, in
	// bytes.
	MinText, MaxText int
	Seed             uint64
}

func (s Shape) rng(stream int) *rand.Rand {
	return rand.New(rand.NewPCG(s.Seed, uint64(stream))) //nolint:gosec // not a secret
}

func (s Shape) size(rng *rand.Rand) int { return s.MinText + rng.IntN(s.MaxText-s.MinText+1) }

// say returns the texts of a conversation. A third of conversations have one kind
// of text, a third another one in each message, and a third several in a message.
func (s Shape) say(rng *rand.Rand, i int) (system string, turns []string) {
	own := Kinds[i/3%len(Kinds)]
	text := func() string {
		switch i % 3 {
		case 0:
			return Text(rng, own, s.size(rng))
		case 1:
			return Text(rng, pick(rng, Kinds), s.size(rng))
		default:
			return Mixed(rng, s.size(rng))
		}
	}
	system = text()
	for range s.Turns {
		turns = append(turns, text())
	}
	return system, turns
}

// conversation returns the conversation number i of an API. Every second one is
// streamed.
func (s Shape) conversation(name string, api API, i int) Plan {
	rng := s.rng(i*len(APIs) + int(api))
	p := Plan{Case: name, API: api, Stream: i%2 == 0, Spelling: Spelling(i / 2 % int(spellings)), Answer: 20 + rng.IntN(80)}
	p.System, p.Turns = s.say(rng, i)
	if i%4 > 1 {
		p.Session = fmt.Sprintf("%s-%d-%d", name, api, i)
	}
	return p
}

// Own returns conversations that have nothing in common.
func (s Shape) Own(name string) (all []Plan) {
	for i := range s.Conversations {
		for _, api := range APIs {
			all = append(all, s.conversation(name, api, i))
		}
	}
	return all
}

// Shared returns conversations of which each group has one system prompt and a
// document in the first question. The first ones of each group come apart: the
// others find what these have left in the caches.
func (s Shape) Shared(name string, group int) (first, others []Plan) {
	for i := range s.Conversations {
		for _, api := range APIs {
			// Prompts are the same within an API alone: each writes them otherwise.
			rng := s.rng(1<<20 + i/group*len(APIs) + int(api))
			system, document := Mixed(rng, 2*s.MaxText), Text(rng, pick(rng, Kinds), 3*s.MaxText)
			p := s.conversation(name, api, i)
			p.System, p.Turns[0] = system, document+"\n\n"+p.Turns[0]
			if i%group == 0 {
				first = append(first, p)
			} else {
				others = append(others, p)
			}
		}
	}
	return first, others
}

// Edited returns conversations with a history that the client changes. In every
// second conversation that is a message in the middle, else the oldest one.
func (s Shape) Edited(name string) []Plan {
	all := s.Own(name)
	for i := range all {
		all[i].Edit = Change + Edit(i/len(APIs)%2)
	}
	return all
}

// Parallel returns conversations in which the client asks three questions at once.
func (s Shape) Parallel(name string) []Plan {
	all := s.Own(name)
	for i := range all {
		all[i].Branches = 2
	}
	return all
}
