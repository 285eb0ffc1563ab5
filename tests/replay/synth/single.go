package synth

import "math"

// noReuse is traffic in which no two prompts have anything in common. A policy
// must not be worse than the least load.
func noReuse(m *maker) {
	const requests, rate, in, out = 4000, 25.0, 2000.0, 150.0
	for at, i := 0.0, 0; i < requests; i++ {
		at += m.gap(rate)
		m.ask(at, m.session(), 0, m.fresh(m.tokens(in, 0.8)), m.tokens(out, 0.8), 0)
	}
}

// rush is questions about documents in bursts. Documents are as popular as the system prompts
// of the trace shared_prefix: 22 %, 11 %, 7 % and so on. Bursts have 2.5 times the mean rate,
// as the fullest 5 s of mooncake_conversation_a.
func rush(m *maker) {
	const requests, rate, n, length, popular, question, answer = 6000, 12.0, 50, 7000.0, 1.0, 100.0, 290.0
	const hot, cold, burst = 5.0, 20.0, 2.5
	docs, which := m.fleet(n, length, 0.3), m.zipf(n, popular)
	for at, i := 0.0, 0; i < requests; i++ {
		now := rate * (hot + cold - hot*burst) / cold
		if math.Mod(at, hot+cold) < hot {
			now = rate * burst
		}
		at += m.gap(now)
		m.ask(at, m.session(), 0, m.more(docs[which()], m.tokens(question, 0.6)), m.tokens(answer, 0.7), 0)
	}
}

// lognormal is short chats without reuse: many short prompts and a few long ones.
func lognormal(m *maker) { chats(m, 1) }

// lognormalBursts has four times the rate for a fifth of the time.
func lognormalBursts(m *maker) { chats(m, 4) }

// chats is single prompts. For a fifth of the time, the rate is burst times that of the rest.
func chats(m *maker, burst float64) {
	const requests, rate, in, longest, out, hot, cold = 6000, 30.0, 1000.0, 14_000, 170.0, 4.0, 16.0
	at, until, bursting := 0.0, 0.0, burst > 1
	for range requests {
		for burst > 1 && at >= until {
			bursting = !bursting
			length := cold
			if bursting {
				length = hot
			}
			until += m.ExpFloat64() * length
		}
		now := rate * (hot + cold) / (hot*burst + cold)
		if bursting {
			now *= burst
		}
		at += m.gap(now)
		m.ask(at, m.session(), 0, m.fresh(min(longest, m.tokens(in, 1))), m.tokens(out, 0.8), 0)
	}
}

// systemFits has few system prompts: each worker can hold all of them, and should.
func systemFits(m *maker) { systems(m, 8) }

// systemThrashes has more system prompts than a worker can hold, and fewer than all
// workers together: they should be spread.
func systemThrashes(m *maker) { systems(m, 96) }

// systems is requests that are short but for one of n system prompts. Most
// conversations have one turn.
func systems(m *maker, n int) {
	const (
		conversations, rate          = 3500, 25.0
		system, question, answer     = 6000.0, 300.0, 120.0
		goesOn, most, pause, popular = 0.15, 4, 20.0, 0.5
	)
	prompts, which := m.fleet(n, system, 0.1), m.zipf(n, popular)
	for at, i := 0.0, 0; i < conversations; i++ {
		at += m.gap(rate)
		p, s, when := prompts[which()], m.session(), at
		for turn := range most {
			p = m.more(p, m.tokens(question, 0.7))
			out := m.tokens(answer, 0.7)
			m.ask(when, s, turn, p, out, 0)
			if m.Float64() > goesOn {
				break
			}
			p = m.more(p, out)
			when += 5 + m.lognormal(pause, 0.5)
		}
	}
}

// samePromptAtOnce sends copies of a new prompt all at once, every now and then. Each
// worker that gets one has to compute it, unless they wait for each other.
func samePromptAtOnce(m *maker) {
	const bursts, copies, every, in, out = 80, 32, 20.0, 8000.0, 100.0
	for i := range bursts {
		p, at := m.fresh(m.tokens(in, 0.3)), every*float64(i)+m.Float64()
		for range copies {
			m.ask(at, m.session(), 0, p, m.tokens(out, 0.5), 0)
		}
	}
}

// giants is many small requests and a few giant prompts, which hold up all that
// wait behind them.
func giants(m *maker) {
	const (
		requests, rate = 4000, 16.0
		small, out     = 600.0, 100.0
		share, giant   = 0.01, 90_000.0
	)
	for at, i := 0.0, 0; i < requests; i++ {
		at += m.gap(rate)
		in := m.tokens(small, 0.8)
		if m.Float64() < share {
			in = m.tokens(giant, 0.15)
		}
		m.ask(at, m.session(), 0, m.fresh(in), m.tokens(out, 0.8), 0)
	}
}

// siblings comes in bursts: a long prompt that is common to a burst, and tails that
// differ, as of evaluations and fan-outs.
func siblings(m *maker) {
	const bursts, rate, common, tail, out, most = 350, 0.5, 12_000.0, 250.0, 150.0, 16
	for at, i := 0.0, 0; i < bursts; i++ {
		at += m.gap(rate)
		p, when := m.fresh(m.tokens(common, 0.5)), at
		for range 4 + m.IntN(most-3) {
			m.ask(when, m.session(), 0, m.more(p, m.tokens(tail, 0.5)), m.tokens(out, 0.5), 0)
			when += m.gap(50)
		}
	}
}

// idle is one request at a time in a pool without load: conversations whose turns
// should find their history. Waiting does not matter, only what is computed.
func idle(m *maker) {
	const requests, every, fresh, first, question, answer = 600, 8.0, 0.3, 6000.0, 200.0, 100.0
	type talk struct {
		prompt
		session, turns int
	}
	var talks []*talk
	for i := range requests {
		var t *talk
		if len(talks) == 0 || m.Float64() < fresh {
			t = &talk{prompt: m.fresh(m.tokens(first, 0.8)), session: m.session()}
			talks = append(talks, t)
		} else {
			recent := min(len(talks), 12)
			t = talks[len(talks)-1-m.IntN(recent)]
		}
		t.prompt = m.more(t.prompt, m.tokens(question, 0.7))
		out := m.tokens(answer, 0.7)
		m.ask(every*float64(i)+m.Float64(), t.session, t.turns, t.prompt, out, 0)
		t.prompt = m.more(t.prompt, out)
		t.turns++
	}
}

// documents is short questions about long documents, of which some are popular. All
// of them together do not fit into one worker.
func documents(m *maker) {
	const requests, rate, n, length, popular, question, answer = 3500, 9.0, 300, 12_000.0, 0.9, 80.0, 200.0
	docs, which := m.fleet(n, length, 0.7), m.zipf(n, popular)
	for at, i := 0.0, 0; i < requests; i++ {
		at += m.gap(rate)
		m.ask(at, m.session(), 0, m.more(docs[which()], m.tokens(question, 0.6)), m.tokens(answer, 0.7), 0)
	}
}
