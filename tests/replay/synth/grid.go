package synth

import (
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"

	"github.com/caddy-kvrouter/kvrouter/tests/replay/trace"
)

// classes are the kinds of traffic of the grid: what most pools serve. Each makes the next
// conversation of a client, as the prompts and answers of its turns.
var classes = []struct {
	name  string
	think float64 // seconds between the turns of a client
	make  func(*maker) func() []turn
}{
	{"prompt_512", 20, func(m *maker) func() []turn { return m.onePrompt(512) }},
	{"prompt_4k", 20, func(m *maker) func() []turn { return m.onePrompt(4032) }},
	{"prompt_16k", 20, func(m *maker) func() []turn { return m.onePrompt(16_384) }},
	{"hundred_prompts", 20, (*maker).hundredPrompts},
	{"chats", 25, (*maker).chatsOnePrompt},
	{"tool_agents", 4, (*maker).toolAgents},
	{"retrieval", 20, (*maker).retrieval},
	{"reasoning", 40, (*maker).reasoning},
	{"batch", 10, (*maker).batch},
	{"mix", 20, (*maker).mix},
	{"bursts", 20, (*maker).bursts},
}

// turn is one request of a conversation.
type turn struct {
	prompt prompt
	answer int
}

// Classes returns the names of the classes of the grid.
func Classes() []string {
	names := make([]string, len(classes))
	for i := range classes {
		names[i] = classes[i].name
	}
	return names
}

// clients is the number of clients for each worker, if all begin at once.
const clients = 12

// MakeClass generates a trace of a class for a number of workers. If all clients begin at once,
// each sends one request after the other. Else conversations begin independently of each other, or
// groups of them do.
func MakeClass(name string, workers int, atOnce bool, seed uint64) (*trace.Trace, error) {
	i := slices.Index(Classes(), name)
	if i < 0 {
		return nil, fmt.Errorf("there is no class %q", name)
	}
	c, h := &classes[i], fnv.New64a()
	h.Write([]byte(name))
	m := &maker{Rand: rand.New(rand.NewPCG(seed, h.Sum64()))} //nolint:gosec // to be repeated
	m.trace = &trace.Trace{Name: "grid:" + name, BlockTokens: block, Closed: true, Sessions: true, AtOnce: atOnce}
	next, total := c.make(m), min(max(1200, 600*workers), 6000)
	if atOnce {
		n := clients * workers
		for s := range n {
			number, asked := m.session(), 0
			for asked < total/n+1 {
				for _, t := range next() {
					pause := m.ExpFloat64() * c.think
					if asked == 0 {
						pause = 0
					}
					m.ask(0.0002*float64(s), number, asked, t.prompt, t.answer, pause)
					asked++
				}
			}
		}
	} else {
		for at := 0.0; len(m.trace.Requests) < total; at += m.gap(float64(workers)) {
			group := 1
			if m.group > 1 {
				group += m.IntN(m.group)
			}
			for range group {
				number := m.session()
				for i, t := range next() {
					m.ask(at, number, i, t.prompt, t.answer, m.ExpFloat64()*c.think)
				}
			}
		}
		m.trace.Closed = slices.ContainsFunc(m.trace.Requests, func(q trace.Request) bool { return q.Turn > 0 })
	}
	m.trace.Sort()
	return m.trace, nil
}

// one returns a conversation of one turn.
func one(p prompt, answer int) []turn { return []turn{{p, answer}} }

// onePrompt is short questions behind one system prompt.
func (m *maker) onePrompt(system int) func() []turn {
	p := m.fresh(system)
	return func() []turn { return one(m.more(p, m.tokens(200, 0.7)), m.tokens(120, 0.7)) }
}

// hundredPrompts is short questions behind one of a hundred system prompts.
func (m *maker) hundredPrompts() func() []turn {
	prompts, which := m.fleet(100, 3000, 0.3), m.zipf(100, 0.7)
	return func() []turn { return one(m.more(prompts[which()], m.tokens(200, 0.7)), m.tokens(120, 0.7)) }
}

// talk returns a conversation that begins with p.
func (m *maker) talk(p prompt, turns int, question, answer float64) (all []turn) {
	for range turns {
		p = m.more(p, m.tokens(question, 0.9))
		out := m.tokens(answer, 0.8)
		all = append(all, turn{p, out})
		p = m.more(p, out)
	}
	return all
}

// chatsOnePrompt is conversations that share a system prompt.
func (m *maker) chatsOnePrompt() func() []turn {
	p := m.fresh(2000)
	return func() []turn { return m.talk(p, min(20, 1+int(m.lognormal(4, 0.9))), 150, 250) }
}

// toolAgents is agents that share their tools and take many steps.
func (m *maker) toolAgents() func() []turn {
	tools := m.fresh(6000)
	return func() []turn {
		return m.talk(m.more(tools, m.tokens(2000, 0.8)), min(24, 2+int(m.lognormal(10, 0.5))), 600, 150)
	}
}

// retrieval is questions behind documents in changing order.
func (m *maker) retrieval() func() []turn {
	const documents, each = 200, 4
	system, which := m.fresh(512), m.zipf(documents, 0.6)
	lengths := make([]int, documents)
	for i := range lengths {
		lengths[i] = m.tokens(900, 0.4)/block*block + block
	}
	behind := map[string]prompt{"": system}
	return func() []turn {
		p, order := system, ""
		for range each {
			d := which()
			order += fmt.Sprint(d, ",")
			known, ok := behind[order]
			if !ok {
				known = m.more(p, lengths[d])
				behind[order] = known
			}
			p = known
		}
		return one(m.more(p, m.tokens(80, 0.6)), m.tokens(200, 0.7))
	}
}

// reasoning is long answers after short prompts.
func (m *maker) reasoning() func() []turn {
	return func() []turn { return one(m.fresh(m.tokens(300, 0.8)), min(10_000, m.tokens(2500, 0.6))) }
}

// batch is prompts that share nothing.
func (m *maker) batch() func() []turn {
	return func() []turn { return one(m.fresh(min(30_000, m.tokens(1500, 0.8))), m.tokens(200, 0.8)) }
}

// bursts is batches whose requests come in groups of up to 16 at one time.
func (m *maker) bursts() func() []turn {
	m.group = 16
	return m.batch()
}

// mix is chats, questions about documents, and a few very long prompts.
func (m *maker) mix() func() []turn {
	chat, documents, which := m.chatsOnePrompt(), m.fleet(60, 8000, 0.5), m.zipf(60, 0.8)
	return func() []turn {
		switch x := m.Float64(); {
		case x < 0.04:
			return one(m.fresh(min(50_000, m.tokens(40_000, 0.15))), m.tokens(200, 0.7))
		case x < 0.5:
			p := documents[which()]
			p.tokens = min(p.tokens, 40_000)
			p.blocks = p.blocks[:p.tokens/block]
			return one(m.more(p, m.tokens(80, 0.6)), m.tokens(200, 0.7))
		}
		return chat()
	}
}
