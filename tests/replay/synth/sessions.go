package synth

import "math"

// chat is conversations of several tenants, each with a system prompt. The number of
// turns, lengths and think times are lognormal.
func chat(m *maker) {
	const (
		conversations, rate      = 900, 2.2
		tenants, system, popular = 12, 1500.0, 1.0
		turns, most              = 5.0, 30
		question, answer, think  = 150.0, 250.0, 25.0
	)
	prompts, which := m.fleet(tenants, system, 0.6), m.zipf(tenants, popular)
	for at, i := 0.0, 0; i < conversations; i++ {
		at += m.gap(rate)
		p, s, pause := prompts[which()], m.session(), 0.0
		for turn := range min(most, int(math.Ceil(m.lognormal(turns, 0.9)))) {
			p = m.more(p, m.tokens(question, 1))
			out := m.tokens(answer, 0.8)
			m.ask(at, s, turn, p, out, pause)
			p, pause = m.more(p, out), m.lognormal(think, 0.8)
		}
	}
}

// agents is long sessions with the same tools, whose steps follow each other fast.
// Some fork: a sub-agent goes on from the same context with a task of its own.
func agents(m *maker) {
	const (
		sessions, spread       = 48, 240.0
		tools, task, step, out = 9000.0, 8000.0, 1100.0, 220.0
		steps, think           = 40.0, 4.0
		forks, forkSteps       = 0.04, 10.0
	)
	shared := m.fresh(tools)
	// work adds the turns of one agent and of those that it forks.
	var work func(at float64, p prompt, turns float64, deep int)
	work = func(at float64, p prompt, turns float64, deep int) {
		s, pause := m.session(), 0.0
		for turn := range max(2, int(m.lognormal(turns, 0.5))) {
			answer := m.tokens(out, 0.8)
			if p.tokens+answer >= longest {
				return
			}
			m.ask(at, s, turn, p, answer, pause)
			pause = m.lognormal(think, 0.9)
			p = m.more(p, answer+m.tokens(step, 1.1))
			// When a step begins is not known here: about five seconds each.
			if deep == 0 && m.Float64() < forks {
				work(at+float64(turn+1)*(think+5), m.more(p, m.tokens(600, 0.5)), forkSteps, 1)
			}
		}
	}
	for range sessions {
		work(m.Float64()*spread, m.more(shared, m.tokens(task, 0.8)), steps, 0)
	}
}

// samePromptSequence asks one prompt again and again, each time after the answer. It
// should be computed once.
func samePromptSequence(m *maker) {
	const times, in, out, pause = 400, 16_000, 60.0, 2.0
	p, s := m.fresh(in), m.session()
	for turn := range times {
		m.ask(0, s, turn, p, m.tokens(out, 0.4), pause)
	}
}

// regenerate is conversations in which the last turn is often asked again.
func regenerate(m *maker) {
	const (
		conversations, rate     = 450, 1.2
		first, question, answer = 3000.0, 200.0, 250.0
		turns, again, think     = 6, 0.4, 12.0
	)
	for at, i := 0.0, 0; i < conversations; i++ {
		at += m.gap(rate)
		p, s, turn := m.fresh(m.tokens(first, 1)), m.session(), 0
		for range 1 + m.IntN(turns) {
			p = m.more(p, m.tokens(question, 0.8))
			for {
				out := m.tokens(answer, 0.6)
				m.ask(at, s, turn, p, out, m.lognormal(think, 0.6))
				if turn++; m.Float64() > again {
					p = m.more(p, out)
					break
				}
			}
		}
	}
}
